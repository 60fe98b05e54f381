"""A small SGLang server: the HTTP behaviour of 0.5.x that the engine relies on, and faults on demand.

Its policy is a table: it loads a published checkpoint like the real server, but computes only
``log_softmax(norm(embed[token]) @ head)``, which is the whole model when attention and MLP put out zero
(``table_weights``). So a real server and this one must give the same figures, and ``test_contract.py`` holds both to
the same tests.

As a program: ``python fake_sglang.py PORT MODEL_DIR [SECONDS_PER_TOKEN]`` (its work is then not the client's).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors import safe_open

KNOWN = {
    "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop_token_ids", "sampling_seed", "n", "ignore_eos",
}  # fmt: skip
TENSORS = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
ADMIN = ("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/abort_request", "/flush_cache")
OPEN = ("/health", "/ready", "/metrics")


class FakeServer:
    """One server in a thread. Use as a context manager.

    Attributes:
        faults: Actions for the next ``/generate`` requests for samples (not probes, not prefills), in order:
            ``stall``, ``503``, ``drop`` (half a body, then the connection ends), ``empty`` (``[]``), ``garbage``,
            ``swap`` (its answer goes to the next request and that one's to it), ``stale``, ``abort``, ``die``,
            ``400``; ``ok`` passes one on.
        update_faults: The same for updates: ``die``, ``stall``, ``refuse``, ``noflush``, ``lie`` (success, nothing
            done).
        token_s: Seconds per token.
        seen: Every body of ``/generate``, in order of arrival.
        calls: Every other path, in order.
    """

    def __init__(
        self, model: Path, port: int = 0, *, api_key: str = "", admin_key: str = "", context: int = 128
    ) -> None:
        self.port, self.context, self.keys = port, context, (api_key, admin_key)
        self.started_from = model
        self.faults: deque[str] = deque()
        self.update_faults: deque[str] = deque()
        self.token_s = 0.0
        self.seen: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.version, self.path = "none", str(model)
        self.table: np.ndarray | None = None
        self.vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        self.eos = set(json.loads((model / "generation_config.json").read_text())["eos_token_id"])
        self.running: dict[str, asyncio.Event] = {}
        self.counters = dict.fromkeys(("prompt_tokens", "cached_tokens", "generation_tokens"), 0)
        self.cache: set[bytes] = set()
        self.tensors: dict[str, np.ndarray] = {}
        self._rng = np.random.default_rng(port or 1)

    # --- life ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._up, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As by kill -9: every connection is reset and nothing listens any more."""
        if self._thread.is_alive() and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._dead.set)
        self._thread.join(10)

    def restart(self, *, keep_weights: bool = False) -> None:
        """Comes up again on the same port, without the weights it had."""
        self.kill()
        self.version, self.table, self.running = "none", self.table if keep_weights else None, {}
        self.cache.clear()
        self.__enter__()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.serve())
        self._loop.close()

    async def serve(self) -> None:
        """Until killed."""
        self._dead, self._paused, self._waiting_swap = asyncio.Event(), asyncio.Event(), None
        app = web.Application(middlewares=[self._auth], client_max_size=1 << 26)
        app.router.add_post("/generate", self._generate)
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/abort_request"):
            app.router.add_post(path, getattr(self, path.replace("/", "_")))
        for path in ("/model_info", "/server_info", "/ready", "/metrics", "/flush_cache"):
            app.router.add_get(path, getattr(self, path.replace("/", "_")))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, backlog=8192)
        await site.start()
        self.port = runner.addresses[0][1]
        if hasattr(self, "_up"):
            self._up.set()
        await self._dead.wait()
        await site.stop()
        for connection in list(runner.server.connections):  # type: ignore[union-attr]
            if connection.transport is not None:
                connection.transport.abort()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    @web.middleware
    async def _auth(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/generate":
            self.calls.append(request.path)
        key, admin = self.keys
        wanted = admin if admin and request.path in ADMIN else key
        if wanted and request.path not in OPEN and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)

    # --- generation ----------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"object": "error", "message": "malformed", "code": 400}, status=400)
        while self._paused.is_set():
            await asyncio.sleep(0.01)
        probe = body.get("logprob_start_len") == 0 or body["sampling_params"].get("max_new_tokens") == 0
        fault = "ok"
        if not probe:
            self.seen.append(body)
            fault = self.faults.popleft() if self.faults else "ok"
        if fault == "503":
            return web.json_response(
                {"object": "error", "message": "The request queue is full.", "code": 503}, status=503
            )
        if fault == "die":
            self._dead.set()
            await asyncio.sleep(60)
        if (problem := self._problem(body)) is not None or fault == "400":
            return web.json_response(problem or {"error": {"message": "bad values"}}, status=400)
        rid = body["rid"]
        event = self.running[rid] = asyncio.Event()
        if fault == "stall":
            await event.wait()
        answer = await self._answer(body, event, aborted=fault == "abort")
        self.running.pop(rid, None)
        if fault == "swap":
            answer = await self._swapped(answer)
        elif self._waiting_swap is not None and not probe:
            other, self._waiting_swap = self._waiting_swap, None
            answer, theirs = other[0], answer
            other[1].set_result(theirs)
        if fault == "stale":
            answer["meta_info"] |= {
                "weight_version": "old",
                "weight_versions": [{"version": "old", "start": 0, "end": 9}],
            }
        if fault == "empty":
            answer = []
        text = "<html>oops</html>" if fault == "garbage" else json.dumps(answer)
        if fault != "drop":
            return web.Response(text=text, content_type="application/json")
        half = web.StreamResponse(headers={"Content-Length": str(len(text))})
        await half.prepare(request)
        await half.write(text[: len(text) // 2].encode())
        assert request.transport is not None
        request.transport.abort()
        return half

    async def _swapped(self, answer: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting_swap = (answer, future)
        return await future

    def _problem(self, body: dict[str, Any]) -> Any:
        """The body of a 400; or death, where the real server dies."""
        params = body.get("sampling_params", {})
        ids = body.get("input_ids") or []
        if unknown := set(params) - KNOWN:
            return {"error": f"unknown field `{sorted(unknown)[0]}` in sampling_params"}
        if not ids:
            return {"error": {"message": "input_ids cannot be empty."}}
        if params.get("temperature", 1.0) < 0:
            return {"error": {"message": "temperature must be non-negative"}}
        if body.get("rid") in self.running:
            return {"error": {"message": f"Duplicate request ID detected: {body['rid']}"}}
        if len(ids) + params.get("max_new_tokens", 128) > self.context:
            return {"error": {"message": f"exceeds the model's maximum context length of {self.context} tokens."}}
        if min(ids) < 0 or max(ids) >= self.vocab:
            self._dead.set()
        return None

    def _logps(self, token: int, temperature: float) -> np.ndarray:
        assert self.table is not None, "no weights loaded"
        logits = self.table[token] / temperature
        logits = logits - logits.max()
        return logits - np.log(np.exp(logits).sum())

    async def _answer(self, body: dict[str, Any], event: asyncio.Event, *, aborted: bool) -> dict[str, Any]:
        params, ids = body["sampling_params"], body["input_ids"]
        greedy = params.get("temperature", 1.0) < 1e-6
        temperature = 1.0 if greedy else params.get("temperature", 1.0)
        stops = set() if params.get("ignore_eos") else self.eos | set(params.get("stop_token_ids") or ())
        most = params.get("max_new_tokens", 128)
        if self.table is None:
            self.table = np.zeros((self.vocab, self.vocab), np.float32)
        tokens, triples, reason = [], [], {"type": "length", "length": most}
        for _ in range(most):
            if self.token_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.token_s):
                        await event.wait()
            if event.is_set() or aborted:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            logps = self._logps((tokens or ids)[-1], temperature)
            token = int(logps.argmax()) if greedy else int((logps + self._rng.gumbel(size=len(logps))).argmax())
            tokens.append(token)
            triples.append([float(logps[token]), token, None])
            if token in stops:
                reason = {"type": "stop", "matched": token}
                break
        key = np.asarray(ids).tobytes()
        cached = len(ids) - 1 if key in self.cache and body.get("logprob_start_len") != 0 else 0
        self.cache.add(key)
        for name, value in (("prompt_tokens", len(ids)), ("cached_tokens", cached), ("generation_tokens", len(tokens))):
            self.counters[name] += value
        prompt = []
        if body.get("logprob_start_len") == 0:
            pairs = itertools.pairwise(ids)
            prompt = [[None, ids[0], None], *([float(self._logps(a, temperature)[b]), b, None] for a, b in pairs)]
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": body["rid"], "finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(tokens),
                "cached_tokens": cached, "weight_version": self.version, "num_retractions": 0,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                "input_token_logprobs": prompt, "output_token_logprobs": triples,
            },
        }  # fmt: skip

    # --- administration ------------------------------------------------------------------------------------------

    async def _pause_generation(self, request: web.Request) -> web.Response:
        if (await request.json()).get("mode", "abort") == "abort":
            for event in self.running.values():
                event.set()
        self._paused.set()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await request.json()
        self._paused.clear()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        fault = self.update_faults.popleft() if self.update_faults else "ok"
        if fault == "die":
            self._dead.set()
            await asyncio.sleep(60)
        if fault == "stall":
            await asyncio.sleep(600)

        def said(success: bool, message: str) -> web.Response:
            answer = {"success": success, "message": message, "num_paused_requests": 0}
            return web.json_response(answer, status=200 if success else 400)

        if fault == "refuse":
            return said(False, "Failed to update weights: refused")
        if fault == "noflush":
            return said(False, "Weights were updated, but the cache was not flushed ...")
        if fault == "lie":
            self.version = body.get("weight_version") or self.version
            return said(True, "Succeeded to update model weights.")
        file = Path(body["model_path"]) / "model.safetensors"
        if not file.is_file():
            return said(False, f"Failed to get weights iterator: {file}")
        if not self._load(file):
            self._dead.set()
            await asyncio.sleep(60)
        self.version, self.path = body.get("weight_version") or self.version, body["model_path"]
        if body.get("flush_cache", True):
            self.cache.clear()
        return said(True, "Succeeded to update model weights.")

    def _load(self, file: Path) -> bool:
        """False where a shape kills the real server. A tensor that is missing keeps its old value, as there."""
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                value = tensors.get_tensor(name)
                if name in self.tensors and self.tensors[name].shape != value.shape:
                    return False
                self.tensors[name] = value
        embed, norm = self.tensors[TENSORS["embed"]], self.tensors[TENSORS["norm"]]
        if embed.shape[0] != self.vocab:
            return False
        head = self.tensors.get(TENSORS["head"], embed)
        hidden = embed / np.sqrt((embed**2).mean(-1, keepdims=True) + 1e-6) * norm
        self.table = (hidden @ head.T).astype(np.float32)
        return True

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid = body.get("rid") or ""
        if body.get("abort_all"):
            hit = list(self.running)
        else:
            hit = [r for r in self.running if r.startswith(rid)] if rid in self.running else []
        for one in hit:
            self.running[one].set()
        return web.Response()

    async def _flush_cache(self, _: web.Request) -> web.Response:
        if self.running:
            return web.Response(text="Flush cache failed.", status=400)
        self.cache.clear()
        return web.Response(text="Cache flushed.")

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._paused.is_set() else 200)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.path, "weight_version": self.version, "is_generation": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": str(self.started_from), "version": "0.5.23", "context_length": self.context}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        label = '{engine_type="unified",model_name="m",tp_rank="0"}'
        lines = [f"sglang:{name}_total{label} {value}.0" for name, value in self.counters.items()]
        lines += [f"sglang:num_running_reqs{label} {len(self.running)}.0", f"sglang:num_queue_reqs{label} 0.0"]
        answer = web.Response(text="\n".join(lines))
        answer.enable_compression()  # if the client accepts that
        return answer


if __name__ == "__main__":
    alone = FakeServer(Path(sys.argv[2]), int(sys.argv[1]), context=1 << 20)
    alone.token_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    asyncio.run(alone.serve())
