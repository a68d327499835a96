"""The noise, by statistics of the weights alone."""

import functools

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from keras_paragrad.privacy import make_private
from keras_paragrad.privacy.update import system_normals

WIDTH, UPDATES, MULTIPLIER, CLIP, SIZE = 300, 20, 0.7, 2.0, 5


class Recorder(keras.callbacks.Callback):
    """Keeps the weights after each update."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_begin(self, batch, logs=None):
        if not self.weights:
            self.weights.append(self.model.per_example.layer.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.per_example.layer.get_weights())


def moves(seed=None, physical=None, jit=False, secure=False, updates=UPDATES, eager=False):
    """What each update adds to the kernel and the bias of a model whose gradients are 0, in units of the noise."""
    # What a seed gives goes by the weights that training begins with.
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(WIDTH)])
    private = make_private(
        *(model,),
        clip_norm=CLIP,
        noise_multiplier=MULTIPLIER,
        expected_batch_size=SIZE,
        delta=1e-3,
        physical_batch_size=physical,
        secure_noise=secure,
        seed=seed,
    )
    private.compile(keras.optimizers.SGD(SIZE / (MULTIPLIER * CLIP)), "mse", jit_compile=jit, run_eagerly=eager)
    recorder = Recorder()
    data = np.zeros((SIZE * updates, 10)), np.zeros((SIZE * updates, WIDTH))
    private.fit(*data, sample_weight=np.zeros(len(data[0])), callbacks=[recorder], verbose=0)
    kernels, biases = ([each[place] for each in recorder.weights] for place in (0, 1))
    return -np.diff(kernels, axis=0).reshape(updates, -1), -np.diff(biases, axis=0)


@pytest.mark.few(0, "None-False-False")
@pytest.mark.parametrize(
    ("physical", "jit", "secure"),
    [
        (None, False, False),
        (4, True, False),
        (1, False, True),
        *(pytest.param(size, size % 2 == 0, size == 5, marks=pytest.mark.long) for size in (2, 3, 5, 6, 8, 12)),
    ],
)
def test_noise_is_normal_and_independent(physical, jit, secure):
    kernels, biases = moves(physical=physical, jit=jit, secure=secure)
    assert kernels.shape == (UPDATES, 10 * WIDTH)
    for draws in (kernels, biases):
        flat = draws.ravel()
        # Each of these fails once in a million runs of a right program.
        low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], flat.size)
        assert low < np.sum(flat**2) < high
        fourth = np.mean(flat**4)
        assert abs(fourth - 3) < 5 * np.sqrt(96 / flat.size)
        assert scipy.stats.kstest(flat, "norm").pvalue > 1e-6
        # Of one update and another.
        correlations = np.corrcoef(draws)[np.triu_indices(UPDATES, 1)]
        assert np.abs(correlations).max() < 6 / np.sqrt(draws.shape[1])
    # Of one variable and another, and of their sizes: numbers of one key have those in common.
    one, other = kernels[:, :WIDTH].ravel(), biases.ravel()
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(other.size)
    assert abs(np.corrcoef(one**2, other**2)[0, 1]) < 8 / np.sqrt(other.size)


def test_a_seed_repeats_noise_and_nothing_else_does():
    # Of a few updates, tracing would take nearly all of the time.
    few = functools.partial(moves, updates=3, eager=True)
    first, again, other = (few(seed=seed)[1] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)
    one, two = (few()[1] for _ in range(2))
    assert np.all(one != two)


def test_a_new_optimizer_does_not_repeat_noise():
    """Its own count begins at 0 again; twice the same noise could be subtracted."""
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(WIDTH)])
    private = make_private(
        model, clip_norm=CLIP, noise_multiplier=MULTIPLIER, expected_batch_size=SIZE, delta=1e-3, seed=0
    )
    moved = []
    for _ in range(2):
        private.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
        before = model.get_weights()[1]
        private.fit(np.zeros((SIZE, 10)), np.zeros((SIZE, WIDTH)), sample_weight=np.zeros(SIZE), verbose=0)
        moved.append(model.get_weights()[1] - before)
    assert private.privacy.updates == 2
    assert np.all(moved[0] != moved[1])


def test_normals_of_the_system():
    draws = system_normals((999, 7))
    assert draws.shape == (999, 7)
    assert draws.dtype == np.float32
    assert scipy.stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    assert system_normals(()).shape == ()
    assert tf.reduce_all(tf.math.is_finite(system_normals((100_000,))))
