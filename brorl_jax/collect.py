"""Filling a step with groups worth training on: rollouts, rewards and dynamic sampling.

Prompts are asked for in rounds until enough groups are kept. A group is kept if enough of its samples carry a reward
and, with dynamic sampling, if their **raw** rewards are not all equal (``max != min``). A round may ask for more than
is missing (``oversample``); what is kept beyond the need is carried into the next step and used first there. After
``max_rounds`` the step trains on what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from brorl_jax import processes
from brorl_jax.checkpoint import pack_groups, unpack_groups
from brorl_jax.data.tokenizer import Tokenizer
from brorl_jax.interrupt import Interrupted
from brorl_jax.metrics import PhaseTimer
from brorl_jax.rewards.service import Grader
from brorl_jax.rollout.api import Engine, Request, Sampling
from brorl_jax.types import Finish, Group, Prompt, Status

KEPT = "kept"
FEW = 0.1  # share of informative groups below which a step deserves a warning
MANY = 0.3  # share of truncated responses in the first step above which something is likely to be wrong


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What a step asks for and keeps.

    Attributes:
        groups: Groups wanted per step.
        dynamic: Drop groups whose raw rewards are all equal, and ask for others.
        max_rounds: Rounds of generation before a step goes on with what it has.
        min_valid: Least share of a group's samples that must carry a reward.
        oversample: Prompts asked for per group still missing; at most 2, so that no group is carried twice.
    """

    groups: int
    dynamic: bool
    max_rounds: int
    min_valid: float
    oversample: float

    def verdict(self, group: Group) -> str:
        """``KEPT``, or why the group is not."""
        rewards = [s.reward for s in group.scored]
        if len(rewards) < max(1, self.min_valid * len(group.samples)):
            return "too_few_valid"
        if not self.dynamic or max(rewards) != min(rewards):
            return KEPT
        return {0.0: "all_zero", 1.0: "all_one"}.get(rewards[0], "all_equal")


@dataclasses.dataclass(slots=True)
class Collected:
    """One step's groups.

    Attributes:
        kept: To be trained, carried ones first, at most ``Rules.groups``.
        carried: Kept as well, but beyond the need: for the next step.
        judged: Every group generated in this step with its verdict, in order.
        rounds: Rounds of generation.
        starved: The rounds ran out before enough groups were kept.
    """

    kept: list[Group]
    carried: list[Group]
    judged: list[tuple[Group, str]]
    rounds: int
    starved: bool

    @property
    def version(self) -> int:
        """Of the weights that generated ``judged``; -1 if nothing was."""
        return self.judged[0][0].samples[0].weight_version if self.judged else -1


def graded(
    engine: Engine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    sampling: Sampling,
    grader: Grader,
    timer: PhaseTimer,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Group]:
    """Generates and grades one group per request; yields each as it is done, in any order.

    A group is graded while others are still generated; "reward" is the time that generation did not hide.

    Args:
        check: Called after every group and while waiting; raises to stop early.
    """
    pending: list[tuple[Any, Group]] = []
    with contextlib.closing(engine.generate(requests, sampling)) as generated:
        while True:
            with timer("rollout"):
                group = next(generated, None)
            if group is None:
                break
            with timer("reward"):
                for sample in group.samples:
                    stopped = sample.finish is Finish.STOP
                    sample.text = tokenizer.decode(sample.tokens[:-1] if stopped else sample.tokens)
                pending.append((grader.submit(group), group))
            check()
            while pending and pending[0][0].done():
                future, group = pending.pop(0)
                grader.wait([future])  # raises what grading raised
                yield group
    for future, group in pending:
        with timer("reward"):
            grader.wait([future], check)
        yield group


def rollouts(
    engine: Engine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    sampling: Sampling,
    grader: Grader,
    timer: PhaseTimer,
    check: Callable[[], None] = lambda: None,
) -> list[Group]:
    """``graded``, all of it, in the order of ``requests``."""
    groups = graded(engine, tokenizer, requests, sampling, grader, timer, check)
    done = {g.samples[0].seed: g for g in groups}  # a prompt may come twice, a seed does not
    return [done[r.seeds[0]] for r in requests]


def shared(
    generate: Callable[[list[Request]], list[Group]], requests: Sequence[Request], timer: PhaseTimer
) -> list[Group]:
    """Every process generates its share of ``requests``, and gets the groups of all, in order.

    Raises:
        Interrupted: Some process was told to stop: then none has groups.
    """
    if processes.count() == 1:
        return generate(list(requests))
    own, signum = [], 0
    try:
        own = generate(processes.share(requests))
    except Interrupted as signal:
        signum = signal.signum
    if signum := processes.agree_to_stop(signum, "rollouts"):
        raise Interrupted(signum)
    with timer("gather"):
        return processes.unshare(processes.gather(own, "rollouts", _encode, _decode))


def _encode(groups: list[Group]) -> bytes:
    arrays, meta = pack_groups(groups)
    file = io.BytesIO()
    np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
    return file.getvalue()


def _decode(data: bytes) -> list[Group]:
    with np.load(io.BytesIO(data)) as arrays:
        return unpack_groups(arrays, json.loads(arrays["meta"].tobytes()))


