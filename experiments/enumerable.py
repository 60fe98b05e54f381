"""The sequence-level picture: the real learner on a task whose every answer can be scored.

A small transformer answers 8 prompts with 3 tokens out of 16, so there are 4,096 possible answers to each; an eighth of
them, drawn at random, is right. It is trained by the package's own loop (``train.step``: embedded engine, grading,
dynamic sampling, advantages, packing, compiled update) with N rollouts per prompt, and after every step all answers are
scored: correct mass, pass@k, worst drop and retained mass are sums, not estimates. Beside it stands what the one-step
theory [P] says about each trained group before the update, with the sequences as the theorem's tokens.

Two arms. ``recipe``: PPO-clip with clip-higher, four updates a step, REINFORCE++-baseline, KL to the start.
``one_step``: a single on-policy update on group-centred rewards without KL, which is nearest to the theory.

python -m experiments.enumerable      # everything; CSV and figures into experiments/results/enumerable
python -m experiments.enumerable --n 4 64 --seeds 1 --steps 10 --out build/enumerable
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from brorl_jax import assemble, train, xla
from brorl_jax import config as config_lib
from brorl_jax.commandline import make_folder
from brorl_jax.interrupt import Stop
from brorl_jax.learner.step import Compute, make_score, make_train_step
from brorl_jax.metrics import PhaseTimer
from brorl_jax.models import sharding, transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rewards import Grader, registry
from brorl_jax.rollout.local import LocalEngine
from brorl_jax.session import Session
from brorl_jax.theory import enumerable, mass_balance
from brorl_jax.theory.precision import float64
from brorl_jax.types import Group, Prompt
from experiments import files
from experiments.enumerable_figure import draw

VOCAB, LENGTH, PROMPTS, RIGHT = 16, 3, 8, 1 / 8
SIZES = (2, 4, 8, 16, 64, 512)
KS = (1, 16, 128)
STEPS = 50
ARMS = ("recipe", "one_step")
LIVE = ("unsampled", "sign_certain", "mood_abs")  # of the diagnostics that any run logs
MASSES = (0.25, 0.5, 0.75)  # where runs are compared
REPORTED = ("step", "samples", "pass@16", "improved", "worst_drop", "retained", "entropy")
CFG = ModelConfig(
    "qwen3", vocab_size=VOCAB + PROMPTS, hidden=32, layers=2, heads=2, kv_heads=2, head_dim=16, ffn=64,
    max_positions=8, tied=False,
)  # fmt: skip
SPREAD = 15.0  # of the output projection over its usual start: answers then differ in probability by e^2.5, not by 2 %
BALANCES = [functools.partial(mass_balance.balance, reading=reading) for reading in mass_balance.READINGS]


class Digits:
    """Stands in for a tokenizer: an answer is its token numbers in answer tags."""

    vocab_size = VOCAB
    stop_ids: tuple[int, ...] = ()

    def decode(self, tokens: Iterable[int]) -> str:
        return f"<answer>{' '.join(map(str, tokens))}</answer>"


@registry.register("listed", default_format="tag", where="inline")
def listed(answer: str, prompt: Prompt) -> float:
    """1 if the prompt's table has the answer."""
    return float(answer in prompt.meta["right"])


class Cycle:
    """The prompts in turn; one that is asked for again gets new seeds from the loop."""

    def __init__(self, prompts: Sequence[Prompt]):
        self._prompts, self._at = prompts, 0

    def take(self, n: int) -> list[Prompt]:
        self._at += n
        return [self._prompts[i % len(self._prompts)] for i in range(self._at - n, self._at)]

    def state(self) -> int:
        return self._at

    def restore(self, state: int) -> None:
        self._at = state


def config(arm: str, n: int, seed: int) -> Any:
    """The settings of one run. The learning rate does not depend on N, as in the paper's simulation; with Adam, one
    update at 4e-4 moves weights about as far as four at 1e-4."""
    c = config_lib.default()
    c.seed = seed
    c.rollout.update(n=n, prompts_per_step=PROMPTS, max_tokens=LENGTH)
    c.batch.update(slots=2, rows=min(n, 64), row_tokens=LENGTH)
    c.optim.update(lr=4e-4 if arm == "one_step" else 1e-4, lr_rule="constant")
    c.diagnostics.mass_balance_every = 1
    if arm == "one_step":
        c.algo.update(updates_per_step=1, loss="reinforce", advantage="dr_grpo", normalise="none")
        c.algo.kl.coef = 0.0
    else:
        c.algo.updates_per_step = 4
        c.algo.kl.coef = 1e-3
    c.algo.mismatch.kind = "none"
    return config_lib.freeze(c)


