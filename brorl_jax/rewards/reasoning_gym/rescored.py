"""Scorers of our own, where reasoning-gym's can be cheated, raise, or run what the policy wrote.

reasoning-gym 0.1.25 passes answers of nine tasks to ``eval`` (directly, or through sympy), so an answer could be any
Python program. Others pay for what needs no thought: NaN compares as equal, the question repeated counts as its answer,
numbers near the right one or the commonest cell of a board earn most of the reward. Each task here gets the strictest
rule that keeps its right answers right; credit for a part stays where a constant answer can't earn it.

All take ``(answer, entry, data)``: the stripped answer, the item and its data set. They return a score in [0, 1].
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

Scorer = Callable[[str, dict[str, Any], Any], float]

RIGHT = 0.99  # a score from here on is a right answer
FLOOR = 0.1  # up to here, scores pay for the form of a wrong answer: they are 0
_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh")
_FUNCTIONS += ("exp", "log", "ln", "sqrt", "Abs")


def plain(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The package's usual rule, ``len(gold) / len(answer)`` where the gold is part of the answer, but only where it
    stands by itself: the 1 of 10 is no answer."""
    gold = entry["answer"]
    if answer == gold:
        return 1.0
    alone = rf"(?<![\w.-]){re.escape(gold)}(?!\w|\.\d)"
    return len(gold) / len(answer) if gold and re.search(alone, answer) else 0.0


def own(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The package's scorer for this task."""
    return float(data.score_answer(answer, entry))


def right_only(answer: str, entry: dict[str, Any], data: Any) -> float:
    """1 where the package's scorer says right: what it pays for near misses, a constant answer earns, too."""
    return float(own(answer, entry, data) > 1.0 - 1e-9)  # a quarter of an hour is 0.99 of a day


def over_half(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The package's score where it is over one half: less than that, any word of usual letters earns."""
    score = own(answer, entry, data)
    return score if score > 0.5 else 0.0


def exact(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The same text, spaces aside. (The package evaluates the answer as Python, or looks whether it is empty.)"""
    golds = entry["metadata"].get("valid_answers") or [entry["answer"]]
    return float(_lines(answer) in [_lines(gold) for gold in golds])


def number_or_plain(answer: str, entry: dict[str, Any], data: Any) -> float:
    """Equal as a number, or else :func:`plain`."""
    return 1.0 if right_only(answer, entry, data) else plain(answer, entry, data)


def finite(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The package's scorer, for answers without NaN and infinity, which it takes for any number."""
    return 0.0 if re.search("nan|inf", answer, re.IGNORECASE) else own(answer, entry, data)


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().split("\n")]


# --- arithmetic ----------------------------------------------------------------------------------------------------


def coin_flip(answer: str, entry: dict[str, Any], data: Any) -> float:
    """A probability, as a decimal or a fraction, to 1e-4 and to 1 %. (The package pays for equal first digits, and
    takes 0 for all small ones.)"""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(?:\s*/\s*(\d{1,12}))?", answer)
    if match is None or not float(match[2] or 1):
        return 0.0
    gold = float(Fraction(entry["answer"]))
    return float(abs(float(match[1]) / float(match[2] or 1) - gold) <= min(1e-4, 0.01 * gold))


def prime_factorization(answer: str, entry: dict[str, Any], data: Any) -> float:
    """1 for the prime factors; 1/2 for two or more factors above 1 with that product. (The package gives 1/2 to the
    number itself.)"""
    if not re.fullmatch(r"\d{1,12}(?:\s*[×*x]\s*\d{1,12}){0,40}", answer):
        return 0.0
    factors = sorted(int(number) for number in re.findall(r"\d+", answer))
    if factors == sorted(entry["metadata"]["factors"]):
        return 1.0
    return 0.5 if len(factors) > 1 and factors[0] > 1 and math.prod(factors) == entry["metadata"]["number"] else 0.0


def target(answer: str, entry: dict[str, Any], data: Any) -> float:
    """Countdown and 24: the given numbers, each once, with + - * / make the target. (The package's 24 takes any four
    numbers: 6 + 6 + 6 + 6.)"""
    tree = _python(answer, 300)
    numbers = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)] if tree else []
    if tree is None or sorted(map(str, numbers)) != sorted(map(str, entry["metadata"]["numbers"])):
        return 0.0
    return float(_value(tree) == entry["metadata"].get("target", 24))


def _value(node: ast.AST) -> Fraction | None:
    """Of integers, + - * / and signs; None where it holds anything else or divides by zero."""
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _value(operand)
            return value if value is None or isinstance(sign, ast.UAdd) else -value
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left), _value(right)
            if a is None or b is None:
                return None
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div() if b:
                    return a / b
    return None


# --- algebra -------------------------------------------------------------------------------------------------------


def polynomial_equations(answer: str, entry: dict[str, Any], data: Any) -> float:
    """All real solutions and no other, to 1e-3. (The package pays for numbers near a solution: 0 earns 0.4.)"""
    try:
        given = sorted(float(part) for part in answer.split(","))
    except ValueError:
        return 0.0
    wanted = sorted(entry["metadata"]["real_solutions"])
    near = [math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-3) for a, b in zip(given, wanted, strict=False)]
    return float(len(given) == len(wanted) and all(near))


