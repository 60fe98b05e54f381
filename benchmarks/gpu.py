"""What a borrowed GPU shows in minutes: the update of a 0.6-billion model at 16,384 tokens, and that it is right there.

Stages, each a process of its own, so that its memory is its own: ``step-cudnn`` and ``step-blockwise`` (tokens/s, MFU,
peak memory, compilations), ``attention`` (cuDNN against float32) and ``head`` (what the chunked head plans for).
Results go to ``--out`` after every stage. README.md has the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.contenders import ours  # noqa: E402
from benchmarks.contenders.work import MARK, Work  # noqa: E402
from brorl_jax import devices  # noqa: E402
from brorl_jax.batches import pack_updates  # noqa: E402
from brorl_jax.data.packing import Layout  # noqa: E402
from brorl_jax.learner import optim  # noqa: E402
from brorl_jax.learner import state as state_lib  # noqa: E402
from brorl_jax.learner.head import logp_and_entropy  # noqa: E402
from brorl_jax.learner.step import Compute, make_train_step  # noqa: E402
from brorl_jax.models import attention, flops, sharding, transformer  # noqa: E402
from brorl_jax.models.config import ModelConfig  # noqa: E402
from brorl_jax.types import Status  # noqa: E402

Result = dict[str, Any]
# Published for a full fine-tune step of this size at 16k context on one H100; its MFU is by its own formula.
KNOWN_BEST = {"tokens_per_s": 11_900, "mfu": 0.111, "peak_gib": 12.5}


@dataclasses.dataclass(frozen=True)
class Size:
    """Qwen3-0.6B's shape (its ``config.json``), and one prompt with ``n`` rollouts that fill the context."""

    vocab: int = 151_936
    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 3072
    context: int = 16_384
    prompt: int = 1024
    n: int = 4
    steps: int = 5
    head_chunk: int = 512
    block: int = 1024

    def model(self) -> ModelConfig:
        return ModelConfig(
            "qwen3", vocab_size=self.vocab, hidden=self.hidden, layers=self.layers, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=self.head_dim, ffn=self.ffn, rope_theta=1e6,
        )  # fmt: skip


FULL = Size()
TINY = Size(vocab=64, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=16, context=32, prompt=8, n=2, steps=1,
            head_chunk=16, block=8)  # fmt: skip


def update(size: Size, form: str) -> Result:
    """Updates of one compiled program: bfloat16 compute and moments, float32 weights, layers recomputed."""
    cfg, response = size.model(), size.context - size.prompt
    optimizer = optim.make_optimizer(
        1e-6, warmup_steps=0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=1.0, moment_dtype=jnp.bfloat16
    )
    compute = Compute(jnp.bfloat16, "full", size.head_chunk, attention=form, attention_block=size.block)
    mesh = sharding.make_mesh()

    def create() -> state_lib.TrainState:
        return state_lib.create(transformer.init(jax.random.key(0), cfg), optimizer, reference=False)

    state = jax.jit(create, out_shardings=sharding.like_weights(mesh, cfg, jax.eval_shape(create)))()
    train_step = make_train_step(cfg, ours.objective(response), compute, optimizer, state)
    work = Work(n=size.n, prompt_tokens=size.prompt, response_tokens=response, vocab=size.vocab, micro_rows=1)
    groups = ours.made_up(work)
    for i, sample in enumerate(groups[0].samples):
        sample.status, sample.advantage = Status.TRUNCATED, 1.0 if i % 2 else -1.0
    batch = pack_updates(groups, Layout(1, 1, response), 1, mesh)[0]
    plan = train_step.lower(state, batch).compile().memory_analysis()  # type: ignore[attr-defined]
    seconds, trained, norm = [], 0, 0.0
    for _ in range(size.steps + 2):
        start = time.perf_counter()
        state, metrics, _ = train_step(state, batch)
        metrics = jax.device_get(metrics)
        seconds.append(time.perf_counter() - start)
        trained, norm = int(metrics["batch/tokens"]), float(metrics["optim/grad_norm"])
    median = statistics.median(seconds[2:])
    useful = flops.train(cfg, flops.group(size.prompt, [response] * size.n))
    device, peak = devices.find(jax.devices()[0].device_kind), jax.devices()[0].memory_stats()
    return {
        "device": jax.devices()[0].device_kind,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "seconds": seconds,
        "trained_tokens": trained,
        "grad_norm": norm,
        "tokens_per_s": trained / median,
        "tokens_per_s_with_prompts": size.n * size.context / median,  # as one counts who repeats the prompt
        "model_flops": useful,
        "mfu": useful / median / device.flops if device else None,
        "peak_gib": peak["peak_bytes_in_use"] / 2**30 if peak else None,
        "planned_gib": (plan.temp_size_in_bytes + plan.argument_size_in_bytes) / 2**30,
        "compilations": train_step._cache_size(),  # type: ignore[attr-defined]
        "wrong": [
            complaint
            for complaint, bad in {
                f"trained {trained} tokens": trained != size.n * response,
                f"the gradient's norm is {norm}": not norm > 0 or not np.isfinite(norm),
                "an update compiled again": train_step._cache_size() != 1,  # type: ignore[attr-defined]
            }.items()
            if bad
        ],
    }


