"""Float64 for a few calls, while the rest of the process stays in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


def float64(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn`` with every float argument taken as float64 and every array of its result a NumPy array.

    jax turns float64 input into float32 unless 64-bit types are on. This turns them on inside the call only (a
    global flag would change every other program of the process) and copies the result to the host, since a float64
    jax array is quietly rounded by the next operation outside.

    For calls with concrete arrays; inside another traced function use ``fn`` itself, which keeps its input's dtype.
    """

    def widen(x: Any) -> Any:
        if isinstance(x, (float, np.floating)) or (hasattr(x, "dtype") and np.issubdtype(x.dtype, np.floating)):
            return np.asarray(x, np.float64)
        return x

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(True):
            args, kwargs = jax.tree.map(widen, (args, kwargs))  # pyright: ignore[reportAssignmentType]
            return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, fn(*args, **kwargs))

    return call
