"""What rollouts over SGLang cost, on CPU: the client's own time, prefix sharing at N = 16 and N = 512, publishing.

    python benchmarks/sglang.py client bare           # against fake servers in processes of their own
    python benchmarks/sglang.py sharing publish       # against a real server: needs `make sglang-cpu`

Results go to ``benchmarks/results/sglang.json``, one entry for each part, and are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "helpers")]

import aiohttp  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import sglang_cases as cases  # noqa: E402

from brorl_jax.models import transformer  # noqa: E402
from brorl_jax.models.config import ModelConfig  # noqa: E402
from brorl_jax.rollout.api import Request, Sampling  # noqa: E402
from brorl_jax.rollout.sglang import client as client_lib  # noqa: E402
from brorl_jax.rollout.sglang import engine as engine_lib  # noqa: E402
from brorl_jax.rollout.sglang import launch, protocol, weights  # noqa: E402

Result = dict[str, Any]
# vocabulary, width, layers, ffn: 1, 22 and 134 million parameters (the last is SmolLM2-135M's shape)
SIZES = {"1M": (259, 128, 4, 384), "22M": (8192, 384, 8, 1024), "134M": (49152, 576, 30, 1536)}


def model(vocab: int, hidden: int, layers: int, ffn: int) -> ModelConfig:
    """A Llama of this shape with heads of 64 (32 if the width is small) and a tied head."""
    head_dim = 64 if hidden >= 384 else 32
    heads = hidden // head_dim
    shape = {"vocab_size": vocab, "hidden": hidden, "layers": layers, "ffn": ffn, "heads": heads, "head_dim": head_dim}
    kv_heads = 3 if heads % 3 == 0 else 1
    return ModelConfig("llama", tied=True, rope_theta=1e4, max_positions=512, kv_heads=kv_heads, **shape)


def requests(groups: int, n: int, length: int, vocab: int) -> list[Request]:
    """``groups`` different prompts of ``length`` tokens, ``n`` samples of each."""
    rng = np.random.default_rng(n)
    prompts = [cases.prompt(f"bench/{g}", rng.integers(3, vocab, length)) for g in range(groups)]
    return [Request(p, tuple(range(g * n, (g + 1) * n))) for g, p in enumerate(prompts)]


# --- the client's own time -------------------------------------------------------------------------------------------


def client(args: argparse.Namespace) -> Result:
    """Processor time of this process per sample, with all samples in flight at once."""
    rows: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        fakes(args.fakes, cases.boot_directory(Path(folder) / "boot"), args.token_s) as urls,
    ):
        in_flight = -(-args.samples // args.fakes)
        with cases.engine(
            urls, Path(folder) / "w", in_flight=in_flight, timeout_s=600.0, dead_after=999, context=512
        ) as engine:
            engine.publish(cases.table_weights(), 0)
            wanted = requests(args.samples // 512, 512, 128, cases.VOCAB)
            sampling = Sampling(max_tokens=args.client_tokens, stop_ids=(cases.STOP,))
            for _ in range(args.repeats):
                engine.metrics()
                with _spent(args.samples, rows):
                    samples = sum(len(g.samples) for g in engine.generate(wanted, sampling))
                found = engine.metrics()
                assert samples == found["engine/delivered"] == args.samples and not found["engine/retries"]
    return _client_result(args, rows)


def bare(args: argparse.Namespace) -> Result:
    """The same requests by the same HTTP library and nothing else: no checks, retries or time limits, answers unread.

    What ``client`` needs beyond this is its own; less than this it cannot need.
    """

    async def post(http: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
        async with http.post(f"{url}/generate", data=body, timeout=aiohttp.ClientTimeout()) as response:
            return await response.read()

    async def run(urls: list[str]) -> None:
        sampling = Sampling(max_tokens=args.client_tokens, stop_ids=(cases.STOP,))
        wanted = requests(args.samples // 512, 512, 128, cases.VOCAB)
        async with client_lib.session() as http:
            for url in urls:
                while True:  # until it listens
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"{url}/ready"):
                            break
                    await asyncio.sleep(0.1)
            for repeat in range(args.repeats):
                with _spent(args.samples, rows):
                    jobs = []
                    for group, request in enumerate(wanted):
                        body, url = protocol.Body(request.prompt.tokens, sampling), urls[group % len(urls)]
                        jobs += [
                            post(http, url, body.sample(f"{repeat:04x}-{seed:016x}", seed)) for seed in request.seeds
                        ]
                    assert all(await asyncio.gather(*jobs))

    rows: list[dict[str, float]] = []
    engine_lib._raise_file_limit()
    with (
        tempfile.TemporaryDirectory() as folder,
        fakes(args.fakes, cases.boot_directory(Path(folder) / "boot"), args.token_s) as urls,
        engine_lib._rare_collections(),
    ):
        asyncio.run(run(urls))
    return _client_result(args, rows)


@contextlib.contextmanager
def _spent(samples: int, rows: list[dict[str, float]]) -> Iterator[None]:
    """Adds a row with this process's time for each of so many samples."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield
    after, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    user, system = (1e3 * (getattr(after, k) - getattr(before, k)) / samples for k in ("ru_utime", "ru_stime"))
    rows.append({"user_ms": user, "system_ms": system, "wall_s": wall})