def task(seed: int) -> tuple[list[Prompt], np.ndarray]:
    """The prompts and which of all answers to each are right, ``[PROMPTS, VOCAB ** LENGTH]``."""
    answers = enumerable.all_sequences(VOCAB, LENGTH)
    right = np.random.default_rng(seed).random((PROMPTS, len(answers))) < RIGHT
    prompts = []
    for i, row in enumerate(right):
        table = {" ".join(map(str, answer)) for answer in answers[row].tolist()}
        prompts.append(
            Prompt(f"table/{i}", np.array([VOCAB + i], np.int32), "", "", "listed", "table", {"right": table})
        )
    return prompts, right


def weights(seed: int) -> Any:
    """Random weights whose answers already differ in probability, as those of a trained model do."""
    drawn = transformer.init(jax.random.key(seed), CFG)
    return drawn | {"head": SPREAD * drawn["head"]}


class Arm:
    """The compiled programs of one arm and N; every seed runs them again."""

    def __init__(self, arm: str, n: int):
        self.arm, self.n = arm, n
        fixed = config(arm, n, 0)
        compute = Compute(real_vocab=VOCAB, head_chunk=1 << 14)
        mesh = sharding.make_mesh(1, 1, 1)
        shapes = jax.eval_shape(lambda: weights(0))
        self.model = assemble.Model(
            cfg=CFG,
            weights=lambda: None,
            shapes=shapes,
            compute=compute,
            mesh=mesh,
            tokenizer=Digits(),  # pyright: ignore[reportArgumentType]
        )
        self.optimizer = assemble.optimizer(fixed, assemble.learning_rate(fixed), 0)
        self.make_state, placed = assemble.training_state_maker(fixed, self.model, self.optimizer)
        self.train_step = make_train_step(CFG, assemble.objective(fixed), compute, self.optimizer, placed)
        self.score = make_score(CFG, compute)

    def session(self, seed: int, prompts: Sequence[Prompt]) -> Session:
        """A run of the package's loop, at its start."""
        c = config(self.arm, self.n, seed)
        session = Session(
            config=c,
            workdir=Path(),
            model=self.model,
            held_out={},
            prompts=Cycle(prompts),  # pyright: ignore[reportArgumentType]
            engine=LocalEngine(CFG, rows=4096, chunk=LENGTH, real_vocab=VOCAB),
            grader=Grader(),
            optimizer=self.optimizer,
            train_step=self.train_step,
            score=self.score,
            set_advantages=assemble.advantage_setter(c),
            mass_balance=assemble.mass_balance(c, self.model),
            checkpointer=None,  # pyright: ignore[reportArgumentType]
            timer=PhaseTimer(),
            stop=Stop(),
            state=self.make_state(weights(seed)),
        )
        session.engine.publish(session.state.params, 0)
        return session


@functools.partial(jax.jit, static_argnames=("vocab", "length"))
def _logps(params: Any, prompts: Any, *, vocab: int, length: int) -> Any:
    return enumerable.sequence_logps(params, CFG, prompts, vocab=vocab, length=length)


def probabilities(params: Any, prompts: Sequence[Prompt]) -> np.ndarray:
    """Of every answer to every prompt, float64."""
    logp = _logps(params, np.stack([p.tokens for p in prompts]), vocab=VOCAB, length=LENGTH)
    return np.exp(np.asarray(logp, np.float64))


def prompt_number(group: Group) -> int:
    """Which of the prompts."""
    return int(group.prompt.tokens[0]) - VOCAB


