"""A batch whose divisor is 0, or below it, trains as on one device, however it is divided."""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, Pipeline, microbatch

ROWS = 16
generator = np.random.default_rng(0)
X = generator.normal(size=(2 * ROWS, 6)).astype("float32")
# The first batch has no weight; in the second, half of the parts have none.
NONE = np.zeros(2 * ROWS, "float32")
SOME = np.concatenate([np.zeros(ROWS + 8), generator.uniform(0.5, 1.5, 8)]).astype("float32")
NEGATIVE = -generator.uniform(0.5, 1.5, 2 * ROWS).astype("float32")
WEIGHTS = {"no weight": NONE, "a batch without a weight": SOME, "negative": NEGATIVE}


def labelled(target, output):
    """A mean over the rows that have a label."""
    known = ops.cast(target > -1, output.dtype)
    return ops.sum(known * ops.square(target - output)) / ops.maximum(ops.sum(known), 1)


def trained(way, loss, targets, weights, wrap=lambda optimizer: optimizer, scope=None, **options):
    """Weights and losses after two updates, with a regularizer, which isn't divided."""
    with scope or contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        network = [
            keras.Input((6,)),
            layers.Dense(4, kernel_regularizer="l2"),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
        model = keras.Sequential(network)
        model.compile(wrap(keras.optimizers.SGD(0.05, momentum=0.9)), loss=loss)
    options = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = way(model)(X, targets, sample_weight=weights, **options).history["loss"]
    return [np.array(each) for each in model.get_weights()], history


def count(x, y, y_pred, sample_weight):
    return ops.sum(ops.cast(y > -1, "float32"))


def plain(model):
    return model.fit


def sliced(model, **options):
    microbatch(model, 3, **options)
    return model.fit


def on(dist):
    return {"way": lambda model: lambda *data, **given: dist.fit(model, *data, **given), "scope": dist.scope()}


def in_windows(**options):
    def wrap(optimizer):
        return AccumulatingOptimizer(optimizer, steps=4, **options)

    return {"way": plain, "wrap": wrap, "batch_size": 4, "callbacks": [ExactAccumulation()]}


DEVICES = ["CPU:0", "CPU:1"]
WAYS = {
    "windows": in_windows,
    "slices": lambda: {"way": sliced},
    "replicas": lambda: on(DistributedFit("mirrored", devices=DEVICES)),
    "fixed parts": lambda: on(DistributedFit(deterministic=4)),
    "pipeline": lambda: on(DistributedFit(Pipeline(stages=2, microbatches=4), devices=DEVICES)),
}


def check(way, loss, targets, weights=None):
    expected = trained(plain, loss, targets, weights)
    found = trained(loss=loss, targets=targets, weights=weights, **way)
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


@pytest.mark.few(0, "windows-no weight", "replicas-negative")
@pytest.mark.parametrize(
    ("way", "weights"),
    [
        *itertools.product(("windows", "replicas"), WEIGHTS),
        ("slices", "no weight"),
        ("fixed parts", "no weight"),
        ("pipeline", "a batch without a weight"),
    ],
)
def test_what_is_not_divided_remains_where_nothing_has_a_weight(way, weights):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    check(WAYS[way](), loss, X[:, :1], WEIGHTS[weights])


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["windows", "slices"])
def test_batches_without_a_label_of_a_stated_loss(way):
    targets = np.where(np.arange(2 * ROWS)[:, None] < ROWS + 8, -1, X[:, :1])
    ways = {"windows": in_windows, "slices": lambda **options: {"way": functools.partial(sliced, **options)}}
    check(ways[way](weighting=count), labelled, targets)
