"""Under MirroredStrategy: the examples of all replicas, one after the other."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.whole_batches import example_gradients, gradient_error, norms_of

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, wrap

own_process = pytest.mark.own_process(seconds=240)


def make_model(**options):
    keras.utils.set_random_seed(3)
    inner = keras.Sequential(
        [keras.Input((6, 4)), layers.Conv1D(5, 3, activation="tanh"), layers.Flatten(), layers.Dense(3)]
    )
    return wrap(inner, **options)


def data(rows=16):
    generator = np.random.default_rng(4)
    return generator.normal(size=(rows, 6, 4)).astype("float32"), generator.integers(0, 3, rows)


def loss(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def dataset(sizes):
    x, y = data(sum(sizes))
    cuts = np.cumsum([0, *sizes])
    batches = [(x[a:b], y[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    signature = (tf.TensorSpec((None, 6, 4)), tf.TensorSpec((None,), tf.int64))
    made = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(len(sizes)))


QUANTITIES = ("norms", "gradients", "second_moment")


@pytest.mark.long
@own_process
@pytest.mark.parametrize(
    ("reduction", "policy", "quantities"),
    [
        ("sum_over_batch_size", "float32", QUANTITIES),
        ("sum", "mixed_float16", QUANTITIES[:1]),
        ("sum", "mixed_float16", QUANTITIES[1:]),
        ("sum_over_batch_size", "mixed_float16", QUANTITIES),
        ("sum", "float32", QUANTITIES),
    ],
)
def test_what_is_left_is_the_last_batch_s_loop(mirrored, reduction, policy, quantities):
    # Half precision rounds to 10 bits.
    tolerance = 1e-6 if policy == "float32" else 4e-3
    keras.config.set_dtype_policy(policy)
    for quantity in quantities:
        with mirrored.scope():
            model = make_model(quantity=quantity)
            # Tracing takes longer than two steps; norms are traced below.
            model.compile(keras.optimizers.SGD(0.0), loss(reduction), run_eagerly=quantity != "gradients")
        model.fit(dataset([8, 7]), verbose=0, shuffle=False)
        layer = model.per_example
        exact = model.per_example.layer
        x, y = (part[8:15] for part in data(15))
        if policy == "float32":
            theirs = example_gradients(exact, x, lambda y_pred, y: loss()(y, y_pred), y)
        else:
            keras.config.set_dtype_policy("float32")
            copy = make_model().per_example.layer
            copy.set_weights(exact.get_weights())
            theirs = example_gradients(copy, x, lambda y_pred, y: loss()(y, y_pred), y)
            keras.config.set_dtype_policy(policy)
        assert layer.count == 7
        if quantity == "norms":
            assert np.abs(layer.norms - norms_of(theirs)).max() < tolerance * norms_of(theirs).max()
        elif quantity == "gradients":
            assert gradient_error(layer.gradients, theirs) < tolerance
        else:
            squares = [np.square(gradient).sum(0) for gradient in theirs]
            assert gradient_error(layer.second_moment, squares, np.square(norms_of(theirs)).sum()) < tolerance
    keras.config.set_dtype_policy("float32")


# test_wrap.py has a model that clips nothing.
@own_process
@pytest.mark.parametrize("clip_norm", [0.5, pytest.param(None, marks=pytest.mark.long)])
def test_training_is_that_of_one_device(mirrored, clip_norm):
    weights = []
    for strategy in (mirrored, tf.distribute.get_strategy()):
        with strategy.scope():
            model = make_model(clip_norm=clip_norm)
            optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.1), steps=2)
            model.compile(optimizer, loss(), run_eagerly=strategy is not mirrored)
        model.fit(dataset([8, 6, 7, 2]), epochs=2, verbose=0, shuffle=False, callbacks=[ExactAccumulation()])
        weights.append(model.get_weights())
    assert max(np.abs(a - b).max() for a, b in zip(*weights, strict=True)) < 1e-6
