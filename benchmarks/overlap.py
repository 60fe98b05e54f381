"""One-step-off generation: seconds of a step of the package's own loop without and with ``rollout.overlap``.

The server, a process of its own, waits instead of computing: it takes nothing from the update, as one on other devices
would not. How long it takes per token is set from a measured update, for each ratio of generation to update. Results go
to ``--out`` as JSON (every step) and as a Markdown table; README.md has the command.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "helpers")]

import sglang_cases as cases  # noqa: E402
import tiny_runs  # noqa: E402

from benchmarks import sglang, step  # noqa: E402
from benchmarks.contenders.work import others_seconds  # noqa: E402
from brorl_jax import config as config_lib  # noqa: E402
from brorl_jax import train, xla  # noqa: E402
from brorl_jax.config import Config  # noqa: E402
from brorl_jax.data.tokenizer import train_tokenizer  # noqa: E402
from brorl_jax.models import hf  # noqa: E402
from brorl_jax.models.config import ModelConfig  # noqa: E402

Result = dict[str, Any]
COMPILING = 2  # first steps, left out; so is the last one, beside which nothing is drawn
MEDIANS = ("step_s", "collect_s", "update_s", "publish_s", "rest_s", "hidden_s")


def model(width: int, layers: int) -> ModelConfig:
    """A Qwen3 over bytes, its head not tied."""
    shape = {"hidden": width, "layers": layers, "heads": width // 32, "kv_heads": width // 32, "head_dim": 32}
    return ModelConfig(
        "qwen3", tied=False, rope_theta=1e4, max_positions=4096, vocab_size=cases.VOCAB, ffn=3 * width, **shape
    )


def endless(cfg: ModelConfig) -> Any:
    """Weights that the fake server can compute, under which no response ends before its limit."""
    params = cases.table_weights(cfg)
    # One coordinate is positive before every token; the stop token's logit is that times -100.
    embed, norm = params["embed"].at[:, 0].set(1.0), params["final_norm"].at[0].set(1.0)
    head = params["head"].at[:, cases.STOP].set(0.0).at[0, cases.STOP].set(-100.0)
    return params | {"embed": embed, "final_norm": norm, "head": head}


def config(folder: Path, url: str, options: argparse.Namespace, *, overlap: bool) -> Config:
    """The same work in every step. Updates leave the weights as they are, since the fake server can compute one kind of
    model only: no response ends, so all advantages are 0, and the learning rate is too small to matter."""
    c = tiny_runs.config(folder, **{"rollout.engine": "sglang", "model.path": str(folder / "model")})
    c.rollout.update(overlap=overlap, prompts_per_step=options.prompts, n=options.n, max_tokens=options.tokens)
    c.rollout.stop_ids = ()
    c.rollout.sglang.update(urls=(url,), weights_dir=str(folder / "weights"))
    c.data.max_prompt_tokens = 24
    c.filter.dynamic = False
    c.grading.plugins = ("tiny_runs",)  # has the data's verifier
    c.optim.lr = 1e-30
    c.batch.update(slots=1, rows=options.n, row_tokens=options.tokens)
    c.train.steps = COMPILING + options.steps + 1
    c.eval.update(every=0, before_training=False)
    c.diagnostics.mass_balance_every = 0  # takes longer without overlap than with it
    config_lib.validate(c)
    return c


class Stamp(NamedTuple):
    """A moment: the clock, and the processor seconds that others have used."""

    clock: float
    others: float


@contextlib.contextmanager
def stamps() -> Iterator[list[Stamp]]:
    """Meanwhile gets one at the beginning of every step of the loop."""
    found: list[Stamp] = []

    def stamped(session: Any, original: Any = train.step) -> Any:
        found.append(Stamp(time.perf_counter(), others_seconds()))
        return original(session)

    with mock.patch.object(train, "step", stamped):
        yield found


def run(options: argparse.Namespace, token_s: float, *, overlap: bool) -> list[Result]:
    """The timed steps of a run against a server that takes ``token_s`` per token."""
    cfg = model(options.width, options.layers)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        train_tokenizer(["say 10"], cases.VOCAB, folder / "tokenizer")
        hf.save_pretrained(folder / "model", cfg, endless(cfg), folder / "tokenizer")
        boot = cases.boot_directory(folder / "boot", cfg)
        (url,) = stack.enter_context(sglang.fakes(1, boot, token_s))
        at = stack.enter_context(stamps())
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        train.run(config(folder, url, options, overlap=overlap), folder / "run")
        rows = tiny_runs.metrics(folder / "run")
    timed = zip(rows[COMPILING:-1], list(itertools.pairwise(at))[COMPILING:], strict=True)
    return [figures(row, *ends) for row, ends in timed]


def figures(row: Mapping[str, float], began: Stamp, ended: Stamp) -> Result:
    """Of a step: seconds by the benchmark's own clock, the loop's by part, and what was done."""
    seconds = ended.clock - began.clock
    waited = row["time/rollout_s"] + row.get("time/reward_s", 0.0)
    update = sum(row[f"time/{phase}_s"] for phase in ("pack", "score", "update"))
    return {
        "step_s": seconds,
        "collect_s": row.get("overlap/collect_s", waited),
        "update_s": update,
        "publish_s": row["time/publish_s"],
        "rest_s": seconds - waited - update,
        "hidden_s": row.get("overlap/hidden_s", 0.0),
        "staleness": row.get("overlap/staleness", 0.0),
        "generated_tokens": row["tokens/generated"],
        "trained_tokens": row["batch/tokens"],
        "others_cores": max(0.0, (ended.others - began.others) / seconds),
    }


def summary(steps: list[Result], tokens: int, age: float) -> Result:
    """Medians, and ``wrong``: where a step had not ``tokens`` generated, or trained on, all ``age`` updates old."""
    want = {"generated_tokens": tokens, "trained_tokens": tokens, "staleness": age}
    wrong = [
        f"timed step {i}: {key} {row[key]:g} instead of {value:g}"
        for i, row in enumerate(steps)
        for key, value in want.items()
        if row[key] != value
    ]
    medians = {key: statistics.median(row[key] for row in steps) for key in MEDIANS}
    return medians | {"others_cores": max(row["others_cores"] for row in steps), "wrong": wrong, "steps": steps}


def predicted(off: Result) -> float:
    """Seconds of a step with overlap, from the parts of one without."""
    return max(off["collect_s"], off["update_s"]) + off["rest_s"]


def measure(options: argparse.Namespace) -> Result:
    """Every ratio, off and on."""
    tokens = options.prompts * options.n * options.tokens
    alone = summary(run(options, 0.0, overlap=False), tokens, 0.0)
    out: Result = {}
    for ratio in options.ratios:
        token_s = ratio * alone["update_s"] / options.tokens
        off, on = (summary(run(options, token_s, overlap=on), tokens, float(on)) for on in (False, True))
        out[f"{ratio:g}"] = {"token_s": token_s, "off": off, "on": on, "predicted_s": predicted(off)}
    return out


def table(options: argparse.Namespace, out: Mapping[str, Result], where: str) -> str:
    lines = [
        "# One-step-off generation",
        "",
        f"{options.prompts} prompts x {options.n} rollouts of {options.tokens} tokens from a server that waits, one "
        f"update; Qwen3 of {options.layers} layers, width {options.width}; float32 on CPU. Median of {options.steps} "
        "steps. Generation and update are those of the run without overlap.",
        "",
        where,
        "",
        "| ratio | generation s | update s | publish and the rest s | step off s | step on s | predicted s "
        "| `overlap/hidden_s` | off / on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ratio, r in out.items():
        off, on = r["off"], r["on"]
        cells = [off["collect_s"], off["update_s"], off["rest_s"], off["step_s"], on["step_s"], r["predicted_s"]]
        cells += [on["hidden_s"]]
        gain = f"{off['step_s'] / on['step_s']:.2f}x"
        lines.append(f"| {ratio} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {gain} |")
    lines += ["", "Predicted: the longer of generation and update, and the rest."]
    both = [(f"ratio {ratio}, {side}", r[side]) for ratio, r in out.items() for side in ("off", "on")]
    busiest = max(r["others_cores"] for _, r in both)
    lines += ["", f"Other processes, the server among them, used up to {busiest:.2f} cores during a step."]
    lines += [f"\n**{name} is wrong:** {'; '.join(r['wrong'])}." for name, r in both if r["wrong"]]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="generation over update")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--prompts", type=int, default=2, help="per step")
    parser.add_argument("--n", type=int, default=16, help="rollouts per prompt")
    parser.add_argument("--tokens", type=int, default=32, help="per rollout")
    parser.add_argument("--width", type=int, default=384, help="of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results", help="folder of the results")
    options = parser.parse_args(argv)
    where = step.machine()
    out = measure(options)
    page = table(options, out, step.machine_line(where))
    options.out.mkdir(parents=True, exist_ok=True)
    work = {key: value for key, value in vars(options).items() if key != "out"}
    everything = {"machine": where, "work": work, "cases": out}
    (options.out / "overlap.json").write_text(json.dumps(everything, indent=1) + "\n")
    (options.out / "overlap.md").write_text(page)
    print(page)
    return 1 if any(r[side]["wrong"] for r in out.values() for side in ("off", "on")) else 0


if __name__ == "__main__":
    xla.set_cpu_flags()  # as brorl_jax.main does
    sys.exit(main())
