"""Looking functions up by name in the plain dicts of this package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def lookup(table: Mapping[str, Callable[..., Any]], name: str, what: str) -> Callable[..., Any]:
    """``table[name]``; a ValueError that lists the known names where there is none."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(table))}")
    return table[name]


def hyperparameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the keyword-only arguments of ``function``: the settings that have an effect on it."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def bind(function: Callable[..., Any], hyper: Mapping[str, Any]) -> Callable[..., Any]:
    """``function`` with those entries of ``hyper`` it has as keyword-only arguments; the others do not concern it."""
    taken = hyperparameters(function)
    return functools.partial(function, **{k: v for k, v in hyper.items() if k in taken})
