"""An emptied window keeps its sums: the first gradients of the next one replace them, whenever they come."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer

MODES = {"eager": lambda step: step, "graph": tf.function, "xla": lambda step: tf.function(step, jit_compile=True)}


def weights():
    return [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]


def stepping(optimizer, variables, mode):
    """A micro-batch: calls of `apply`, each of gradients and the contribution's scale and weight."""

    def gather(*calls):
        with optimizer.accumulate_only():
            for gradients, scale, weight in calls:
                contribution = tf.stack([scale, weight, 1.0])
                optimizer.apply([*gradients, contribution], [*variables, optimizer.gradient_weight])

    def step(update, *calls):
        tensors = [([g if g is None else tf.fill([3], g) for g in given], *rest) for given, *rest in calls]
        MODES[mode](lambda: gather(*tensors))()
        optimizer.end_micro_batch(update)

    return step


def updates(mode, windows, inner=None):
    """What each window of micro-batches adds to the weights, by the mean of its gradients."""
    variables = weights()
    optimizer = AccumulatingOptimizer(inner or keras.optimizers.SGD(1.0), steps=100)
    optimizer.build(variables)
    step = stepping(optimizer, variables, mode)
    found = []
    for window in windows:
        before = [variable.numpy() for variable in variables]
        for place, calls in enumerate(window):
            step(place == len(window) - 1, *calls)
        found.append([float((old - new.numpy())[0]) for old, new in zip(before, variables, strict=True)])
    return found


FULL = [[([8.0, 16.0], 1.0, 1.0)]]


@pytest.mark.few(0, "window6-expected6-xla", "window2-expected2-xla", "window5-expected5-graph")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ([[([2.0, 4.0], 1.0, 1.0)], [([4.0, 2.0], 3.0, 3.0)]], [3.5, 2.5]),
        # A variable without a gradient at first, and one without any.
        ([[([2.0, None], 1.0, 1.0)], [([4.0, 2.0], 1.0, 1.0)]], [3.0, 1.0]),
        ([[([2.0, None], 1.0, 1.0)], [([4.0, None], 1.0, 1.0)]], [3.0, 0.0]),
        # A step of one's own that applies gradients twice, or not at all.
        ([[([2.0, None], 1.0, 1.0), ([None, 4.0], 1.0, 1.0)], [([2.0, 4.0], 2.0, 2.0)]], [1.5, 3.0]),
        ([[], [([2.0, 4.0], 1.0, 1.0)]], [2.0, 4.0]),
        # Micro-batches without weight, and weights that cancel on the way.
        ([[([9.0, 9.0], 0.0, 0.0)], [([2.0, 4.0], 1.0, 1.0)]], [2.0, 4.0]),
        ([[([2.0, 4.0], 2.0, 2.0)], [([1.0, 1.0], -2.0, -2.0)], [([2.0, 4.0], 2.0, 2.0)]], [3.0, 7.0]),
        ([[([np.nan, 4.0], 0.0, 0.0)], [([2.0, 4.0], 1.0, 1.0)]], [np.nan, 4.0]),
    ],
)
def test_sums_are_those_of_the_window_alone(mode, window, expected):
    np.testing.assert_allclose(updates(mode, [FULL, window])[1], expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.few(0, "sd-graph", "ds-xla", "ns-xla", "sn-graph")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", ["ss", "sd", "ds", "dd", "sn", "ns", "dn", "nd"])
def test_sparse_gradients_and_dense_ones(mode, kinds):
    """Each of two functions of a loop takes gradients of a kind, in whatever order they are traced."""
    variables = weights()
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), steps=100)
    optimizer.build(variables)
    of_kind = {
        "s": lambda value: tf.IndexedSlices(tf.reshape(value, [1]), tf.constant([0]), tf.constant([3])),
        "d": lambda value: tf.stack([value, 0.0, 0.0]),
        "n": lambda value: None,
    }

    def adding(kind):
        def add(value):
            gradients = [of_kind[kind](value), tf.fill([3], value)]
            optimizer.apply([*gradients, tf.ones([3])], [*variables, optimizer.gradient_weight])

        return MODES[mode](add)

    functions = [adding(kind) for kind in kinds]
    # An update knows the variables that had gradients when it was traced.
    mode_of_ends = "eager" if "n" in kinds else "graph"
    ends = [MODES[mode_of_ends](functools.partial(optimizer.end_micro_batch, True)) for _ in kinds]
    expected = 0.0
    for window in ([0], [1], [0, 1], [1, 0], [0, 0], [1, 1], [0], [1]):
        for place, function in enumerate(window):
            with optimizer.accumulate_only():
                functions[function](tf.constant(2.0 + function))
            if place < len(window) - 1:
                optimizer.end_micro_batch(False)
            else:
                ends[function]()
        expected -= np.mean([0.0 if kinds[each] == "n" else 2.0 + each for each in window])
        np.testing.assert_allclose(variables[0].numpy(), [expected, 0.0, 0.0], rtol=1e-6)


def test_what_a_loss_scale_skips_is_in_no_window():
    """It has the optimizer apply nothing, though the micro-batch is counted."""
    variables = weights()
    inner = AccumulatingOptimizer(keras.optimizers.SGD(1.0), steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)

    @tf.function
    def micro_batch(gradient, update):
        with inner.accumulate_only():
            optimizer.apply([tf.fill([3], gradient), tf.fill([3], gradient)], variables)
        inner.end_micro_batch(update)

    optimizer.build(variables)
    for gradient, update in ((8.0, False), (8.0, True), (np.inf, False), (2.0, True)):
        micro_batch(tf.constant(gradient), update)
    # A loss scale that falls to a half is that of the next gradients.
    assert variables[0].numpy()[0] in (-8.0 - 2.0, -8.0 - 4.0)


def test_emptied_windows_are_restored_empty(tmp_path):
    """The sums of the last update, in a file, are no part of the window that begins."""
    found = []
    for restored in (False, True):
        variables = weights()
        optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), steps=2)
        optimizer.build(variables)
        step = stepping(optimizer, variables, "graph")
        if not restored:
            step(True, ([8.0, 16.0], 1.0, 1.0))
            saved = {}
            optimizer.window.save_own_variables(saved)
        else:
            optimizer.window.load_own_variables(saved)
            step(True, ([2.0, 4.0], 1.0, 1.0))
        found.append(variables[0].numpy()[0])
    assert found == [-8.0, -2.0]
