"""Plain arithmetic: what is read and what is refused, values against mpmath and sympy, and real differences."""

import mpmath
import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from brorl_jax.data import sources
from brorl_jax.rewards.math import equal, estimate, structure, symbolic
from brorl_jax.rewards.math.estimate import differ, estimates
from brorl_jax.rewards.math.normal import compact
from brorl_jax.rewards.math.structure import Kind

LETTERS = "abtxyzAB"
MP = mpmath.mp.clone()
MP.prec = 200


def atoms():
    numbers = st.integers(0, 99).map(lambda n: (str(n), MP.mpf(n)))
    decimals = st.integers(1, 999).map(lambda n: (f"{n // 100}.{n % 100:02}", MP.mpf(n) / 100))
    names = st.sampled_from(LETTERS).map(lambda name: (name, MP.mpf(estimate.letter(name, 0))))
    constants = st.sampled_from([(r"\pi", +MP.pi), ("e", +MP.e)])
    return st.one_of(numbers, decimals, names, constants)


def combined(parts):
    """Larger expressions as (text, value): the text as LaTeX writes it, the value by mpmath alone."""

    def binary(text, value):
        return st.tuples(parts, parts).map(lambda p: (text(p[0][0], p[1][0]), value(p[0][1], p[1][1])))

    def unary(text, value):
        return parts.map(lambda p: (text(p[0]), value(p[1])))

    return st.one_of(
        binary(lambda a, b: f"({a}+{b})", lambda a, b: a + b),
        binary(lambda a, b: f"({a}-{b})", lambda a, b: a - b),
        binary(lambda a, b: rf"{a}\cdot ({b})", lambda a, b: a * b),
        binary(lambda a, b: rf"\frac{{{a}}}{{{b}}}", lambda a, b: a / b if b else MP.nan),
        binary(lambda a, b: f"({a})/({b})", lambda a, b: a / b if b else MP.nan),
        unary(lambda a: f"({a})^2", lambda a: a**2),
        unary(lambda a: f"({a})^{{-3}}", lambda a: a**-3 if a else MP.nan),
        unary(lambda a: rf"\sqrt{{{a}}}", MP.sqrt),
        unary(lambda a: rf"\sqrt[3]{{{a}}}", MP.cbrt),
        unary(lambda a: rf"\sin({a})", MP.sin),
        unary(lambda a: rf"\cos({a})", MP.cos),
        unary(lambda a: rf"\tan({a})", MP.tan),
        unary(lambda a: rf"\ln({a})", lambda a: MP.log(a) if a else MP.nan),
    )


EXPRESSIONS = st.recursive(atoms(), combined, max_leaves=8)


@settings(max_examples=400, deadline=None)
@given(EXPRESSIONS)
def test_the_value_lies_within_the_error(expression):
    text, value = expression
    found = estimates(compact(text))
    if found is not None:
        assert MP.im(value) == 0, text
        assert abs(MP.re(value) - found[0].value) <= found[0].error, (text, value, found[0])
        assert found[0].error <= 1e-2 * max(1, abs(found[0].value)), text


@settings(max_examples=100, deadline=None)
@given(EXPRESSIONS)
def test_sympy_gets_the_same_from_the_reader_as_from_its_own_parser(expression):
    text, value = expression
    found = estimates(compact(text))
    assume(found is not None)
    by_reader = symbolic.expression(compact(text), r"\log")
    assert by_reader is not None
    letters = {symbolic.arithmetic.read(name, symbolic._Sympy()): estimate.letter(name, 0) for name in LETTERS}
    assert abs(by_reader.evalf(20, subs=letters) - found[0].value) <= found[0].error + 1e-12 * abs(value)


