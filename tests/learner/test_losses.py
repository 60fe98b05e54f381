"""Per-token losses against the papers' formulas, written once more in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brorl_jax.learner import losses, reduce

HYPER = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
SEGMENTS = np.array([1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0])
MASK = np.array([1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0], bool)
RATIO = np.array([1.0, 0.5, 2.0, 0.5, 2.0, 5.0, 9.0, 1.1, 0.9, 4.0, 0.1])
ADVANTAGE = np.array([1, 1, 1, -1, -1, -2, -2, -2, -2, 0, 0], float)
OLD = np.linspace(-3, -0.1, 11)


def run(name, logp, old=OLD, hyper=HYPER, jit=False):
    function = losses.bind(name, hyper)

    def total(logp):
        arguments = (jnp.asarray(x, jnp.float32) for x in (old, ADVANTAGE))
        loss, aux = function(logp, *arguments, jnp.asarray(MASK), jnp.asarray(SEGMENTS))
        return loss.sum(), (loss, aux)

    grad = jax.value_and_grad(total, has_aux=True)
    (_, (loss, aux)), gradient = (jax.jit(grad) if jit else grad)(jnp.asarray(logp, jnp.float32))
    return np.asarray(loss), {k: np.asarray(v) for k, v in aux.items()}, np.asarray(gradient)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_ppo_clip(jit, dual_clip):
    loss, aux, gradient = run("ppo_clip", OLD + np.log(RATIO), hyper=HYPER | {"dual_clip": dual_clip}, jit=jit)
    objective = np.minimum(RATIO * ADVANTAGE, np.clip(RATIO, 0.8, 1.28) * ADVANTAGE)
    if dual_clip:
        objective = np.where(ADVANTAGE < 0, np.maximum(objective, dual_clip * ADVANTAGE), objective)
    np.testing.assert_allclose(loss, np.where(MASK, -objective, 0), rtol=1e-5)
    # By hand: A > 0 is cut above 1.28 (ratio 2), A < 0 below 0.8 (ratio 0.5) and, with dual clip, above 3 (ratio 5).
    np.testing.assert_array_equal(aux["clipped_low"], [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(aux["clipped_high"], [0, 0, 1, 0, 0, dual_clip > 0, 0, 0, 0, 0, 0])
    free = MASK & (aux["clipped_low"] + aux["clipped_high"] == 0)
    np.testing.assert_allclose(gradient, np.where(free, -RATIO * ADVANTAGE, 0), rtol=1e-5)
    np.testing.assert_allclose(aux["ratio"], np.where(MASK, RATIO, 0), rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_gspo_is_the_sequence_objective_of_the_paper(jit):
    logp = OLD + np.array([0.3, 0.1, -0.1, -0.2, 0.1, 0.1, 9.0, 0.1, 0.6, 5.0, 5.0])
    loss, aux, gradient = run("gspo", logp, jit=jit)
    # Geometric means of the ratios: exp(0.1), exp(-0.05) and, over its three trained tokens, exp(0.8 / 3) = 1.306.
    ratio = np.exp([0.1] * 3 + [-0.05] * 2 + [0.8 / 3] * 4 + [0, 0])
    np.testing.assert_allclose(loss, np.where(MASK, -ratio * ADVANTAGE, 0), rtol=1e-5)
    np.testing.assert_allclose(aux["ratio"], np.where(MASK, ratio, 0), rtol=1e-5)
    assert aux["clipped_low"].sum() == aux["clipped_high"].sum() == 0

    def paper(logp):
        total = 0.0
        for segment in (1, 2, 3):
            at = np.flatnonzero((segment == SEGMENTS) & MASK)
            s, a = jnp.exp(jnp.mean(logp[at] - OLD[at])), ADVANTAGE[at[0]]
            total -= jnp.minimum(s * a, jnp.clip(s, 0.8, 1.28) * a) / 3
        return total

    weights = np.asarray(
        reduce.get("sequence")(jnp.asarray(MASK), jnp.asarray(SEGMENTS), tokens=8, sequences=3, max_tokens=4)
    )
    value, direct = jax.jit(jax.value_and_grad(paper))(jnp.asarray(logp, jnp.float32))
    np.testing.assert_allclose((loss * weights).sum(), value, rtol=1e-5)
    np.testing.assert_allclose(gradient * weights, direct, rtol=1e-5, atol=1e-7)


def test_gspo_clips_whole_responses():
    _, aux, gradient = run("gspo", OLD + np.array([0.5, 0.0, 0.4, -0.5, -0.1, 2.0, 0.0, 2.0, 2.0, 0, 0]), jit=True)
    np.testing.assert_array_equal(aux["clipped_high"], [1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0])  # exp(0.3), dual: exp(2) > 3
    np.testing.assert_array_equal(aux["clipped_low"], [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0])  # exp(-0.3), A < 0
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("jit", [False, True])
def test_cispo_keeps_every_gradient(jit):
    logp = OLD + np.log(RATIO)
    loss, aux, gradient = run("cispo", logp, jit=jit)
    weight = np.where(MASK, np.clip(RATIO, 0.8, 1.28), 0)
    np.testing.assert_allclose(loss, -weight * ADVANTAGE * logp, rtol=1e-5)
    np.testing.assert_allclose(gradient, -weight * ADVANTAGE, rtol=1e-5)
    np.testing.assert_array_equal(aux["clipped_high"], MASK & (RATIO > 1.28))
    np.testing.assert_array_equal(aux["clipped_low"], MASK & (RATIO < 0.8))


@pytest.mark.parametrize("jit", [False, True])
def test_reinforce_and_sft(jit):
    logp = OLD + np.log(RATIO)
    loss, aux, gradient = run("reinforce", logp, jit=jit)
    np.testing.assert_allclose(loss, np.where(MASK, -ADVANTAGE * logp, 0), rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.where(MASK, -ADVANTAGE, 0))
    np.testing.assert_allclose(aux["ratio"], np.where(MASK, RATIO, 0), rtol=1e-5)
    loss, aux, gradient = run("sft", logp, old=np.full(11, np.nan), jit=jit)
    np.testing.assert_allclose(loss, np.where(MASK, -logp, 0), rtol=1e-6)
    np.testing.assert_array_equal(gradient, -MASK.astype(float))
    np.testing.assert_array_equal(aux["ratio"], MASK)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_first_update_has_ratio_exactly_one(name):
    _, aux, _ = run(name, OLD, jit=True)
    np.testing.assert_array_equal(aux["ratio"], MASK)
    assert not aux["clipped_low"].any() and not aux["clipped_high"].any()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_absurd_log_ratios_stay_finite(name, shift):
    loss, aux, gradient = run(name, OLD + shift, hyper=HYPER | {"dual_clip": 0.0}, jit=True)
    assert all(np.isfinite(x).all() for x in (loss, gradient, *aux.values()))


def test_settings_reach_the_losses_that_read_them():
    assert losses.hyperparameters("gspo") == ("eps_low", "eps_high", "dual_clip")
    assert losses.hyperparameters("cispo") == ("eps_low", "eps_high")
    assert losses.hyperparameters("reinforce") == losses.hyperparameters("sft") == ()
    with pytest.raises(ValueError, match=r"unknown loss 'ppo'; known: cispo, gspo, ppo_clip, reinforce, sft"):
        losses.bind("ppo", HYPER)
    with pytest.raises(ValueError, match=r"greater than 1 .* got 0\.5"):
        run("ppo_clip", OLD, hyper=HYPER | {"dual_clip": 0.5})
