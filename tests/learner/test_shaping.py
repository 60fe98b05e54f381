"""Length-dependent rewards by hand."""

import numpy as np
import pytest

from brorl_jax.learner import advantages, shaping

OFF = {
    "stop_properly": 1.0,
    "overlong_buffer": 0,
    "overlong_penalty": 0.0,
    "cosine_coef": 0.0,
    "cosine_min": 0.0,
    "cosine_max": 1.0,
    "cosine_on": 100,
    "cosine_off": 500,
}
REWARDS = np.array([[1.0, 1.0, 0.0, np.nan]], np.float32)
LENGTHS = np.array([[0, 100, 50, 75]])
TRUNCATED = np.array([[False, True, False, False]])


def shaped(update=0, **settings):
    return np.asarray(
        shaping.shape_rewards(REWARDS, LENGTHS, TRUNCATED, update=update, max_tokens=100, **OFF | settings)
    )


def test_off_leaves_rewards_alone():
    np.testing.assert_array_equal(shaped(), REWARDS)


def test_stop_properly():
    np.testing.assert_array_equal(shaped(stop_properly=0.0), [[1, 0, 0, np.nan]])
    np.testing.assert_array_equal(shaped(stop_properly=0.25), [[1, 0.25, 0, np.nan]])


def test_overlong_penalty_is_linear_over_the_buffer():
    lengths = np.array([[0, 60, 70, 80, 100, 120]])
    out = shaping.overlong_reward(lengths, max_tokens=100, buffer=40, penalty=0.5)
    np.testing.assert_allclose(out, [[0, 0, -0.125, -0.25, -0.5, -0.5]])
    with pytest.raises(ValueError, match=r"\[0, max_tokens = 100\], got 101"):
        shaping.overlong_reward(lengths, max_tokens=100, buffer=101, penalty=0.5)
    with pytest.raises(ValueError, match=r"must be >= 0, got -0\.5"):
        shaping.overlong_reward(lengths, max_tokens=100, buffer=40, penalty=-0.5)


def test_truncated_samples_keep_their_penalty():
    out = shaped(stop_properly=0.0, overlong_buffer=20, overlong_penalty=1.0)
    np.testing.assert_array_equal(out, [[1, -1, 0, np.nan]])


def test_cosine_reward():
    # cos(0) = 1, cos(pi) = -1, cos(pi / 2) = 0, cos(3 pi / 4) = -sqrt(1/2).
    out = shaping.cosine_reward(LENGTHS, max_tokens=100, eta_min=-1.0, eta_max=0.5)
    np.testing.assert_allclose(out, [[0.5, -1.0, -0.25, -1 + 0.75 * (1 - np.sqrt(0.5))]], atol=1e-6)
    out = shaped(cosine_coef=0.1, cosine_min=-1.0, cosine_max=0.5)
    np.testing.assert_allclose(out, [[1.05, 0.9, -0.025, np.nan]], atol=1e-6)


def test_cosine_schedule():
    active = [u for u in range(1300) if shaping.cosine_active(u, on=100, off=500)]
    assert active == [*range(100), *range(600, 700), *range(1200, 1300)]
    assert all(shaping.cosine_active(u, on=1, off=0) for u in range(5))
    assert not any(shaping.cosine_active(u, on=0, off=5) for u in range(5))
    np.testing.assert_array_equal(shaped(update=100, cosine_coef=0.1), REWARDS)
    with pytest.raises(ValueError, match="on = -1, off = 5"):
        shaping.cosine_active(0, on=-1, off=5)


def test_an_equal_group_may_be_shaped_but_is_still_filtered():
    # The filter reads raw rewards: shaping spreads this group's, and does not make it worth keeping.
    rewards, valid = np.ones((1, 3), np.float32), np.ones((1, 3), bool)
    settings = OFF | {"overlong_buffer": 50, "overlong_penalty": 1.0}
    out = shaping.shape_rewards(
        rewards, np.array([[10, 80, 90]]), np.zeros((1, 3), bool), update=0, max_tokens=100, **settings
    )
    assert advantages.informative(out, valid)[0] and not advantages.informative(rewards, valid)[0]
