"""Reinforcement learning from verifiable rewards at hundreds of rollouts per prompt, in JAX."""

__version__ = "0.1.0"
