"""What counts as the same output or value, worked by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl_jax.rewards.compare import same_output, same_value

OUTPUTS = [
    ("3\n", "3", True),
    ("  1 2\n\n3 ", "1\n2 3\n", True),
    ("1 2", "12", False),
    ("", "", True),
    ("", "0", False),
    ("YES", "yes", False),
    ("3.0", "3", True),
    ("3.0000001", "3", False),
    ("3.", "3", True),
    ("003", "3", True),
    ("+3", "3", True),
    ("-0", "0", True),
    ("0.3333333", "0.33333333", True),
    ("0.333", "0.33333333", False),
    ("1000000.5", "1000000.0", True),  # relative above 1
    ("1000002.0", "1000000.0", False),
    ("1e3", "1000.0", True),
    ("1e3", "1000", False),
    ("nan", "nan", True),  # the same word
    ("nan", "1.5", False),
    ("inf", "1.5", False),
    ("1e999", "1.5", False),
    ("9" * 400, "9" * 400, True),
    ("1_000", "1000", False),
    ("١", "1", False),
    ("1 1 1", "1 1", False),
    ("x" * 10**6, "1", False),
]


@pytest.mark.parametrize("got, expected, same", OUTPUTS)
def test_output(got, expected, same):
    assert same_output(got.encode(), expected) is same


def test_any_of_several_outputs():
    assert same_output(b"2 1", ["1 2", "2 1"]) and not same_output(b"2 2", ["1 2", "2 1"])


def test_output_that_is_no_text():
    assert not same_output(b"\xff\xfe", "1") and same_output(b"1 \x00"[:2], "1")


VALUES = [  # as the runner writes them
    ("3", 3, True),
    ("3", 4, False),
    ("3.0", 3, True),
    ("3", 3.0, True),
    ("true", 1, False),
    ("1", True, False),
    ("true", True, True),
    ("null", None, True),
    ("null", [], False),
    ('"a"', "a", True),
    ('"1"', 1, False),
    ("0.30000000000000004", 0.3, True),
    ("NaN", 0.5, False),
    ("Infinity", 0.5, False),
    ('["i","ffffffffffffffffffff"]', 0xFFFFFFFFFFFFFFFFFFFF, True),
    ('["l",[1,2]]', [1, 2], True),
    ('["t",[1,["l",[2]]]]', [1, [2]], True),
    ('["l",[1,2]]', [2, 1], False),
    ('["l",[1]]', 1, False),
    ('["s",[2,1]]', [1, 2], True),
    ('["s",[1,2]]', [1, 1], False),
    ('["s",[["t",[1,2]],3]]', [3, [1, 2]], True),
    ('["d",[["a",1]]]', {"a": 1}, True),
    ('["d",[[1,2]]]', {"1": 2}, True),
    ('["d",[["a",1],["a",1]]]', {"a": 1}, False),
    ('["d",[["a",1],["b",2]]]', {"a": 1}, False),
    ('["r",12345]', 12345, False),
    ('["b","a"]', "a", False),
    ('{"a":1}', {"a": 1}, False),  # not written by the runner
    ("[]", [], False),
    ('["l"]', [], False),
    ('["l",5]', [], False),
    ('["d",[1]]', {}, False),
    ("[[]]", [], False),
    ("", None, False),
    ("[" * 10**5, [], False),
    ('["l",[' * 5000 + "]]" * 5000, [], False),
]


@pytest.mark.parametrize("reply, expected, same", VALUES)
def test_value(reply, expected, same):
    assert same_value(reply.encode(), expected) is same


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def written(x):
    """The runner's writing of a value from JSON."""
    if isinstance(x, list):
        return ["l", [written(v) for v in x]]
    if isinstance(x, dict):
        return ["d", [[k, written(v)] for k, v in x.items()]]
    return ["i", f"{x:x}"] if isinstance(x, int) and abs(x) >= 1 << 62 else x


@given(plain)
def test_a_value_is_itself(x):
    assert same_value(json.dumps(written(x)).encode(), x)


@given(plain, plain)
def test_another_value_is_another(x, y):
    if json.dumps(x, sort_keys=True) != json.dumps(y, sort_keys=True) and not numbers_alike(x, y):
        assert not same_value(json.dumps(written(x)).encode(), y)


def numbers_alike(x, y):
    """Values that differ by no more than the tolerance somewhere, or by the kind of number."""
    if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
        return all(map(numbers_alike, x, y))
    if isinstance(x, dict) and isinstance(y, dict) and x.keys() == y.keys():
        return all(numbers_alike(v, y[k]) for k, v in x.items())
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (x, y))
    return x == y or (numbers and math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-5))
