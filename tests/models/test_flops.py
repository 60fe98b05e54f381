"""Closed-form model FLOPs: against sums by hand, and against what XLA counts in the real update."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from tiny_cases import objective, packed, prompt, sample

from brorl_jax.data.packing import Layout
from brorl_jax.learner.step import Compute, make_gradient, make_score
from brorl_jax.models import flops, transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.types import Group

# One layer and one chunk of the head: XLA counts a loop's body once, however often it runs.
CFG = ModelConfig("qwen3", vocab_size=512, hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, ffn=192, tied=False)


def test_work_of_a_group_counts_its_prompt_once():
    # Prompt of 3: places 0 and 1 look at 1 and 2 keys. Each response's first input is the prompt's last token, which
    # sees both and itself.
    assert flops.group(3, [1, 2]) == flops.Work(tokens=2 + 3, predictions=3, pairs=(1 + 2) + 3 + (3 + 4))
    assert flops.group(1, [2]) == flops.Work(2, 2, 1 + 2)
    assert flops.group(3, [1]) + flops.group(1, [2]) == flops.Work(5, 3, 9)


def test_parameters_are_those_of_the_weights():
    cfg = dataclasses.replace(CFG, layers=3)
    weights = transformer.shapes(cfg)
    matrices = [shape for shape in weights["layers"].values() if len(shape) == 3]
    assert flops.layer_params(cfg) == sum(map(np.prod, matrices))
    assert flops.head_params(cfg) == np.prod(weights["head"])


def executed(layout, prefix):
    """What the program multiplies out for one micro-batch, masked or not, in place of what is needed."""
    places = layout.slots * layout.rows * layout.row_tokens
    pairs = places * (layout.row_tokens + prefix) + layout.slots * prefix * prefix
    return flops.Work(layout.slots * prefix + places, places, pairs)


@pytest.mark.parametrize("layout", [Layout(2, 2, 32), Layout(1, 4, 64)])
def test_closed_form_agrees_with_what_xla_counts(layout):
    groups = [Group(prompt("p", range(33)), [sample(range(24))]) for _ in range(layout.slots)]
    batch = packed(groups, layout)
    weights = jax.eval_shape(lambda: transformer.init(jax.random.key(0), CFG))
    compute = Compute(head_chunk=4096)
    work = executed(layout, batch.prefix.shape[-1])
    programs: list[Any] = [make_score(CFG, compute), jax.jit(make_gradient(CFG, objective(), compute))]
    forward, gradient = (program.lower(weights, batch).cost_analysis()["flops"] for program in programs)
    # XLA adds what is not a matrix product: a few operations per score, activation and logit.
    assert 1 <= forward / flops.forward(CFG, work) < 1.1
    # The head computes its logits a second time on the way back.
    again = 2 * flops.head_params(CFG) * work.predictions
    assert 1 <= gradient / (flops.train(CFG, work) + again) < 1.1
