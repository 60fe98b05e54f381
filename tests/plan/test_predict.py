"""Times and meshes by hand; mistakes end in one line."""

import pathlib

import pytest
from absl import flags

from brorl_jax import assemble
from brorl_jax.commandline import load
from brorl_jax.devices import DEVICES
from brorl_jax.errors import UserError
from brorl_jax.plan import fit, page, predict, shapes
from brorl_jax.plan.hlo import Collective, Product
from brorl_jax.plan.program import Compiled

REPO = pathlib.Path(__file__).resolve().parents[2]
H100 = DEVICES["h100"]


def paper():
    return load(str(REPO / "configs/brorl_n512.py"))


def test_links_within_and_between_nodes():
    assert predict.link(H100, tuple(range(8))) == 450e9
    assert predict.link(H100, (0, 8, 16)) == 50e9  # one card each
    assert predict.link(H100, tuple(range(16))) == 8 * 50e9  # eight cards a node


def test_time_of_a_program_by_hand():
    products = [Product(10**15, 10**9, False, 2, True), Product(10**12, 4 * 10**9, True, 1, False)]
    collectives = [Collective("all-gather", 8 * 10**9, tuple(range(8)), 3, True, "")]
    assumed = predict.Assumed(tokens=1, pass_rate=1, mfu=0.5, bandwidth=0.5)
    program = Compiled(products, collectives, 0, 0, 0.0)
    t = predict.program_time(program, 5, H100, assumed, half=True, scores=True, state=10**9)
    assert t.compute == pytest.approx((10 * 10**15 + 10**12) / (989.5e12 / 2))
    assert t.memory == pytest.approx((10 + 4 + 1) * 1e9 / (3.35e12 / 2))
    assert t.network == pytest.approx(15 * 7e9 / 450e9)
    assert (t.least, t.most) == (t.compute, t.compute + t.memory + t.network)
    flash = predict.program_time(program, 5, H100, assumed, half=True, scores=False)
    assert flash.memory == pytest.approx(10e9 / (3.35e12 / 2))


def test_micro_batches_of_the_paper_s_step():
    """32 groups an update in 64 slots of one row: 512 rows a group at full length, 256 if two responses fit a row."""
    assert assemble.micro_batches(paper(), 15_360) == 32 * 512 // 64
    assert assemble.micro_batches(paper(), 8_000) == 32 * 256 // 64


def test_meshes():
    config = paper()
    assert fit.choose_mesh(config, 64, 8) == {}
    assert fit.choose_mesh(config, 16, 8) == {"mesh.data": 2, "mesh.fsdp": 8}
    assert fit.choose_mesh(config, 6, 8) == {"mesh.data": 1, "mesh.fsdp": 6, "batch.slots": 66}
    config.mesh.tensor = 4
    with pytest.raises(UserError, match=r"--devices=6 is not a multiple of 4"):
        fit.choose_mesh(config, 6, 8)


def test_a_tensor_axis_that_does_not_divide_the_heads_is_said():
    cfg, _ = shapes.model_config(paper(), None)  # 12 query heads, 2 of keys and values
    assert [fit.cut_heads(cfg, n) for n in (1, 2)] == [[], []]
    assert fit.cut_heads(cfg, 4) == ["the 2 key/value heads"]
    assert fit.cut_heads(cfg, 8) == ["the 12 query heads", "the 2 key/value heads"]


def test_times_have_the_unit_that_suits_them():
    assert page.span(0.00123, 0.5) == "0.00123 to 0.5 s" and page.span(3, 119) == "3 to 119 s"
    assert page.span(30, 120) == "0.5 to 2.0 min" and page.span(60, 7199) == "1.0 to 120.0 min"
    assert page.span(3600, 7200) == "1.0 to 2.0 h" and page.span(3600, 36e5) == "1.0 to 1,000.0 h"


def test_the_smallest_change_is_one_alone_then_the_first_ones_together():
    options = [{"a": 1}, {"b": 1}, {"c": 1}]
    saves = {"a": 3, "b": 5, "c": 1}

    def needed(change):
        return 10 - sum(saves[key] for key in change)

    assert fit.smallest_change(options, needed, 5) == ({"b": 1}, 5)
    assert fit.smallest_change(options, needed, 2) == ({"a": 1, "b": 1}, 2)
    assert fit.smallest_change(options, needed, 0) is None


def test_a_model_of_unknown_shape_says_what_to_do(tmp_path):
    config = paper()
    config.model.path = "someone/else"
    with pytest.raises(UserError, match=r"someone/else.*--model_config=FILE"):
        shapes.model_config(config, None)
    with pytest.raises(UserError, match="no model shape"):
        shapes.model_config(config, str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--device=h1000"], "--device=h1000: unknown; known are b200, h200"),
        (["--devices=-1"], "--devices=-1"),
        (["--mfu=40"], "--mfu=40: a share"),
        (["--mean_tokens=20000"], "between 0 and rollout.max_tokens = 15360"),
    ],
)
def test_a_mistake_is_one_line(arguments, fragment, capsys):
    from brorl_jax.commandline import parser
    from brorl_jax.plan import __main__ as command

    saved = flags.FLAGS.__dict__["__flags"].copy()
    try:
        with pytest.raises(SystemExit) as stop:
            parser("x", command._finish)(["plan", f"--config={REPO}/configs/brorl_n512.py", *arguments])
    finally:
        flags.FLAGS.unparse_flags()
        for name in set(flags.FLAGS.__dict__["__flags"]) - set(saved):
            delattr(flags.FLAGS, name)
        for argument in arguments:
            name = argument.split("=")[0].strip("-")
            flags.FLAGS[name].value = flags.FLAGS[name].default
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and fragment in line
