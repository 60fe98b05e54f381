"""Closed forms of memory and FLOPs against the compiled train step of processor-sized models."""

import dataclasses
import pathlib

import pytest

from brorl_jax import assemble
from brorl_jax.commandline import load
from brorl_jax.models import flops, sharding, transformer
from brorl_jax.plan import fit, memory, predict, program, shapes

REPO = pathlib.Path(__file__).resolve().parents[2]
VOCAB, HIDDEN, LAYERS, FFN, HEADS, KV, HEAD = 4096, 256, 6, 768, 4, 2, 32


def described(remat, tokens, rows, slots, **mesh):
    config = fit.apply(
        load(str(REPO / "configs/quickstart.py")),
        {
            "model.remat": remat,
            "batch.slots": slots,
            "batch.rows": rows,
            "batch.row_tokens": tokens,
            "model.new.hidden": HIDDEN,
            "model.new.ffn": FFN,
            "model.new.layers": LAYERS,
            "model.new.vocab_size": VOCAB,
            "data.max_prompt_tokens": 129,
            "algo.kl.coef": 1e-3,
            **{f"mesh.{axis}": size for axis, size in mesh.items()},
        },
    )
    cfg, _ = shapes.model_config(config, None)
    return program.describe(config, cfg, sharding.make_mesh(**config.mesh), 2)


def matrices():
    """Weights of the layers' matrices, by hand."""
    return LAYERS * HIDDEN * (2 * HEADS * HEAD + 2 * KV * HEAD + 3 * FFN)


def test_state_is_what_its_weights_need():
    """Parameters, reference and two moments in float32; on fsdp=4 a quarter of every matrix and all of every norm."""
    norms = LAYERS * (2 * HIDDEN + 2 * HEAD) + HIDDEN
    for shards in (1, 4):
        needed = predict.bytes_needed(described("full", 64, 1, 4, fsdp=shards), scores=True)
        weights = 4 * ((matrices() + VOCAB * HIDDEN) // shards + norms)
        assert needed["parameters"] == needed["reference"] == weights
        assert needed["optimiser"] == pytest.approx(2 * weights, abs=64)  # and its counters
        assert needed["engine's copy"] == 0


def test_the_embedded_engine_s_weights_by_hand():
    """A shard in bfloat16 beside float32; all of them on one device where it samples during updates."""
    d = described("full", 64, 1, 4, fsdp=4)
    norms = LAYERS * (2 * HIDDEN + 2 * HEAD) + HIDDEN
    config = d.config.copy_and_resolve_references()
    d = dataclasses.replace(d, config=config)
    for changes, weights, item in (
        ({"rollout.overlap": True}, matrices() + VOCAB * HIDDEN + norms, 4),
        ({"model.compute_dtype": "bfloat16"}, matrices() + VOCAB * HIDDEN + norms, 2),
        ({"rollout.overlap": False}, (matrices() + VOCAB * HIDDEN) // 4 + norms, 2),
        ({"rollout.engine": "sglang"}, 0, 2),
    ):
        config.update_from_flattened_dict(changes)
        assert predict.bytes_needed(d, scores=True)["engine's copy"] == item * weights


@pytest.mark.parametrize(
    ("case", "recomputed"),
    [
        (("none", 128, 4, 4), "nothing"),
        pytest.param(("dots", 128, 4, 4), "attention", marks=pytest.mark.slow),
        pytest.param(("full", 512, 2, 4), "layer", marks=pytest.mark.slow),
    ],
)
def test_products_and_temporaries_of_one_device(case, recomputed):
    d = described(*case)
    step, share = program.compile_step(d), predict.share_of(d)
    places, tokens = case[1] * case[2] * case[3], case[1] * case[2] * case[3] + case[3] * 128
    attention = 4 * LAYERS * HEADS * HEAD * (places * (case[1] + 128) + case[3] * 128 * 128)
    layers, head = 2 * matrices() * tokens, 2 * VOCAB * HIDDEN * places
    again = {
        "nothing": 0,
        "attention": attention,
        "layer": layers + attention - 2 * LAYERS * FFN * HIDDEN * tokens,  # all but the last product
    }[recomputed]
    # Forward and twice that backward; the head's logits are always computed a second time.
    assert step.flops(1) == 3 * (layers + attention + head) + head + again
    assert flops.forward(d.cfg, share.work) == layers + attention + head
    needed = predict.bytes_needed(d, scores=True)
    expected = sum(needed[kind] for kind in ("gradients", "activations", "temporaries"))
    assert step.temporaries == pytest.approx(expected, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_temporaries_on_a_mesh(mesh):
    d = described("full", 256, 2, 8, **mesh)
    needed = predict.bytes_needed(d, scores=True)
    expected = sum(needed[kind] for kind in ("gradients", "activations", "temporaries"))
    assert program.compile_step(d).temporaries == pytest.approx(expected, rel=0.3)


def test_keys_and_values_of_the_paper_s_model():
    config = load(str(REPO / "configs/brorl_n512.py"))
    cfg, _ = shapes.model_config(config, None)
    assert memory.kv_bytes(cfg, 2) == 2 * 28 * 2 * 128 * 2
    weights = transformer.shapes(cfg)
    assert weights["embed"] == (151_936, 1536) and weights["layers"]["gate"] == (28, 1536, 8960)
    assert assemble.layout(config).row_tokens == 16_384