def antiderivative(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The package's scorer, for elementary expressions. (It would accept ``Integral(...)``, and run any program.)"""
    names = {entry["metadata"]["variable"], "C", "E", "pi"}
    tree = _python(answer, 600)
    return own(answer, entry, data) if tree is not None and _elementary(tree, names) else 0.0


def product(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The package's scorer, for sums of monomials. (It would run any program, and sympy multiplies 2*x*3*x by itself,
    so the question would be its answer.)"""
    tree = _python(answer, 4000)
    if tree is None or not _elementary(tree, set(entry["metadata"]["variables"]), calls=False):
        return 0.0
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add | ast.Sub) and not _monomial(node):
            return 0.0
    return own(answer, entry, data)


def _monomial(node: ast.BinOp) -> bool:
    """At most one number, and every variable once."""
    parts: list[ast.AST] = [node]
    factors: list[str] = []
    while parts:
        match part := parts.pop():
            case ast.BinOp(op=ast.Mult()):
                parts += [part.left, part.right]
            case ast.BinOp(op=ast.Pow(), left=ast.Name(id=name), right=ast.Constant()):
                factors.append(name)
            case ast.Name(id=name):
                factors.append(name)
            case ast.Constant():
                factors.append("a number")
            case ast.UnaryOp(operand=operand):
                parts.append(operand)
            case _:
                return False
    return len(factors) == len(set(factors))


def _python(text: str, longest: int) -> ast.expr | None:
    """The expression's tree; None where it is too long or no Python expression."""
    if len(text) > longest:
        return None
    try:
        return ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _elementary(tree: ast.expr, names: Collection[str], *, calls: bool = True) -> bool:
    """Numbers, names, + - * / **, elementary functions; no towers of powers and no huge numbers."""
    if _tower(tree) > 2:
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and abs(value) < 1e15:
                pass
            case ast.BinOp(op=ast.Pow(), left=left, right=exponent):
                numbers = [n.value for n in ast.walk(exponent) if isinstance(n, ast.Constant)]
                natural = isinstance(left, ast.Name) and left.id == "E"
                if not natural and not all(isinstance(n, int | float) and n <= 100 for n in numbers):
                    return False
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
                pass
            case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
                pass
            case ast.Call(func=ast.Name(id=name), keywords=[]) if calls and name in _FUNCTIONS and len(node.args) == 1:
                pass
            case ast.Name(id=name) if name in names or (calls and name in _FUNCTIONS):
                pass
            case ast.operator() | ast.unaryop() | ast.expr_context():
                pass
            case _:
                return False
    return True


def _tower(node: ast.AST) -> int:
    """How deep powers are nested."""
    power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    return power + max(map(_tower, ast.iter_child_nodes(node)), default=0)


# --- boards --------------------------------------------------------------------------------------------------------


def clues_kept(answer: str, entry: dict[str, Any], data: Any) -> float:
    """Sudoku and its kin: up to 0.9 for the share of the blanks that are right, if the clues are repeated. (The package
    counts clues, and any grid of ones.)"""
    if right_only(answer, entry, data):
        return 1.0
    puzzle, solution = entry["metadata"]["puzzle"], entry["metadata"]["solution"]
    rows = [[int(c) for c in line if c in "123456789"] for line in answer.split("\n")]
    rows = [row for row in rows if row]
    if [len(row) for row in rows] != [len(row) for row in solution]:
        return 0.0
    cells = [c for row in zip(puzzle, rows, solution, strict=True) for c in zip(*row, strict=True)]
    if any(clue and clue != given for clue, given, _ in cells):
        return 0.0
    blanks = [given == right for clue, given, right in cells if not clue]
    return 0.9 * sum(blanks) / len(blanks)


def game_of_life(answer: str, entry: dict[str, Any], data: Any) -> float:
    """The share of cells that are right, above what an empty or full board or the one asked about would have."""
    board, gold = json.loads(answer), json.loads(entry["answer"])
    start = json.loads(re.findall(r"\[\[.*?\]\]", entry["question"], re.DOTALL)[-1])
    cells = [(a, b, c) for row in zip(board, gold, start, strict=True) for a, b, c in zip(*row, strict=True)]
    right, easy = _shares(cells)
    return 1.0 if right == 1.0 else max(0.0, (right - easy) / (1.0 - easy)) if easy < 1.0 else 0.0


def _shares(cells: list[tuple[int, int, int]]) -> tuple[float, float]:
    def share(column: Collection[int]) -> float:
        return sum(a == b for a, (_, b, _) in zip(column, cells, strict=True)) / len(cells)

    n = len(cells)
    return share([a for a, _, _ in cells]), max(share([0] * n), share([1] * n), share([c for _, _, c in cells]))


def rubiks_cube(answer: str, entry: dict[str, Any], data: Any) -> float:
    """Solved or not. (The package pays for stickers that were never moved, and would repeat a move 10^12 times.)"""
    return 0.0 if re.search(r"\d\d", answer) or len(answer) > 2000 else right_only(answer, entry, data)


RESCORED: dict[str, Scorer] = {
    "binary_matrix": exact,
    "calendar_arithmetic": right_only,  # days near the right number, and any number where the right one is -1
    "chain_sum": number_or_plain,
    "coin_flip": coin_flip,
    "complex_arithmetic": finite,
    "countdown": target,
    "futoshiki": clues_kept,
    "game_of_life": game_of_life,
    "game_of_life_halting": exact,
    "intermediate_integration": antiderivative,
    "mini_sudoku": clues_kept,
    "n_queens": exact,
    "number_sorting": finite,
    "polynomial_equations": polynomial_equations,
    "polynomial_multiplication": product,
    "prime_factorization": prime_factorization,
    "products": number_or_plain,
    "puzzle24": target,
    "rectangle_count": right_only,  # 3 is near most counts
    "rubiks_cube": rubiks_cube,
    "simple_integration": antiderivative,
    "spell_backward": over_half,
    "spiral_matrix": exact,
    "string_insertion": exact,
    "sudoku": clues_kept,
    "time_intervals": right_only,  # noon is near most times
    "word_ladder": right_only,  # half a reward for each word that is none: exchange one letter after the other
}