def compare_attention(size: Size, implementation: str) -> Result:
    """Packed rows beside a prompt, in bfloat16: every form's distance from float32 in value and gradients."""
    length, prefix = min(size.context // 8, 1024), min(size.prompt // 4, 128)
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(1, 2, length, size.heads, size.head_dim)] + [(1, 2, length, size.kv_heads, size.head_dim)] * 2
    shapes += [(1, prefix, size.kv_heads, size.head_dim)] * 2
    arrays = [jax.random.normal(k, s).astype(jnp.bfloat16) for k, s in zip(keys, shapes, strict=False)]
    cotangent = jax.random.normal(keys[5], shapes[0])
    ends = jnp.array([[length // 3, length - length // 4], [length, length]])  # two segments and padding; one
    places = jnp.arange(length)
    segments = ((places < ends[:, :1]) + 2 * ((places >= ends[:, :1]) & (places < ends[:, 1:])))[None].astype(jnp.int32)
    lengths = jnp.full(1, prefix - prefix // 4)

    def gradients(form: Callable[..., Any], arrays: list[Any]) -> list[Any]:
        def total(*arrays: Any) -> Any:
            out = form(*arrays).astype(jnp.float32)
            return jnp.sum(jnp.where((segments > 0)[..., None, None], cotangent * out, 0.0)), out

        found, out = jax.jit(jax.grad(total, argnums=range(5), has_aux=True))(*arrays)
        return [jnp.where((segments > 0)[..., None, None], out, 0.0), *found]

    def xla(q: Any, k: Any, v: Any, prefix_k: Any, prefix_v: Any) -> Any:
        visible = jnp.arange(prefix) < lengths[:, None]
        return attention.attend_with_prefix(q, k, v, attention.segment_mask(segments), prefix_k, prefix_v, visible)

    def joined(q: Any, k: Any, v: Any, prefix_k: Any, prefix_v: Any) -> Any:
        return attention.attend_joined(q, k, v, segments, prefix_k, prefix_v, lengths, implementation=implementation)

    def blockwise(q: Any, k: Any, v: Any, prefix_k: Any, prefix_v: Any) -> Any:
        return attention.blockwise.attend(q, k, v, segments, prefix_k, prefix_v, lengths, block=size.block)

    with jax.default_matmul_precision("highest"):
        exact = gradients(xla, [x.astype(jnp.float32) for x in arrays])
    names = ("out", "q", "k", "v", "prefix_k", "prefix_v")
    errors = {}
    for form in (xla, blockwise, joined):
        found = gradients(form, arrays)
        parts = [
            jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b) for a, b in zip(found, exact, strict=True)
        ]
        errors[form.__name__] = dict(zip(names, map(float, parts), strict=True))
    wrong = [
        f"{form}: {name} is off by {error:.3g} of its norm, the reference form by {errors['xla'][name]:.3g}"
        for form in ("blockwise", "joined")
        for name, error in errors[form].items()
        if not error < max(2 * errors["xla"][name], 0.01)
    ]
    return {"errors": errors, "implementation": implementation, "wrong": wrong}


def head(size: Size) -> Result:
    """Bytes of buffers that the head's value and gradient plan for, chunked and whole."""
    tokens = size.context

    def total(hidden: Any, weight: Any, ids: Any, chunk: int) -> Any:
        return jnp.sum(logp_and_entropy(hidden, weight, ids, chunk=chunk)[0])

    arrays = (
        jax.ShapeDtypeStruct((tokens, size.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((size.hidden, size.vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    run = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=3)
    planned: dict[str, int] = {}
    for name, chunk in (("chunked", size.head_chunk), ("whole", tokens)):
        plan: Any = run.lower(*arrays, chunk).compile().memory_analysis()
        planned[name] = plan.temp_size_in_bytes
    wrong = [] if planned["chunked"] < planned["whole"] else ["the chunked head needs no less than the whole one"]
    return planned | {"logits_bytes": 4 * tokens * size.vocab, "wrong": wrong}


def stages(tiny: bool) -> dict[str, Callable[[], Result]]:
    size = TINY if tiny else FULL
    return {
        "step-cudnn": lambda: update(size, "xla" if tiny else "cudnn"),
        "step-blockwise": lambda: update(size, "blockwise"),
        "attention": lambda: compare_attention(size, "xla" if tiny else "cudnn"),
        "head": lambda: head(size),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results", help="folder of gpu.json")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a stage may take")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, and no cuDNN: to try the script on a CPU")
    parser.add_argument("--stage", choices=stages(True), help="run one, here, and print its result")
    options = parser.parse_args(argv)
    if options.stage:
        print(MARK + json.dumps(stages(options.tiny)[options.stage]()), flush=True)
        return 0
    out: Result = {"known_best": KNOWN_BEST, "stages": {}}  # this process leaves the device alone: it would hold memory
    options.out.mkdir(parents=True, exist_ok=True)
    for stage in stages(options.tiny):
        command = [sys.executable, __file__, "--stage", stage] + (["--tiny"] if options.tiny else [])
        result: Result = {"wrong": ["no result; see its messages above"]}
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.timeout)
        except subprocess.TimeoutExpired:
            result = {"wrong": [f"took longer than {options.timeout:g} s (--timeout)"]}
        else:
            for line in done.stdout.splitlines():
                result = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else result
        out["stages"][stage] = result
        print(f"{stage}: {json.dumps(result)}", flush=True)
        (options.out / "gpu.json").write_text(json.dumps(out, indent=1) + "\n")
    return 1 if any(result["wrong"] for result in out["stages"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