def _client_result(args: argparse.Namespace, rows: list[dict[str, float]]) -> Result:
    return {
        "samples_in_flight": args.samples,
        "tokens_per_sample": args.client_tokens,
        "servers": args.fakes,
        "user_ms_per_sample": statistics.median(r["user_ms"] for r in rows),
        "system_ms_per_sample": statistics.median(r["system_ms"] for r in rows),
        "runs": rows,
    }


@contextlib.contextmanager
def fakes(count: int, boot: Path, token_s: float) -> Iterator[list[str]]:
    """Addresses of so many fake servers in processes of their own, each taking ``token_s`` per token."""
    running, urls = [], []
    try:
        for _ in range(count):
            port = cases.free_port()
            program = [sys.executable, str(REPO / "tests" / "helpers" / "fake_sglang.py"), str(port), str(boot)]
            running.append(subprocess.Popen([*program, str(token_s)]))
            urls.append(f"http://127.0.0.1:{port}")
        yield urls
    finally:
        for process in running:
            process.kill()
            process.wait()


# --- a real server ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _real(cfg: ModelConfig, folder: Path, **flags: int) -> Iterator[Any]:
    """An engine on a real CPU server of its own, both cores to it."""
    boot = cases.boot_directory(folder / "boot", cfg)
    more = tuple(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())
    threads = f"OMP_NUM_THREADS={os.cpu_count()}"
    section = cases.cpu_launch(cases.free_port())
    section.flags, section.env = (*section.flags, *more), (*section.env, threads)
    where = {"model": boot, "dtype": "float32", "context": 512, "seed": 3, "logs": folder}
    own = launch.specs(section, 1, **where)
    settings = {"start_timeout_s": 600.0, "timeout_s": 1200.0, "update_timeout_s": 600.0, "in_flight": 1024}
    with cases.engine((), folder / "w", cfg, servers=own, context=512, **settings) as engine:
        yield engine


def sharing(args: argparse.Namespace) -> Result:
    """The same samples as many prompts x 16 and as few x 512."""
    cfg = model(*SIZES["1M"])
    out: Result = {"model": "1M", "prompt_tokens": 256, "response_tokens": args.tokens, "samples": args.total}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"max_running_requests": 128, "max_total_tokens": 65536}
        with _real(cfg, Path(folder), **sizes) as engine:
            engine.publish(cases.random_weights(cfg), 0)
            sampling = Sampling(max_tokens=args.tokens, stop_ids=(cases.STOP,))
            for n in (16, 512, 16, 512):  # twice; the first of each warms up
                engine.publish(cases.random_weights(cfg, seed=n), 1 + engine._version.number)  # and empties the cache
                engine.metrics()
                wanted = requests(args.total // n, n, 256, cfg.vocab_size)
                tokens = sum(len(s.tokens) for g in engine.generate(wanted, sampling) for s in g.samples)
                found = engine.metrics()
                assert found["engine/delivered"] == args.total
                out[f"n{n}"] = {
                    "samples_per_s": found["engine/samples_per_s"],
                    "tokens": tokens,
                    "cached_share": found["engine/cached_share"],
                    "prompt_tokens_computed": args.total * 256 * (1 - found["engine/cached_share"])
                    + args.total // n * 256,
                }
    return out


def publish(args: argparse.Namespace) -> Result:
    """Seconds to write a version, and to have it loaded, flushed and proved."""
    out: Result = {}
    for name, shape in SIZES.items():
        cfg = model(*shape)
        params = jax.block_until_ready(transformer.init(jax.random.key(0), cfg, jnp.float32))
        rows = []
        with tempfile.TemporaryDirectory() as folder, _real(cfg, Path(folder)) as engine:
            engine._folder = weights.default_folder(Path(folder))
            for version in range(args.repeats + 1):  # the first compiles the probe
                engine.publish(params, version)
                rows.append(engine.metrics())
        last = {
            k: statistics.median(r[f"engine/publish_{k}"] for r in rows[1:]) for k in ("write_s", "load_s", "bytes")
        }
        out[name] = last | {"parameters": sum(x.size for x in jax.tree.leaves(params))}
        print(name, out[name], file=sys.stderr, flush=True)
    return out


PARTS = {"client": client, "bare": bare, "sharing": sharing, "publish": publish}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--samples", type=int, default=8192, help="client: in flight at once, a multiple of 512")
    parser.add_argument("--fakes", type=int, default=8, help="client: fake servers")
    parser.add_argument("--client-tokens", type=int, default=16, help="client: tokens per sample")
    parser.add_argument("--token-s", type=float, default=1.0, help="client: seconds per token at the fake servers")
    parser.add_argument("--total", type=int, default=2048, help="sharing: samples, a multiple of 512")
    parser.add_argument("--tokens", type=int, default=32, help="sharing: tokens per sample")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks" / "results" / "sglang.json")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        where = {"python": platform.python_version(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
        results[part] = PARTS[part](args) | {"command": " ".join(sys.argv), "machine": where | {"cpu": _cpu()}}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({part: results[part]}, indent=1))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), socket.gethostname()
    )


if __name__ == "__main__":
    main()
