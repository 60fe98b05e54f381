"""Laws of the one-step theory, over arbitrary policies, labels and samples."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import assume, given, settings
from hypothesis.extra.numpy import arrays

from brorl_jax.theory import mass_balance as mb
from brorl_jax.theory.precision import float64

law = settings(max_examples=60, deadline=None)
V = 8  # one shape, one compilation; a token of probability 0 makes the vocabulary smaller

weights = arrays(np.float64, V, elements=st.floats(0, 1) | st.floats(0, 1e-9))
labels = arrays(np.bool_, V)
counts = arrays(np.int64, V, elements=st.integers(0, 40))
draws = st.integers(1, 10**6)


def normalised(w: np.ndarray) -> np.ndarray:
    assume(w.sum() > 1e-12)
    return w / w.sum()


@given(w=weights, correct=labels, c=counts, r_c=st.floats(0, 10), r_w=st.floats(-10, 0))
@law
def test_sampled_terms_never_cost_correct_mass(w, correct, c, r_c, r_w):
    p = normalised(w)
    assume(c.sum() > 0)
    b = float64(mb.balance)(p, correct, c, np.where(correct, r_c, r_w))
    t = float64(mb.terms)(b)
    rounding = 1e-13 * (r_c - r_w)
    assert r_w - rounding <= b.s_r <= r_c + rounding
    assert t.sampled_correct >= -rounding and t.sampled_incorrect >= -rounding
    assert t.unsampled == 0 or b.s_r != 0


@given(w=weights, n=draws, more=draws)
@law
def test_expected_unsampled_moment_falls_with_n_below_the_bound(w, n, more):
    p = normalised(w)
    moment = float64(mb.unsampled_second_moment)(p, n)
    assert float64(mb.unsampled_second_moment)(p, n + more) <= moment
    bound = float64(mb.unsampled_second_moment_bound)(n)
    assert moment <= bound * (1 + 1e-12)
    assert bound <= 1 / (np.e * n)


@given(w=weights, correct=labels, c=counts, s=arrays(np.float64, V, elements=st.floats(-5, 5)))
@law
def test_mass_is_conserved(w, correct, c, s):
    """What the correct tokens gain, the others lose; a signal equal on all tokens moves nothing."""
    p = normalised(w)
    assume(c.sum() > 0)
    gain = float64(mb.delta_expectation)(p, correct.astype(float), s, 1, 1.0)
    loss = float64(mb.delta_expectation)(p, (~correct).astype(float), s, 1, 1.0)
    assert abs(gain + loss) < 1e-13
    still = float64(mb.logit_update)(p, np.full(V, s[0]), 1, 1.0)
    assert np.abs(still).max() < 1e-14
    # Equal rewards on every token, all of them sampled: the whole bracket vanishes.
    b = float64(mb.balance)(p, correct, np.ones(V, int), np.full(V, s[0]))
    assert abs(float64(mb.terms)(b).sampled_correct + float64(mb.terms)(b).sampled_incorrect) < 1e-13