def predicted(groups: Sequence[Group], p: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The theorem's bracket of each trained group, ``[groups, readings]``: its answers as the theorem's tokens."""
    out = []
    for group in groups:
        prompt = prompt_number(group)
        digits = np.stack([s.tokens for s in group.samples])
        drawn = np.ravel_multi_index(tuple(digits.T), (VOCAB,) * LENGTH)
        counts = np.bincount(drawn, minlength=p.shape[1])
        rewards = right[prompt] - np.mean([s.reward for s in group.samples])
        out.append(
            [
                float(mass_balance.terms(float64(balance)(p[prompt], right[prompt], counts, rewards)).total)
                for balance in BALANCES
            ]
        )
    return np.array(out).reshape(-1, len(BALANCES))


def run(arm: Arm, seed: int, steps: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """After every step the exact figures, and of every trained prompt the predicted and the true change of its mass."""
    prompts, right = task(seed)
    session = arm.session(seed, prompts)
    start = before = probabilities(session.state.params, prompts)
    name = {"arm": arm.arm, "n": arm.n, "seed": seed}
    samples = 0
    yield {**name, "step": 0, "samples": 0, **enumerable.figures(start, start, right, KS), **dict.fromkeys(LIVE)}, []
    for step in range(1, steps + 1):
        metrics, fates = train.step(session)
        samples += int(metrics["samples/generated"])
        after = probabilities(session.state.params, prompts)
        change = np.sum(after - before, axis=1, where=right)
        trained = [group for group, fate in fates if fate == "trained"]
        pairs = [
            {**name, "step": step, **dict(zip(mass_balance.READINGS, brackets, strict=True)), "change": change[number]}
            for number, brackets in zip(map(prompt_number, trained), predicted(trained, before, right), strict=True)
        ]
        live = {key: metrics.get(f"mass_balance/{key}", math.nan) for key in LIVE}
        yield {**name, "step": step, "samples": samples, **enumerable.figures(start, after, right, KS), **live}, pairs
        before = after


def agreement(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per arm, N and reading: how often the theorem's sign is that of the true change, and their rank correlation."""
    rows = []
    for (arm, n), found in itertools.groupby(pairs, lambda row: (row["arm"], row["n"])):
        table = np.array([[row["change"], *(row[reading] for reading in mass_balance.READINGS)] for row in found])
        ranks = np.argsort(np.argsort(table, axis=0), axis=0)
        row = {"arm": arm, "n": n, "groups": len(table), "went_up": np.mean(table[:, 0] > 0)}
        for i, reading in enumerate(mass_balance.READINGS, 1):
            row[f"{reading}/up"] = np.mean(table[:, i] > 0)
            row[f"{reading}/same_sign"] = np.mean(np.sign(table[:, i]) == np.sign(table[:, 0]))
            row[f"{reading}/correlation"] = np.corrcoef(ranks[:, 0], ranks[:, i])[0, 1]
        rows.append({k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()})
    return rows


def milestones(curves: Sequence[dict[str, Any]], mass: float) -> list[dict[str, Any]]:
    """Per arm and N, means over seeds: what it took to reach this correct mass, and what was lost on the way.

    A run that never gets there does not count; ``reached`` says how many did.
    """
    rows = []
    for (arm, n), found in itertools.groupby(curves, lambda row: (row["arm"], row["n"])):
        runs = [list(run) for _, run in itertools.groupby(found, lambda row: row["seed"])]
        first = [next((row for row in run if row["q_pos"] >= mass), None) for run in runs]
        there = [row for row in first if row is not None]
        means = {key: float(np.mean([row[key] for row in there])) if there else math.nan for key in REPORTED}
        rows.append({"arm": arm, "n": n, "q_pos": mass, "reached": len(there), "runs": len(runs), **means})
    return rows


@files.guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Runs every arm, N and seed; writes curves.csv, agreement.csv, milestones.csv and the figures; exit status."""
    parser = argparse.ArgumentParser(description="Exact figures of the real learner on an enumerable task.")
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--n", nargs="+", type=int, default=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "enumerable")
    args = parser.parse_args(argv)
    files.at_least(1, seeds=args.seeds, steps=args.steps)
    files.at_least(2, n=min(args.n))  # one rollout has no other to differ from
    make_folder("--out", args.out)
    xla.set_cpu_flags()
    curves: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for name, n in itertools.product(args.arm, args.n):
        begin, arm = time.process_time(), Arm(name, n)
        for seed in range(args.seeds):
            for row, found in run(arm, seed, args.steps):
                curves.append(row)
                pairs += found
        last = [row["q_pos"] for row in curves[-1 :: -(args.steps + 1)][: args.seeds]]
        files.write_csv(args.out / "curves.csv", curves, digits=5)
        files.write_csv(args.out / "agreement.csv", agreement(pairs), digits=5)
        reached = [row for mass in MASSES for row in milestones(curves, mass)]
        files.write_csv(args.out / "milestones.csv", reached, digits=5)
        took = time.process_time() - begin
        print(f"{name:9} N={n:<4} Q_pos {np.mean(last):.3f}  {took:.0f} s of processor time", flush=True)
    for name in args.arm:
        draw([row for row in curves if row["arm"] == name], args.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
