"""Turns collected runs into one self-contained page: style, script and data inside, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from brorl_jax.metrics import clean_text

SCRIPTS = ("charts.js", "rollouts.js", "report.js")


def asset(name: str) -> str:
    """The text of a file in ``report/assets``."""
    return resources.files("brorl_jax.report").joinpath("assets", name).read_text(encoding="utf-8")


def embed(data: Any) -> str:
    """JSON that can stand inside a ``<script>`` element: ASCII only, and without ``<``, ``>`` and ``&``.

    NaN and infinities, which our files do not hold but foreign ones may, become null: JavaScript reads neither.
    """
    data = json.loads(json.dumps(data), parse_constant=lambda _: None)
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render(runs: Sequence[dict[str, Any]]) -> str:
    """The page as text.

    Its content security policy admits exactly our style and script, by their hashes, and no connection: text from a
    rollout could not run or load anything even if it got out of the data block.
    """
    style, script = asset("style.css"), "\n".join(map(asset, SCRIPTS))
    title = clean_text(" vs ".join(run["name"] for run in runs))
    parts = {
        "title": html.escape(title),
        "style": style,
        "style_hash": _sha256(style),
        "script": script,
        "script_hash": _sha256(script),
        "data": embed({"runs": list(runs), "made": time.strftime("%Y-%m-%d %H:%M")}),
    }
    # One pass: a placeholder that occurs inside the data stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("template.html"))


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
