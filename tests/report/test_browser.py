"""The report in a real browser: no error, no network, no overflow, and its controls do what they say."""

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from brorl_jax.report import write_report

_spec = importlib.util.spec_from_file_location("synthetic_runs", Path(__file__).with_name("synthetic_runs.py"))
synthetic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic)

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"


def _missing(what):
    """Skip where a developer has no browser; in CI that is a failure."""
    reason = f"{what} is missing: the report was not looked at in a browser"
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        _missing("Chromium (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright (pip install playwright)")
    with sync_playwright() as play:
        instance = play.chromium.launch(executable_path=program, args=FLAGS.split())
        yield instance
        instance.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    one = synthetic.write_run(root / "n16", n=16, hostile=True)
    two = synthetic.write_run(root / "n64", n=64, done=41, seed=1)
    synthetic.write_served(root / "served")
    (root / "new").mkdir()
    (root / "new" / "config.json").write_text("{}")
    return {
        "one": write_report([one]),
        "two": write_report([one, two], root / "two.html"),
        "served": write_report([root / "served"]),
        "new": write_report([root / "new"]),
    }


@pytest.fixture
def open_page(browser, reports):
    contexts = []

    def opener(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.seen = []
        page.on("console", lambda message: page.seen.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.seen.append(f"error: {error}"))
        page.on("request", lambda request: page.seen.append(request.url))
        page.goto(reports[name].as_uri())
        page.wait_for_selector("footer p")
        assert page.seen.pop(0) == reports[name].as_uri()
        return page

    yield opener
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["one", "two", "new"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark"), (360, "light")])
def test_loads_without_error_or_network_and_fits(open_page, name, width, scheme):
    page = open_page(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.pwned") is None
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart svg").count() == {"one": 24, "two": 24, "new": 0}[name]
    assert page.seen == []


def test_the_panels_of_rollout_servers(open_page):
    page = open_page("served")
    section = page.locator("#curves > section", has=page.get_by_role("heading", name="Rollout servers"))
    titles = "Generation|Server tokens|Publishing|Prefix cache|Requests running|Requests queued|Attempts that failed"
    assert section.locator("h3").all_inner_texts() == [*titles.split("|"), "Samples dropped", "Servers"]
    dropped = section.locator(".chart", has=page.get_by_role("heading", name="Samples dropped"))
    assert (
        dropped.locator("line.grid").count() == 2 and "0.5" not in dropped.text_content()
    )  # whole samples, not below 0
    missing = page.locator("#curves > p.aside").text_content()
    assert "entropy, KL to the reference, " in missing and "model FLOPs utilisation" in missing
    assert page.seen == []


def test_times_begin_with_the_first_step_not_with_the_evaluation_before_it(open_page):
    page = open_page("served")
    svg = page.locator(".chart", has=page.get_by_role("heading", name="Time of a step")).locator("svg")
    paths = svg.locator("path.area").evaluate_all("nodes => nodes.map((n) => n.getAttribute('d'))")
    assert len(paths) == 3  # rollout, update, other
    first = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", paths[0])]
    assert len(first) == 6 and len(set(first[:3])) == 1  # three steps of equal time, there and back


def test_security_policy_stops_what_the_report_did_not_write(open_page):
    page = open_page("one")
    blocked = page.evaluate("""() => new Promise((resolve) => {
      const seen = [];
      document.addEventListener('securitypolicyviolation', (e) => {
        if (seen.push(`${e.effectiveDirective} ${e.blockedURI}`) === 2) resolve(seen.sort());
      });
      const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; document.body.append(s);
      const i = document.createElement('img'); i.src = 'https://example.invalid/x.png'; document.body.append(i);
    })""")
    assert blocked == ["img-src https://example.invalid/x.png", "script-src-elem inline"]
    assert page.evaluate("window.pwned") is None


def test_hostile_response_is_shown_as_text_with_its_control_characters_visible(open_page):
    page = open_page("one")
    page.get_by_role("combobox", name="step").select_option("30")
    for k in range(page.locator(".prompts button").count()):
        page.locator(".prompts button").nth(k).click()
        text = page.locator(".rollouts").text_content()
        if "pwned" in text:
            break
    assert "</script><script>window.pwned=1</script><!-- <img src=x onerror=" in text
    assert "␀␇␛[31m⟨U+2028⟩⟨U+2029⟩⟨U+202E⟩gnirts⟨U+202C⟩ é漢字 😀" in text
    assert page.locator(".rollouts img, .rollouts script").count() == 0 and page.evaluate("window.pwned") is None
    assert page.seen == []


def test_rollouts_come_sorted_by_reward_and_can_be_sorted_otherwise(open_page):
    page = open_page("one")
    read = "nodes => nodes.map((n) => parseFloat(n.textContent))"
    page.locator(".prompts button").nth(1).click()
    best_first = page.locator(".rollouts .reward b").evaluate_all(read)
    assert best_first == sorted(best_first, reverse=True) and {0.0, 1.0} == set(best_first)
    page.get_by_role("combobox", name="rollouts").select_option("reward, worst first")
    assert page.locator(".rollouts .reward b").evaluate_all(read) == best_first[::-1]
    assert page.locator(".prompts button[aria-pressed=true]").count() == 1


def test_runs_toggle_axis_and_smoothing_change_the_curves(open_page):
    page = open_page("two")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Reward", exact=True))
    lines = chart.locator("path.line")
    assert lines.count() == 2
    assert "n16" in chart.locator("svg").get_attribute("aria-label")
    by_step = lines.first.get_attribute("d")
    page.get_by_label("samples", exact=True).check(force=True)
    assert "over samples" in chart.locator("svg").get_attribute("aria-label")
    assert lines.nth(1).get_attribute("d") != by_step
    page.get_by_label("smoothing").first.fill("0.9")
    assert chart.locator("path.line.raw").count() == 2
    held_out = page.locator(".chart", has=page.get_by_role("heading", name="Held-out accuracy"))
    assert (held_out.locator("path.line").count(), held_out.locator("path.line.raw").count()) == (2, 0)
    page.get_by_role("checkbox", name="n64").uncheck()
    assert chart.locator("path.line:not(.raw)").count() == 1
    page.get_by_role("checkbox", name="n16").uncheck()
    assert "No data in the runs shown" in chart.text_content()
    assert page.seen == []


def test_every_source_of_a_mixture_has_a_panel_with_two_lines_a_run(open_page):
    for name, runs in (("one", 1), ("two", 2)):
        panels = open_page(name).locator("#sources figure")
        assert panels.count() == 2
        for panel, source in zip(panels.all(), ("sums", "words"), strict=True):
            assert source in panel.locator("figcaption").inner_text()
            assert panel.locator("path.line").count() == 2 * runs
    assert open_page("new").locator("#sources").count() == 0


def test_values_are_read_with_the_keyboard_and_the_pointer(open_page):
    page = open_page("two")
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Held-out accuracy"))
    chart.locator("svg").focus()
    page.keyboard.press("Home")
    assert chart.locator(".tip").inner_text().split() == ["step", "0", "n16", "31%", "n64", "31%"]
    page.keyboard.press("End")
    assert chart.locator(".tip").inner_text().split()[:3] == ["step", "60", "n16"]
    page.keyboard.press("Escape")
    assert chart.locator(".tip").is_hidden()
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 0.99 * box["width"], box["y"] + 50)
    tip = chart.locator(".tip").bounding_box()
    assert tip["x"] + tip["width"] <= box["x"] + box["width"]
    assert page.seen == []


def test_text_has_enough_contrast_in_both_schemes(open_page):
    script = """() => {
      const parse = (c) => c.match(/[\\d.]+/g).map(Number);
      const lum = (c) => parse(c).slice(0, 3).map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const back = (n) => { for (; n; n = n.parentElement) {
        const c = getComputedStyle(n).backgroundColor;
        if ((parse(c)[3] ?? 1) > 0) return c;
      } return 'rgb(255,255,255)'; };
      const low = [];
      for (const n of document.querySelectorAll('body *:not(script):not(style):not(.skip):not(option)')) {
        if (![...n.childNodes].some((c) => c.nodeType === 3 && c.data.trim()) || !n.getClientRects().length) continue;
        const style = getComputedStyle(n), a = lum(n.closest('svg') ? style.fill : style.color), b = lum(back(n));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${n.tagName}.${n.getAttribute('class')} ${n.textContent}`);
      }
      return [...new Set(low)];
    }"""
    for scheme in ("light", "dark"):
        assert open_page("two", scheme=scheme).evaluate(script) == []
