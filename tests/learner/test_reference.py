"""When the reference policy is reset."""

import pytest

from brorl_jax.learner.reference import reset_reason

OFF = {"every": 0, "kl_spike": 0.0, "stall": 0}
EVALS = [(10, 0.40), (20, 0.50), (30, 0.45), (40, 0.50)]


def reason(step=40, last_reset=0, kl=0.01, evals=EVALS, **rules):
    return reset_reason(step, last_reset, kl, evals, **OFF | rules)


def test_every_rule_is_off_at_zero():
    assert reason(step=10_000, kl=50.0) is None


def test_every_k_steps():
    assert [s for s in range(1, 100) if reason(step=s, last_reset=20, every=50) == "every"] == list(range(70, 100))


def test_kl_spike():
    assert reason(kl=0.3, kl_spike=0.2) == "kl_spike"
    assert reason(kl=0.2, kl_spike=0.2) is None
    assert reason(kl=None, kl_spike=0.2) is None
    assert reason(kl=float("nan"), kl_spike=0.2) is None


def test_stalled_validation():
    assert reason(stall=2) == "stall"  # 0.45 and 0.50 do not beat the 0.50 before them
    assert reason(stall=3) is None  # 0.50 beat 0.40
    assert reason(stall=4) is None  # nothing to compare with
    assert reason(stall=2, last_reset=30) is None  # one of the two was made before the reset took effect
    assert reason(stall=2, last_reset=29) == "stall"
    assert reason(stall=1, evals=[(10, 0.5), (20, 0.51)]) is None
    assert reason(stall=1, evals=[]) is None


def test_negative_settings_are_refused():
    with pytest.raises(ValueError, match="every=0, kl_spike=-1, stall=0"):
        reason(kl_spike=-1)
