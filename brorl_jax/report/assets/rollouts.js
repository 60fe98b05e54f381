/* The browser of prompts and their rollouts. */

const SORTS = {
  "reward, best first": (a, b) => worth(b) - worth(a),
  "reward, worst first": (a, b) => worth(a) - worth(b),
  "longest first": (a, b) => b.n_tokens - a.n_tokens,
  "likeliest first": (a, b) => (b.mean_logp ?? -Infinity) - (a.mean_logp ?? -Infinity),
};
const worth = (r) => r.reward ?? -1;
const fixed = (v, digits) => (v === null || v === undefined ? "–" : v.toFixed(digits).replace("-", "−"));
const level = (reward) => (reward === null || reward === undefined ? "none" : reward >= 1 ? "high" : reward > 0 ? "mid" : "low");

/** The last line of a prompt that holds words: what tells prompts of one template apart. */
function gist(prompt) {
  const rows = prompt.split("\n").map((row) => row.replace(/<\|[^|]*\|>\s*(system|user|assistant)?/g, "").trim()).filter(Boolean);
  return rows[rows.length - 1] || "(empty prompt)";
}

function strip(group) {
  const node = el("span", { class: "strip", "aria-hidden": "true" });
  for (const [kind, count] of Object.entries(group.levels)) {
    if (count) { const bar = el("i", { class: kind }); bar.style.flexGrow = count; node.append(bar); }
  }
  return node;
}

function rolloutCard(r) {
  const text = el("pre", { text: r.response || "(empty response)", tabindex: 0 });
  const more = el("button", { class: "more", type: "button", text: "Show all", "aria-expanded": "false", click: () => {
    const open = text.classList.toggle("open");
    more.textContent = open ? "Show less" : "Show all";
    more.setAttribute("aria-expanded", String(open));
  } });
  const long = (r.response || "").length > 700 || (r.response || "").split("\n").length > 10;
  const fact = (label, value) => el("span", { class: "fact" }, el("small", { text: label }), " ", el("span", { text: value }));
  const shaped = r.shaped_reward !== null && r.shaped_reward !== undefined && r.shaped_reward !== r.reward;
  return el("li", { class: "rollout" }, el("div", { class: "facts" },
    el("span", { class: `reward ${level(r.reward)}` }, el("small", { text: "reward" }), " ", el("b", { text: r.reward === null ? "none" : fixed(r.reward, 2) })),
    r.samples.length > 1 && el("b", { class: "times", title: `${r.samples.length} rollouts gave this response`, text: `× ${r.samples.length}` }),
    shaped && fact("shaped", fixed(r.shaped_reward, 2)), fact("advantage", fixed(r.advantage, 3)), fact("ended by", r.finish),
    fact("status", r.status ?? "–"), fact("tokens", r.n_tokens), fact("mean logp", fixed(r.mean_logp, 3)),
    r.samples.length > 1 ? fact("samples", r.samples.slice(0, 6).join(", ") + (r.samples.length > 6 ? ", …" : "")) : fact("sample", r.samples[0])),
  text, long && more);
}

/** The section; `select(label, options, current, change)` makes a labelled choice. */
function browser(runs, select) {
  const withText = runs.filter((run) => run.prompts.length);
  const section = el("section", { class: "card browser" }, el("h2", { text: "Prompts and rollouts" }));
  if (!withText.length) {
    section.append(el("p", { class: "empty", text: "These runs kept no rollouts (log.rollouts, or no step has finished)." }));
    return section;
  }
  const state = { run: withText[0], step: null, group: null, sort: Object.keys(SORTS)[0] };
  const bar = el("div", { class: "controls inner" }), said = el("p", { class: "aside" });
  const list = el("ul", { class: "prompts", "aria-label": "prompts" }), detail = el("div", { class: "detail" });
  section.append(bar, said, el("div", { class: "panes" }, list, detail));

  const stepsOf = (run) => [...new Set(run.prompts.map((g) => g.step))];
  function chooseRun(run) {
    state.run = run;
    const steps = stepsOf(run);
    chooseStep(steps[steps.length - 1]);
  }
  function chooseStep(step) {
    state.step = +step;
    const groups = state.run.prompts.filter((g) => g.step === state.step);
    bar.replaceChildren(...[
      withText.length > 1 && select("run", withText.map((r, i) => [i, r.name]), withText.indexOf(state.run), (i) => chooseRun(withText[+i])),
      select("step", stepsOf(state.run).map((s) => [s, s]), state.step, chooseStep),
      select("rollouts", Object.keys(SORTS).map((s) => [s, s]), state.sort, (s) => { state.sort = s; chooseGroup(state.group); })].filter(Boolean));
    const { steps, of_steps, cut } = state.run.shown, first = groups[0];
    said.textContent = `Shown: ${steps} of ${of_steps} steps with rollouts on disk; here ${groups.length} of ` +
      `${first.complete ? "" : "at least "}${first.of_prompts} prompts, from the lowest to the highest mean reward` +
      `${cut ? `; ${cut} more prompts did not fit into this file` : ""}. The rest is in the run's rollouts folder.`;
    chooseGroup(groups[groups.length >> 1], groups);
  }
  function chooseGroup(group, groups) {
    state.group = group;
    if (groups) {
      list.replaceChildren(...groups.map((g) => el("li", {}, el("button", { type: "button", click: (e) => {
        list.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === e.currentTarget)));
        chooseGroup(g);
        if (detail.getBoundingClientRect().top < 0) detail.scrollIntoView({ block: "start" });
      }, "aria-pressed": String(g === group) }, el("span", { class: "gist", text: gist(g.prompt) }),
      el("span", { class: "score", text: `${g.solved} of ${g.n} right` }), strip(g)))));
    }
    showGroup(detail, group, SORTS[state.sort]);
  }
  chooseRun(withText[0]);
  return section;
}

function showGroup(detail, group, order) {
  const rollouts = [...group.rollouts].sort(order);
  const outcomes = [...new Set(rollouts.map((r) => r.outcome))].join(", ");
  const some = rollouts.length < group.distinct
    ? `${group.n} rollouts, ${group.distinct} different; the ${rollouts.length} with the highest and lowest rewards are shown`
    : `${group.n} rollouts` + (group.distinct < group.n ? `, ${group.distinct} different` : "");
  detail.replaceChildren(
    el("dl", { class: "question" },
      el("div", {}, el("dt", { text: "prompt" }), el("dd", {}, el("pre", { text: group.prompt, tabindex: 0 }))),
      el("div", {}, el("dt", { text: "gold" }), el("dd", {}, el("code", { text: group.gold || "(none)" }))),
      el("div", {}, el("dt", { text: "group" }), el("dd", { text: `${group.prompt_id} · ${outcomes} · mean reward ${group.mean_reward < 0 ? "–" : group.mean_reward.toFixed(3)} · ${some}` }))),
    el("ol", { class: "rollouts" }, rollouts.map(rolloutCard)));
}
