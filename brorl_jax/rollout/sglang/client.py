"""HTTP to one server: what it answers, or an error that says whose fault it is.

Two kinds: ``Refused`` is ours (4xx: wrong key, wrong route, impossible request), trying again would not help;
``ServerFailure`` is the server's or the network's (5xx, time-outs, dropped connections, half bodies), another
server may do better. Keys come from ``SGLANG_API_KEY`` and ``SGLANG_ADMIN_API_KEY`` and appear in no message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from brorl_jax.errors import UserError

CONNECT_S = 60.0  # generous: thousands of connections are opened at once, by one thread
KEEPALIVE_S = 4.0  # below uvicorn's 5 s: a connection that the server is about to close is not used again
_JSON = {"Content-Type": "application/json"}

HINTS = {
    401: "set SGLANG_API_KEY (and SGLANG_ADMIN_API_KEY, if the server has one) to the server's keys",
    403: "set SGLANG_API_KEY (and SGLANG_ADMIN_API_KEY, if the server has one) to the server's keys",
    404: "is this an SGLang server of 0.5.x? Servers belong in rollout.sglang.urls, a router in rollout.sglang.router",
    405: "is this an SGLang server of 0.5.x?",
    413: "the request is larger than a proxy in between allows; give the server's own address",
}
WORD_HINTS = {
    "context length": "the server's --context-length is below data.max_prompt_tokens + rollout.max_tokens",
    "Duplicate request ID": "another trainer sends the same ids; one server serves one run",
    "unknown field": "this server does not know a field that 0.5.x knows; update sglang",
}


class ServerFailure(Exception):
    """Not our fault; ``reason`` is its name in the ledger: unavailable, timeout or dropped."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Refused(UserError):
    """A 4xx: the server's own words, and a hint."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """``Authorization`` headers of ordinary and of administrative routes; a server may want different ones."""

    api: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    admin: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def from_environment(cls) -> Keys:
        """The keys of this process's environment; without an admin key the ordinary one serves for both."""
        key = os.environ.get("SGLANG_API_KEY", "")
        admin = os.environ.get("SGLANG_ADMIN_API_KEY", "") or key

        def header(value: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {value}"} if value else {}

        return cls(header(key), header(admin))


def session() -> aiohttp.ClientSession:
    """Connections for any number of requests at a time. Proxy variables are ignored: servers are near by."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    plain = {"Accept-Encoding": "identity"}  # /metrics would be compressed
    no_cookies = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(
        connector=connector, headers=plain, cookie_jar=no_cookies, trust_env=False, auto_decompress=False
    )


class Client:
    """One server's routes."""

    def __init__(self, http: aiohttp.ClientSession, url: str, keys: Keys) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._generate_url = f"{self.url}/generate"
        self._generate_headers = {**_JSON, **keys.api}
        self._keys = keys

    async def generate(self, body: bytes, timeout: float) -> bytes:
        """The raw answer to a ``/generate`` body.

        Raises:
            Refused, ServerFailure: See the module.
        """
        return await self._call("POST", self._generate_url, self._generate_headers, body, timeout)

    async def get(self, path: str, timeout: float = 30.0) -> Any:
        """``GET path``, decoded: an object.

        Raises:
            Refused, ServerFailure: See the module; an answer of another form is refused, too.
        """
        answer = _decode(await self._call("GET", self.url + path, self._keys.api, None, timeout), path)
        if not isinstance(answer, dict):
            raise Refused(f"GET {self.url}{path}: answers {str(answer)[:100]!r} ({HINTS[404]})")
        return answer

    async def text(self, path: str, timeout: float = 10.0) -> str:
        """``GET path`` as text."""
        return (await self._call("GET", self.url + path, self._keys.api, None, timeout)).decode(errors="replace")

    async def admin(self, path: str, payload: Mapping[str, Any], timeout: float) -> Any:
        """``POST path`` with the admin key, decoded."""
        headers = {**_JSON, **self._keys.admin}
        return _decode(await self._call("POST", self.url + path, headers, orjson.dumps(payload), timeout), path)

    async def _call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> bytes:
        try:
            # asyncio's own timer: aiohttp's costs several objects per request.
            async with (
                asyncio.timeout(timeout),
                self._http.request(method, url, data=body, headers=headers, timeout=_NO_TOTAL) as response,
            ):
                raw = await response.read()
                status = response.status
        except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError, too
            raise ServerFailure("unavailable", f"{method} {url}: no connection within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise ServerFailure("timeout", f"{method} {url}: no answer within {timeout:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise ServerFailure("unavailable", f"{method} {url}: cannot connect: {error.os_error}") from error
        except (aiohttp.ClientError, OSError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ServerFailure("dropped", f"{method} {url}: connection lost: {what}") from error
        if status < 400:
            return raw
        said = f"{method} {url}: {status}: {words(raw)}"
        if status >= 500 or status in (408, 425, 429):
            raise ServerFailure("unavailable", said)
        hint = next((h for word, h in WORD_HINTS.items() if word in said), HINTS.get(status, ""))
        raise Refused(f"{said}{f' ({hint})' if hint else ''}")


_NO_TOTAL = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)


def words(raw: bytes) -> str:
    """What a server says in an error body; it has three forms."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        text = re.sub(r"<[^>]*>", " ", raw[:2000].decode(errors="replace"))  # web servers answer with a page
        return " ".join(text.split())[:200] or "(empty body)"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        return " ".join(str(error).split())[:500]
    return str(body)[:500]


def _decode(raw: bytes, path: str) -> Any:
    try:
        return orjson.loads(raw) if raw else None
    except ValueError as error:
        raise ServerFailure("dropped", f"{path}: half a body: {raw[:100]!r}") from error
