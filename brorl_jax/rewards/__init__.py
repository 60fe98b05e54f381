"""Rewards that can be verified: scorers by name, answer formats, grading."""

from brorl_jax.rewards import choice, code, ifeval, match, math, reasoning_gym
from brorl_jax.rewards.formats import FORMATS, Format
from brorl_jax.rewards.grading import grade, refusals, self_test
from brorl_jax.rewards.registry import Answer, Verifier, get, load_plugins, names, register
from brorl_jax.rewards.service import Grader, GradingStats

__all__ = [
    "FORMATS",
    "Answer",
    "Format",
    "Grader",
    "GradingStats",
    "Verifier",
    "choice",
    "code",
    "get",
    "grade",
    "ifeval",
    "load_plugins",
    "match",
    "math",
    "names",
    "reasoning_gym",
    "refusals",
    "register",
    "self_test",
]
