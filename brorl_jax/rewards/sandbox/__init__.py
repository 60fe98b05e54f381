"""The sandbox for programs of a language model, see ``docs/sandbox.md``.

``process`` holds a running sandbox, ``isolation`` what it is made of on this machine, ``seccomp`` its filter of system
calls. ``guest_runner.py`` and ``guest_tester.py`` run inside, by an interpreter that knows nothing of this package: the
first shares its process with the judged program, so nothing it says is believed; the second runs a problem's own
assertions in a sandbox of their own.
"""

from brorl_jax.rewards.sandbox.isolation import ISOLATIONS, SandboxError, configure
from brorl_jax.rewards.sandbox.process import Ended, Limits, OutOfTime, Sandbox, check, drop_tester, tester

__all__ = [
    "ISOLATIONS",
    "Ended",
    "Limits",
    "OutOfTime",
    "Sandbox",
    "SandboxError",
    "check",
    "configure",
    "drop_tester",
    "tester",
]
