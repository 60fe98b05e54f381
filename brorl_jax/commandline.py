"""What the commands share: ``--config=FILE`` with overrides, ``--dry_run``, and mistakes as one line.

``--config.<field>=<value>`` overrides any field of the config. A mistake in flags or config ends with one line on
stderr and exit status 2 before anything is imported, loaded or written.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_flags

from brorl_jax import config as config_lib
from brorl_jax.config import Config
from brorl_jax.config_fields import check_override
from brorl_jax.errors import UserError, mistake

WIDTH, KEY = 120, 20  # columns of what a dry run prints, and of a section's name
P = ParamSpec("P")
T = TypeVar("T")

flags.DEFINE_bool("dry_run", False, "Print the resolved config and its derived figures; import no jax, write nothing.")


def load(path: str) -> Config:
    """Runs ``get_config()`` of a config file (``file.py`` or ``file.py:argument``); it may import its neighbours."""
    name, *argument = path.split(":", 1)
    file = pathlib.Path(name)
    if not file.is_file():
        raise UserError(f"--config={path}: there is no file {name}; name a Python file with get_config()")
    sys.path.insert(0, str(file.resolve().parent))
    try:
        config = runpy.run_path(name)["get_config"](*argument)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        where = f"{name}:{lines[-1]}" if lines else name
        message = str(error).splitlines()[0] if str(error) else ""
        raise UserError(f"{where}: get_config() failed: {type(error).__name__}: {message}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(config, ConfigDict):
        raise UserError(f"{name}: get_config() returned {type(config).__name__}; return a ConfigDict")
    return config


def parser(example: str, finish: Callable[[Config], None]) -> Callable[[list[str]], list[str]]:
    """A ``flags_parser`` for ``absl.app.run``; ``FLAGS.config`` is then the file's config with the overrides applied.

    Args:
        example: A value of ``--config`` to name where it is missing.
        finish: Sees the config when all flags are parsed: completes it, validates it.
    """

    def parse(argv: list[str]) -> list[str]:
        first = flags.FlagValues()
        first.set_gnu_getopt(True)
        flags.DEFINE_string("config", None, "", flag_values=first)
        rest = first(argv, known_only=True)
        if first.config is None:
            if any(re.match(r"--?help", arg) for arg in rest):
                about = f"Python file with get_config(), such as {example}; --config.<field>=<value> overrides a field."
                flags.DEFINE_string("config", None, about)
                for name in ("config", "dry_run"):  # absl's --help shows what the main module defines itself
                    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
                return flags.FLAGS(rest)
            raise UserError(f"--config is missing; for example --config={example}")
        config = load(first.config)
        for arg in rest[1:]:
            if override := re.match(r"--?(?:no)?config\.([^=]*)", arg):
                check_override(override[1], config)
        try:
            config_flags.DEFINE_config_dict("config", config, "Set by --config=FILE.", sys_argv=rest)
            left = flags.FLAGS(rest)
        except (flags.Error, TypeError, ValueError) as error:
            raise UserError(str(error).splitlines()[0]) from error
        if left[1:]:
            raise UserError(f"{left[1]!r} is not a flag; write --name=value")
        finish(flags.FLAGS.config)
        return left

    return guarded(parse)


def make_folder(flag: str, path: pathlib.Path) -> None:
    """Makes the folder that a command writes to, before anything slow happens.

    Raises:
        UserError: It cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}={path}: {error.strerror}; name a folder that can be written") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{flag}={path}: may not be written; name a folder that can be written")


def print_dry_run(config: Config) -> None:
    """What follows from the resolved config, and the config, as JSON that a person can read."""
    print(_json({"derived": config_lib.derived(config), "config": config.to_dict()}))


def _json(value: dict[str, Any], margin: str = "") -> str:
    """``value`` with as many entries to a line as fit, but one where entries are objects (data sources)."""
    one_line = json.dumps(value)
    if "{" not in one_line[1:] and len(margin) + len(one_line) < WIDTH - KEY:
        return one_line
    inner = margin + "  "
    table = bool(margin) and all(isinstance(v, dict) for v in value.values())
    lines = [inner]
    for key, item in value.items():
        nested = isinstance(item, dict)
        entry = f"{json.dumps(key)}: {_json(item, inner) if nested and not table else json.dumps(item)}, "
        if lines[-1] != inner and (nested or len(lines[-1] + entry) > WIDTH):
            lines.append(inner)
        lines[-1] += entry
        if nested:
            lines.append(inner)
    lines = [line.rstrip() for line in lines if line != inner]
    return "\n".join(["{", *lines]).removesuffix(",") + f"\n{margin}}}"


def piped(main: Callable[P, T]) -> Callable[P, T]:
    """``main``, ended without a traceback when nobody reads its output any more (``| head``): status 141.

    SIGPIPE itself would do the same, but also for every socket and every other pipe.
    """

    @functools.wraps(main)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # here and not at the interpreter's end, where nobody could catch it
        except BrokenPipeError:
            if not _unread(sys.stdout.fileno()):
                raise  # another pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to be flushed
            sys.exit(128 + signal.SIGPIPE)

    return wrapper


def _unread(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def guarded(function: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """``function``, with a ``UserError`` or a path that can't be used shown as one line and exit status 2."""

    @piped
    def wrapper(argv: list[str]) -> Any:
        try:
            return function(argv)
        except (UserError, OSError) as error:
            if not (text := mistake(error)):
                raise
            print(f"error: {text}", file=sys.stderr)
            sys.exit(2)

    return wrapper
