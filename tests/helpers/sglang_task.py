"""A verifier that a few updates can please: half of all first characters are right. For runs that are processes."""

from __future__ import annotations

from typing import Any

from brorl_jax.rewards import registry

if "even_start" not in registry.names():

    @registry.register("even_start", default_format="whole", where="inline")
    def even_start(answer: str, prompt: Any) -> float:
        """1 if the answer starts with a character of even code (or is the gold answer, for the self-test)."""
        return float(answer == prompt.gold or (answer != "" and ord(answer[0]) % 2 == 0))
