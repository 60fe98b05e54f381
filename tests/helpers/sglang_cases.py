"""Tiny models for servers, engines on them, and a real server where its environment is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_sglang import FakeServer  # noqa: F401 (tests take it from here)

from brorl_jax.models import transformer
from brorl_jax.models.config import ModelConfig
from brorl_jax.rollout.api import Request, Sampling
from brorl_jax.rollout.sglang import build, launch, weights
from brorl_jax.rollout.sglang.engine import Probe, Settings, SGLangEngine
from brorl_jax.types import Prompt

REPO = Path(__file__).resolve().parents[2]
VOCAB, STOP, CONTEXT = 259, 2, 128  # bytes and special tokens: what `train_tokenizer` makes without any merge
SHAPE = {"vocab_size": VOCAB, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 48}
QWEN3 = ModelConfig("qwen3", tied=False, rope_theta=1e4, max_positions=512, **SHAPE)
LLAMA = ModelConfig("llama", tied=True, rope_theta=1e4, max_positions=512, **SHAPE)
PROBE = np.array([5, 9, 14, 7, 33, 60, 12, 8], np.int32)
CPU_FLAGS = (
    "--device=cpu", "--max-total-tokens=16384", "--max-running-requests=64", "--sleep-on-idle",
)  # fmt: skip


def layout(cfg: ModelConfig = QWEN3) -> weights.Layout:
    return weights.Layout(cfg, "float32", {"eos_token_id": [STOP], "bos_token_id": None, "pad_token_id": 0})


def table_weights(cfg: ModelConfig = QWEN3, seed: int = 0) -> Any:
    """Random weights under which attention and MLP put out zero: the next token depends on the last one alone."""
    params = random_weights(cfg, seed)
    layers = params["layers"] | {name: jnp.zeros_like(params["layers"][name]) for name in ("o", "down")}
    return params | {"layers": layers}


def random_weights(cfg: ModelConfig = QWEN3, seed: int = 0) -> Any:
    """Weights with every entry random and large enough that the distribution is far from uniform."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(0.3 * rng.standard_normal(shape) + path[-1].key.endswith("norm"), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, transformer.shapes(cfg), is_leaf=lambda x: isinstance(x, tuple))


def table_logp(params: Any, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """float64 ``[T, V]``: log-probabilities of what follows each token under ``table_weights``, by hand."""
    embed = np.asarray(params["embed"], np.float64)
    head = np.asarray(params["head"], np.float64) if "head" in params else embed.T
    x = embed[np.asarray(tokens)]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(params["final_norm"], np.float64)
    logits = x @ head / temperature
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def prompt(name: str, tokens: Sequence[int]) -> Prompt:
    return Prompt(id=name, tokens=np.asarray(tokens, np.int32), text="", gold="", verifier="", source="test")


def requests(groups: int, n: int, length: int = 6) -> list[Request]:
    """Different prompts, seeds all distinct."""
    return [
        Request(
            prompt(f"test/{g}", [3 + (7 * g + i) % (VOCAB - 3) for i in range(length)]),
            tuple(1000 * g + i for i in range(n)),
        )
        for g in range(groups)
    ]


def sampling(max_tokens: int = 6, temperature: float = 1.0, **more: Any) -> Sampling:
    return Sampling(temperature=temperature, max_tokens=max_tokens, stop_ids=(STOP,), **more)


def boot_directory(folder: Path, cfg: ModelConfig = QWEN3) -> Path:
    """What a server starts from: configs, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    layout(cfg).write_configs(folder)
    return folder


@contextlib.contextmanager
def engine(urls: Sequence[str], folder: Path, cfg: ModelConfig = QWEN3, **changes: Any) -> Iterator[SGLangEngine]:
    """An engine with short patience; ``changes`` are fields of ``Settings`` or arguments of the engine."""
    settings = {"in_flight": 64, "timeout_s": 20.0, "attempts": 4, "dead_after": 3}
    settings |= {"start_timeout_s": 10.0, "update_timeout_s": 20.0, "urls": tuple(urls)}
    settings |= {k: changes.pop(k) for k in list(changes) if k in settings or k == "router"}

    def score(params: Any, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(build._score(params, tokens, cfg=cfg, dtype=jnp.dtype("float32")))

    probe = changes.pop("probe", Probe(PROBE, score, 1e-3))
    made = SGLangEngine(Settings(**settings), layout(cfg), folder, probe, **{"context": CONTEXT} | changes)
    try:
        yield made
    finally:
        made.close()


def sglang_python() -> Path:
    """The interpreter with sglang; the test is skipped without, unless BRORL_SGLANG_REQUIRED is set (CI)."""
    path = Path(os.environ.get("BRORL_SGLANG_PYTHON", REPO / ".venv-sglang" / "bin" / "python"))
    if not path.is_file():
        message = f"needs a real SGLang server: no {path}; `make sglang-cpu` builds it"
        if os.environ.get("BRORL_SGLANG_REQUIRED"):
            raise AssertionError(message)
        pytest.skip(message)
    return path


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> None:
    """Returns as soon as ``condition`` holds; an error after ``timeout`` seconds names what was waited for."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cpu_launch(port: int, **more: Any) -> Any:
    """A ``rollout.sglang.launch`` section for the CPU server."""
    stubs = REPO / "tools" / "sglang_cpu" / "stubs"
    env = (f"PYTHONPATH={stubs}", "SGLANG_USE_CPU_ENGINE=1", "OMP_NUM_THREADS=1")
    fields = {"python": str(sglang_python()), "host": "127.0.0.1", "port": port}
    fields |= {"tp": 1, "dp": 1, "gpus": (), "mem_fraction": 0.5, "flags": CPU_FLAGS, "env": env}
    return SimpleNamespace(**(fields | more))


def real_specs(folder: Path, cfg: ModelConfig = QWEN3, servers: int = 1, **more: Any) -> list[launch.Spec]:
    """Real servers for ``cfg``, not started."""
    boot = boot_directory(folder / "boot", cfg)
    where = {"model": boot, "dtype": "float32", "context": CONTEXT + 8, "seed": 3, "logs": folder / "logs"}
    return launch.specs(cpu_launch(free_port(), **more), servers, **where)


@contextlib.contextmanager
def real_server(folder: Path, cfg: ModelConfig = QWEN3) -> Iterator[launch.Server]:
    """A running real server; not waited for, engines do that."""
    server = launch.Server(real_specs(folder, cfg)[0])
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder / "boot", ignore_errors=True)
