"""What can be wrong with ``rollout.sglang`` in a config; nothing heavy is imported, since every start checks it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Problem = tuple[str, Any, str]


def problems(config: Any) -> Iterator[Problem]:
    """(field, value, what is wrong and what to do) for each impossible setting."""
    sglang, path = config.rollout.sglang, "rollout.sglang"
    sources = {"urls": sglang.urls, "router": sglang.router, "launch.servers": sglang.launch.servers}
    given = [name for name, value in sources.items() if value]
    if config.rollout.engine == "sglang" and len(given) != 1:
        which = " and ".join(given) or "none"
        yield f"{path}.urls", tuple(sglang.urls), f"engine 'sglang' needs one of {', '.join(sources)}, has {which}"
    for field, urls in (("urls", sglang.urls), ("router", [sglang.router] if sglang.router else [])):
        for url in urls:
            if not isinstance(url, str) or not re.fullmatch(r"https?://[^/\s]+/?", url):
                yield f"{path}.{field}", url, "write a URL as http://host:port"
    if len(set(sglang.urls)) != len(sglang.urls):
        yield f"{path}.urls", tuple(sglang.urls), "names a server twice"
    yield from _launch(sglang.launch, f"{path}.launch")


def _launch(launch: Any, path: str) -> Iterator[Problem]:
    needed = max(1, launch.servers) * launch.tp * launch.dp
    if launch.gpus and (len(launch.gpus) != needed or len(set(launch.gpus)) != needed):
        yield f"{path}.gpus", tuple(launch.gpus), f"servers * tp * dp = {needed} different device ids are needed"
    for entry in launch.env:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", str(entry)):
            yield f"{path}.env", entry, "write NAME=value"
    for flag in launch.flags:
        if not re.fullmatch(r"--[a-z][\w-]*(=.*)?", str(flag)):
            yield f"{path}.flags", flag, "write one flag per entry, as --name or --name=value"
        elif str(flag).split("=")[0] in ("--api-key", "--admin-api-key"):
            yield f"{path}.flags", "--api-key=...", "set SGLANG_API_KEY and SGLANG_ADMIN_API_KEY instead"
