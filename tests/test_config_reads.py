"""Every config field is read by some code path: an option that does nothing is a defect.

The sources of the package are scanned for reads of ``config.<path>``. A name stands for a section if it was assigned
from one (``algo = config.algo``) or is called like one (an argument named ``optim``); ``**config.section`` and
``config.section.to_dict()`` read the whole section, since the callee refuses what it does not know;
``losses.bind(name, config.algo)`` reads what the functions of that registry take, and ``config.section[name]`` the
fields that the same file spells out as strings.
"""

from __future__ import annotations

import ast
import importlib
import pathlib

import pytest

from brorl_jax import config as config_lib
from brorl_jax.config_fields import leaves
from brorl_jax.learner import registry as registry_lib

PACKAGE = pathlib.Path(config_lib.__file__).parent
DEFINITIONS = ("config.py", "config_fields.py", "config_checks.py")
CLIPS = ("eps_low", "eps_high", "dual_clip")
# derived(config)["learning_rate"] is made of these and of nothing else
LEARNING_RATE = {"optim.lr", "optim.base_samples", "optim.lr_rule"}


def sections(paths: list[str]) -> dict[str, str]:
    """Last name -> dotted path of every section."""
    found = {path.rsplit(".", 1)[0] for path in paths if "." in path}
    found |= {path.rsplit(".", 1)[0] for path in found if "." in path}
    return {path.rsplit(".", 1)[-1]: path for path in found}


class Reads(ast.NodeVisitor):
    """Collects dotted paths of the fields that one source file reads."""

    def __init__(self, paths: list[str]):
        self.paths, self.names, self.read = paths, sections(paths), set()
        self.strings: set[str] = set()  # all string constants
        self.by_variable: set[str] = set()  # sections that were indexed with a variable

    def resolve(self, node: ast.expr) -> str | None:
        """Dotted path below the config that an expression stands for; '' is the config itself."""
        if isinstance(node, ast.Name):
            return "" if node.id == "config" else self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr in ("config", "_config"):
                return ""
            base = self.resolve(node.value)
            return None if base is None else f"{base}.{node.attr}".lstrip(".")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            base = self.resolve(node.value)
            return None if base is None else f"{base}.{node.slice.value}".lstrip(".")
        return None

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                path = self.resolve(value)
                if isinstance(name, ast.Name) and path and any(p.startswith(path + ".") for p in self.paths):
                    self.names[name.id] = path
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        whole = [keyword.value for keyword in node.keywords if keyword.arg is None]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to_dict":
            whole.append(node.func.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "bind" and len(node.args) == 2:
            section, taken = self.resolve(node.args[1]), hyperparameters(ast.unparse(node.func.value))
            self.read |= {f"{section}.{name}" for name in taken}
        for value in whole:
            section = self.resolve(value)
            self.read |= {path for path in self.paths if section and path.startswith(section + ".")}
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._load(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._load(node)

    def _load(self, node: ast.Attribute | ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load) and (path := self.resolve(node)):
            self.read.add(path)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            self.by_variable.add(self.resolve(node.value) or "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.add(node.value)

    def all_read(self) -> set[str]:
        indexed = {f"{section}.{name}" for section in self.by_variable for name in self.strings}
        return (self.read | indexed | (LEARNING_RATE if "learning_rate" in self.strings else set())) & set(self.paths)


def hyperparameters(registry: str) -> set[str]:
    """Settings that some function of ``brorl_jax.learner.<registry>`` takes."""
    module = importlib.import_module(f"brorl_jax.learner.{registry}")
    tables = [table for table in vars(module).values() if isinstance(table, dict)]
    functions = {f for table in tables for f in table.values() if callable(f) and f.__module__ == module.__name__}
    return {name for f in functions for name in registry_lib.hyperparameters(f)}


def reads(source: str, paths: list[str]) -> set[str]:
    """Fields among ``paths`` that ``source`` reads."""
    visitor = Reads(paths)
    visitor.visit(ast.parse(source))
    return visitor.all_read()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = config.algo.kl.coef", {"algo.kl.coef"}),
        ("algo = config.algo\nf(algo.loss, self.config.seed)", {"algo.loss", "seed"}),
        ("a, b = config.algo.kl, config.optim\na.clamp\nb['eps']", {"algo.kl.clamp", "optim.eps"}),
        ("def f(mismatch): return mismatch.high", {"algo.mismatch.high"}),
        ("Loop(**config.checkpoint)", {"checkpoint.every", "checkpoint.keep"}),
        ("config.rollout.n = 3", set()),
        ("derived(config)['learning_rate']", LEARNING_RATE),
        ("f = losses.bind(config.algo.loss, config.algo)", {f"algo.{x}" for x in ("loss", *CLIPS)}),
        ("f = mismatch.bind('tis', config.algo.mismatch)", {"algo.mismatch.low", "algo.mismatch.high"}),
        ("{n: config.optim[n] for n in ('b1', 'eps')}", {"optim.b1", "optim.eps"}),
        ("other.loss; config.algo", set()),
    ],
)
def test_the_scan_sees_reads_and_only_reads(source, expected):
    assert reads(source, leaves(config_lib.default())) == expected


@pytest.mark.skipif(not (PACKAGE / "train.py").is_file(), reason="there is no training loop to read the fields yet")
def test_every_field_is_read():
    paths = leaves(config_lib.default())
    read = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name not in DEFINITIONS or file.parent != PACKAGE:
            read |= reads(file.read_text(), paths)
    assert sorted(set(paths) - read) == []