@pytest.mark.parametrize(
    "text",
    ["1/2x", "x2", r"2\frac{1}{2}", "f(x)", "x(x+1)", "dx", r"\frac{dy}{dx}", "i", "2i", r"\sin xy", r"\sin x^2",
     r"\sin^2x", r"\sin^{-1}x", r"\sin x/2", r"\log2", "x_1", "|x|", "5!", "2^12", "x^y^z", r"\sqrt{-1}", "(-8)^{1/3}",
     "1/0", r"\frac{1}{x-x}", "0^0", "2^{2000}", r"\tan(\pi/2)", r"\ln0", r"\sin(10^{9})", "(", ")", "", "+", "1+",
     "^2", r"\sqrt", r"\frac{1}", "(1]", r"\cos(2n\pi)", r"\sin(k\pi)", "1,2", "x=1", r"30^\circ", "10^{400}", "x'"],
)  # fmt: skip
def test_what_could_be_read_in_two_ways_or_has_no_value_is_refused(text):
    assert estimates(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("2\\pi", 6.283185307179586), ("-2^2", -4), ("2^{-1}", 0.5), (r"2\cdot3/4", 1.5), ("1/2/5", 0.1), (r"\cos2\pi", 1),
     (r"3\sqrt{16}", 12), (r"\sqrt[3]{27}", 3), (r"2\sin\frac{\pi}{6}", 1), ("(1+2)(3+4)", 21), ("4^{1/2}", 2),
     (r"\frac{1}{2}-\frac{1}{3}", 1 / 6), (r"\sin(1)\cos(1)", 0.45464871341284085), (r"\ln(e^2)", 2), ("{5}", 5)],
)  # fmt: skip
def test_plain_values(text, value):
    assert [e.value for e in estimates(text)] == pytest.approx([value, value], rel=1e-14)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS)
def test_values_that_differ_differ_and_equal_ones_are_never_told_apart(one, other):
    (a, x), (b, y) = one, other
    assert not differ(compact(f"({a})+({b})"), compact(f"({b})+({a})"))
    assert not differ(compact(f"({a}+{b})^2"), compact(f"({a})^2+2({a})({b})+({b})^2"))
    if differ(compact(a), compact(b)) and not set(LETTERS) & set(a + b):
        assert abs(x - y) > 1e-5 * max(abs(x), abs(y))


def test_letters_make_a_difference():
    assert differ("2x", "2y") and differ("x", "X") and differ(r"\theta", r"\phi") and not differ("xy", "yx")


def test_a_decimal_that_stands_for_a_root_is_left_to_algebra():
    assert not differ(r"\sqrt{2}", "1.41421") and equal(r"\sqrt{2}", "1.41421")
    assert differ(r"\sqrt{2}", "1.414") and not equal(r"\sqrt{2}", "1.414")


def leaves(node):
    if node.kind is Kind.EXPRESSION:
        yield node.source
    for item in node.items:
        yield from leaves(item)


@pytest.mark.slow
def test_golds_have_the_values_that_the_library_s_parser_gives_them(shared_data, monkeypatch):
    source = sources.load("m", {"kind": "jsonl", "preset": "math500", "path": str(shared_data / "math500.jsonl")})
    texts = {leaf for i in range(len(source)) for leaf in leaves(structure.parse(source[i].gold))}

    def refuse(*_):
        raise symbolic.arithmetic.UnreadError

    monkeypatch.setattr(symbolic.arithmetic, "read", refuse)
    symbolic.expression.cache_clear()
    read = 0
    for text in sorted(texts):
        found = estimates(text) if len(text) > 1 and not text.isdecimal() else None
        if found is None:
            continue
        by_library = symbolic.expression(text, r"\log")
        values = {}
        for symbol in by_library.free_symbols:
            name = symbol.name[6:-1].upper() if symbol.name.startswith("z_{cap") else symbol.name
            values[symbol] = sympy.Float(estimate.letter(name if len(name) == 1 else f"\\{name}", 0), 30)
        assert abs(by_library.evalf(30, subs=values) - found[0].value) <= found[0].error, text
        read += 1
    symbolic.expression.cache_clear()
    assert read > 60
