"""The verifier of one's own that docs/verifiers.md shows: it passes the config check and grades, as written there."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from brorl_jax import config as config_lib
from brorl_jax import rewards
from brorl_jax.errors import UserError
from brorl_jax.rewards import registry
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

PAGE = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text()


def block(start):
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if code.startswith(start)]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that runs are started from, with the page's module in it."""
    (tmp_path / "roman.py").write_text(block('"""Roman'))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("roman", None)
    registry._SCORERS.pop("roman", None)
    rewards.get.cache_clear()


def prompt(gold):
    return Prompt(f"numerals/{gold}", np.zeros(1, np.int32), "", gold, "roman", "numerals")


def config_of(lines):
    config = config_lib.default()
    config.data.train.sums = config_lib.source("reasoning_gym", task="basic_arithmetic")
    exec(lines, {"config": config, "config_lib": config_lib})
    return config


def test_the_page_s_verifier_grades(folder):
    rewards.load_plugins(("roman",))
    answers = {"XIV": 1.0, "14": 0.0, "XIIII": 1.0, "VX": 0.0}
    nothing = np.zeros(0, np.float32)
    samples = [
        Sample(i, i, nothing, nothing, Finish.STOP, 0, rf"\boxed{{{answer}}}") for i, answer in enumerate(answers)
    ]
    rewards.grade([Group(prompt("XIV"), samples)])  # by workers, which find the module, too
    assert [s.status for s in samples] == [Status.OK] * 4
    assert [s.reward for s in samples] == list(answers.values())
    assert rewards.self_test([prompt("IX"), prompt("MCMXCIV")]) == 2
    with pytest.raises(ValueError, match=r"(?s)refuses 1 of 2 gold answers.*numerals/14, roman:boxed"):
        rewards.self_test([prompt("IX"), prompt("14")])


def test_the_page_s_test_passes(folder):
    rewards.load_plugins(("roman",))
    names = {"rewards": rewards}
    exec(block("def test_roman"), names)
    names["test_roman"](prompt("XIV"))


def test_the_page_s_config_is_accepted_and_needs_the_plugin(folder):
    """Where the sources are checked; the file need not be there."""
    lines = block("config.grading.plugins")
    config_lib.validate(config_of(lines))
    with pytest.raises(config_lib.ConfigError, match="verifier = 'roman': unknown verifier"):
        config_lib.validate(config_of(lines.partition("\n")[2]))


def test_a_plugin_that_can_not_be_imported_is_named(folder):
    with pytest.raises(UserError, match="plugins: 'romans' can't be imported"):
        config_lib.validate(config_of("config.grading.plugins = ('romans',)"))
    (folder / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"'broken' can't be imported \(ZeroDivisionError"):
        rewards.load_plugins(("broken",))
    config = config_of("config.grading.plugins = ('roman',); config.data.train.sums.verifier = 'romen'")
    with pytest.raises(config_lib.ConfigError, match="did you mean 'roman'"):
        config_lib.validate(config)


def rows(title):
    table = PAGE.partition(f"| {title} |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


def test_the_page_lists_what_there_is():
    assert set(rows("Format")) == set(rewards.FORMATS)
    usual = {name: rewards.get(name).format.name for name in config_lib.VERIFIERS}
    assert rows("Scorer") == {name: f"`{form}`" for name, form in usual.items()}