def collect(
    take: Callable[[int], list[Prompt]],
    generate: Callable[[list[Prompt]], list[Group]],
    rules: Rules,
    carried: Sequence[Group] = (),
) -> Collected:
    """Collects the groups of one step.

    Args:
        take: The next prompts, see ``PromptStream.take``.
        generate: Graded groups for prompts, in the same order.
        rules: What is wanted.
        carried: Left over from the step before.
    """
    kept, judged = list(carried), []
    rounds = 0
    while len(kept) < rules.groups and rounds < rules.max_rounds:
        missing = rules.groups - len(kept)
        rounds += 1
        for group in generate(take(int(np.ceil(missing * rules.oversample)))):
            verdict = rules.verdict(group)
            judged.append((group, verdict))
            if verdict == KEPT:
                kept.append(group)
    return Collected(
        kept=kept[: rules.groups],
        carried=kept[rules.groups :],
        judged=judged,
        rounds=rounds,
        starved=len(kept) < rules.groups,
    )


def metrics(collected: Collected) -> dict[str, float]:
    """What the step generated, before the filter, and what became of it."""
    groups = [group for group, _ in collected.judged]
    new = {id(group) for group in groups}
    verdicts = Counter(verdict for _, verdict in collected.judged)
    samples = [s for group in groups for s in group.samples]
    scored = [s for s in samples if s.status is not None and s.status.scored]
    statuses = Counter(s.status for s in samples)
    out: dict[str, float] = {
        "groups/generated": len(groups),
        "groups/kept": verdicts[KEPT],
        "groups/pass_rate": verdicts[KEPT] / max(1, len(groups)),
        "groups/all_zero": verdicts["all_zero"],
        "groups/all_one": verdicts["all_one"],
        "groups/all_equal": verdicts["all_equal"],
        "groups/too_few_valid": verdicts["too_few_valid"],
        "groups/informative": sum(len({s.reward for s in g.scored}) > 1 for g in groups),
        "groups/trained": len(collected.kept),
        "groups/carried_in": sum(id(g) not in new for g in [*collected.kept, *collected.carried]),
        "groups/carried": len(collected.carried),
        "groups/rounds": collected.rounds,
        "groups/starved": float(collected.starved),
        "samples/generated": len(samples),
        "tokens/generated": sum(len(s.tokens) for s in samples),
        "samples/truncated": statuses[Status.TRUNCATED],
        "samples/aborted": statuses[Status.ABORTED],
        "samples/grader_error": statuses[Status.GRADER_ERROR],
        "samples/timeout": statuses[Status.TIMEOUT],
        "samples/trained": sum(len(g.scored) for g in collected.kept),
    }
    if samples:
        lengths = np.array([len(s.tokens) for s in samples])
        distinct = sum(len({s.tokens.tobytes() for s in g.samples}) for g in groups)
        out |= {
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/truncated_rate": statuses[Status.TRUNCATED] / len(samples),
            "samples/duplicate_rate": 1.0 - distinct / len(samples),
        }
    if scored:
        out["reward/mean"] = float(np.mean([s.reward for s in scored]))
    return out | _by_source(collected)


def _by_source(collected: Collected) -> dict[str, float]:
    """The same for every source that gave prompts to the step or to what it trains on."""
    out: dict[str, float] = {}
    for source in sorted({g.prompt.source for g in [*collected.kept, *(g for g, _ in collected.judged)]}):
        judged = [(g, verdict) for g, verdict in collected.judged if g.prompt.source == source]
        trained = sum(g.prompt.source == source for g in collected.kept)
        out[f"source/{source}/groups"] = len(judged)  # generated
        out[f"source/{source}/trained"] = trained / max(1, len(collected.kept))  # of the groups trained, how many
        if not judged:
            continue
        rewards = [s.reward for g, _ in judged for s in g.scored]
        if rewards:
            out[f"source/{source}/reward"] = float(np.mean(rewards))
            out[f"source/{source}/right"] = float(np.mean([r >= 1.0 for r in rewards]))
        out[f"source/{source}/kept"] = sum(verdict == KEPT for _, verdict in judged) / len(judged)
        out[f"source/{source}/length"] = float(np.mean([len(s.tokens) for g, _ in judged for s in g.samples]))
    return out


def warnings(metrics: dict[str, float], *, first: bool) -> list[str]:
    """What the figures of a step should alarm about, each to be read after "step n"; ``first``: it is the run's."""
    found = []
    if metrics["groups/starved"]:
        found.append(f"is starved: {explain(metrics)}")
    elif metrics["groups/informative"] < FEW * metrics["groups/generated"]:
        found.append(f"learns from less than {FEW:.0%} of its groups, the data is too hard or easy: {explain(metrics)}")
    cut = metrics.get("length/truncated_rate", 0.0)
    if first and cut > MANY:
        found.append(
            f"has {cut:.0%} of its responses cut off: raise rollout.max_tokens, or see whether the model's stop ids "
            "(generation_config.json, rollout.stop_ids) are what ends its answers"
        )
    return found


def explain(metrics: dict[str, float]) -> str:
    """Why groups were dropped, in words, from ``metrics``."""
    reasons = {name: int(metrics[f"groups/{name}"]) for name in ("all_zero", "all_one", "all_equal", "too_few_valid")}
    dropped = ", ".join(f"{count} {name}" for name, count in reasons.items() if count) or "none dropped"
    return (
        f"{int(metrics['groups/trained'])} groups kept of {int(metrics['groups/generated'])} generated "
        f"in {int(metrics['groups/rounds'])} rounds ({dropped})"
    )
