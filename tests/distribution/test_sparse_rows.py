"""Sparse inputs on two replicas: each row's gradient is one, as on one device, before it is squared or clipped."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit

generator = np.random.default_rng(1)
# Some columns are in rows of both replicas, some in those of one; a row of each is empty.
DENSE = np.where(generator.random((26, 9)) < 0.3, generator.normal(size=(26, 9)), 0).astype("float32")
DENSE[[0, 5]] = 0
WORDS, TARGETS = generator.integers(0, 9, (26, 4)), generator.normal(size=(26, 1)).astype("float32")
VOCABULARY = list("abcdefghi")


def matrices():
    """A sparse input, and a layer that multiplies two of them."""
    inputs = {name: keras.Input((9,), sparse=True, name=name) for name in ("left", "right")}
    hidden = keras.layers.Dense(4, "tanh")
    return inputs, [hidden(each) for each in inputs.values()]


def words():
    """Layers that make sparse tensors, and an embedding whose gradient has a row for each lookup."""
    texts = keras.Input((), dtype="string", name="texts")
    numbers = keras.Input((4,), dtype="int64", name="numbers")
    vector = keras.layers.TextVectorization(vocabulary=VOCABULARY, output_mode="count", sparse=True)(texts)
    hot = keras.layers.IntegerLookup(vocabulary=list(range(9)), output_mode="multi_hot", sparse=True)(numbers)
    table = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(numbers))
    return {"texts": texts, "numbers": numbers}, [keras.layers.Dense(3)(vector), keras.layers.Dense(3)(hot), table]


def model_of(kind, optimizer, **options):
    keras.utils.set_random_seed(0)
    inputs, hidden = kind()
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.concatenate(hidden)))
    model.compile(optimizer(), "mse", **options)
    return model


def data():
    texts = [" ".join(VOCABULARY[word] for word in row) for row in WORDS]
    matrix = tf.sparse.from_dense(DENSE)
    inputs = {"left": matrix, "right": tf.sparse.from_dense(DENSE[::-1])}
    inputs = {**inputs, "texts": np.array(texts), "numbers": WORDS}
    # The last batch has a single row, so one replica has none.
    return tf.data.Dataset.from_tensor_slices((inputs, TARGETS)).batch(5)


@pytest.mark.own_process(seconds=120)
@pytest.mark.parametrize("kind", [words, pytest.param(matrices, marks=pytest.mark.long)])
def test_rows_are_summed_over_replicas_before_they_are_squared_and_clipped(kind, mirrored):
    adam = lambda: keras.optimizers.Adam(0.01, clipnorm=0.1)  # noqa: E731
    names = ("left", "right") if kind is matrices else ("texts", "numbers")
    rows = data().map(lambda inputs, targets: ({name: inputs[name] for name in names}, targets))
    # Tracing takes longer than the steps.
    plain = model_of(kind, adam, run_eagerly=True)
    plain.fit(rows, epochs=2, shuffle=False, verbose=0)
    dist = DistributedFit(mirrored)
    with dist.scope():
        ours = model_of(kind, adam)
    dist.fit(ours, rows, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(ours, plain) < 1e-6
    if kind is words:
        with dist.scope():
            ours.compile(adam(), "mse", run_eagerly=True)
        with pytest.raises(ValueError, match=r"has sparse inputs, and run_eagerly=True hides .* run_eagerly=False"):
            dist.fit(ours, rows, verbose=0)
