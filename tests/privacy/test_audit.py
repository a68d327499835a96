"""An attack on trained weights: what it learns stays below the claimed epsilon."""

import keras
import numpy as np
import pytest
import scipy.stats

from keras_paragrad.privacy import make_private

CANARIES, GUESSES, NOISE, UPDATES = 2000, 400, 1.0, 20


def lower_bound(right, guesses):
    """The least epsilon at which so many right guesses, or more, have a probability of 1 percent.

    Steinke et al., Privacy auditing with one (1) training run (2023), https://arxiv.org/abs/2305.08846,
    theorem 5.2 without its part in delta, which is far below 1 percent here.
    """
    tried = np.linspace(0, 10, 1001)
    chances = scipy.stats.binom.sf(right - 1, guesses, 1 / (1 + np.exp(-tried)))
    return tried[np.argmax(chances >= 0.01)] if chances[0] < 0.01 else 0.0


def attacked(actual_noise):
    """Trains on canaries of which each pulls at a weight of its own, and guesses from the weights which were there."""
    there = np.random.default_rng(0).random(CANARIES) < 0.5
    model = keras.Sequential(
        [keras.Input((CANARIES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    private = make_private(
        model,
        clip_norm=1.0,
        expected_batch_size=CANARIES // UPDATES,
        delta=1e-6,
        noise_multiplier=NOISE,
        seed=0,
    )
    private.compile(keras.optimizers.SGD(1e-3), "mse", run_eagerly=True)
    data = np.eye(CANARIES, dtype="float32"), np.ones((CANARIES, 1), "float32")
    private.privacy.set_examples(CANARIES)
    claimed = private.privacy.epsilon_of([], UPDATES)
    # What a mistake in the noise would do.
    private.privacy._noise = actual_noise
    private.fit(*data, sample_weight=there.astype("float32"), verbose=0)
    most = np.argsort(model.get_weights()[0].ravel())[-GUESSES:]
    return lower_bound(np.sum(there[most]), GUESSES), claimed


# In `make test`, test_noise.py and test_update.py hold noise and clipping to what is claimed.
@pytest.mark.long
def test_an_attack_learns_less_than_is_claimed():
    found, claimed = attacked(NOISE)
    assert found < claimed


@pytest.mark.long
def test_an_attack_shows_noise_that_is_missing():
    found, claimed = attacked(NOISE / 20)
    assert found > claimed
