"""Rewards that can be verified: scorers by name, answer formats, grading."""

from brorl_jax.rewards import match, reasoning_gym
from brorl_jax.rewards.formats import FORMATS, Format
from brorl_jax.rewards.grading import GradingStats, grade, self_test
from brorl_jax.rewards.registry import Answer, Verifier, get, names, register

__all__ = [
    "FORMATS",
    "Answer",
    "Format",
    "GradingStats",
    "Verifier",
    "get",
    "grade",
    "match",
    "names",
    "reasoning_gym",
    "register",
    "self_test",
]
