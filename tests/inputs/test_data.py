"""Rows come from anywhere and go anywhere, and are differentiated in chunks of one size by one function."""

import re

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from keras_paragrad.inputs.attribution import integrated_gradients
from keras_paragrad.inputs.gradients import hessian_vector_product, input_gradients
from keras_paragrad.inputs.jacobian import input_jacobian
from keras_paragrad.inputs.rows import InputRows

layers = keras.layers


def build():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def rows(count, *shape):
    return np.random.default_rng(count).normal(size=(count, *(shape or (3,)))).astype("float32")


def expected_of(model, x, index=0):
    watched = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        value = model(watched, training=False)[:, index]
    return tape.gradient(value, watched).numpy()


def generator(x, sizes, with_targets):
    start = 0
    while start < len(x):
        for size in sizes:
            part = x[start : start + size]
            start += size
            if len(part):
                yield (part, np.zeros(len(part))) if with_targets else part


class Sequence(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    @property
    def num_batches(self):
        return -(-len(self.x) // 5)

    def __getitem__(self, index):
        return self.x[index * 5 : index * 5 + 5], np.zeros(5)


@given(st.integers(1, 40), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_batches_of_any_size(count, batch_size, sizes, with_targets):
    model, x = build(), rows(count)
    expected = expected_of(model, x)
    found = input_gradients(model, generator(x, sizes, with_targets), 0, batch_size=batch_size)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_every_kind_of_data():
    model, x = build(), rows(13)
    expected = expected_of(model, x)
    dataset = tf.data.Dataset.from_tensor_slices((x, np.zeros(13))).batch(5)
    for data in (x, x.astype("float64"), tf.constant(x), dataset, dataset.map(lambda x, y: (x,)), Sequence(x)):
        for batch_size in (4, 100):
            found = input_gradients(model, data, 0, batch_size=batch_size)
            np.testing.assert_allclose(found, expected, atol=1e-6)
            assert found.dtype == np.float32


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))
def test_chunks_have_one_size_and_hold_every_row_once(count, batch_size, multiple, size):
    x = np.arange(1, count + 1)
    chunks = list(InputRows(generator(x, [size], with_targets=False)).chunks(batch_size, multiple))
    assert len({len(chunk.leaves[0]) for chunk in chunks}) == 1
    assert len(chunks[0].leaves[0]) % multiple == 0
    assert len(chunks[0].leaves[0]) < batch_size + multiple
    np.testing.assert_array_equal(np.concatenate([chunk.leaves[0][: chunk.rows] for chunk in chunks]), x)
    assert all(set(chunk.leaves[0]) <= set(x) for chunk in chunks)


@pytest.mark.few(0, "False")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_one_function_is_traced(jit_compile):
    model, traces = build(), []

    def output(outputs):
        traces.append(1)
        return outputs[:, 0]

    input_gradients(model, rows(23), output, batch_size=5, jit_compile=jit_compile)
    assert len(traces) == 1
    for mode in ("forward", "reverse"):
        traces.clear()
        input_jacobian(model, rows(23), mode, output=output, batch_size=5, jit_compile=jit_compile)
        assert len(traces) == 1


def test_a_generator_without_end_is_streamed():
    model, x = build(), rows(4)

    def endless():
        while True:
            yield x

    stream = input_gradients(model, endless(), 0, batch_size=6, stream=True)
    parts = np.concatenate([next(stream) for _ in range(4)])
    np.testing.assert_allclose(parts, np.tile(expected_of(model, x), (6, 1)), atol=1e-6)


@pytest.mark.parametrize("known", [True, False])
def test_streams_hold_the_same(known):
    model, x = build(), rows(29)
    data = (lambda: x) if known else (lambda: generator(x, [3, 4], with_targets=True))
    expected = input_jacobian(model, data(), batch_size=8)
    parts = list(input_jacobian(model, data(), batch_size=8, stream=True))
    assert [len(part) for part in parts] == [8, 8, 8, 5]
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_many_calls_say_nothing(caplog):
    model = build()
    for count in range(2, 10):
        input_gradients(model, rows(count), 0)
    assert not caplog.records


def test_progress(capsys):
    input_gradients(build(), rows(9), 0, batch_size=4, verbose=1)
    assert "9/9" in capsys.readouterr().out
    input_gradients(build(), iter([rows(9)]), 0, batch_size=4, verbose=2)
    assert "9/9" in capsys.readouterr().out
    input_gradients(build(), rows(9), 0, batch_size=4)
    assert capsys.readouterr().out == ""


def test_a_model_that_is_not_built():
    model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
    x = rows(5)
    found = input_gradients(model, x)
    np.testing.assert_allclose(found, expected_of(model, x), atol=1e-6)


@pytest.mark.own_process(seconds=120)
def test_on_two_replicas(mirrored):
    plain = build()
    with mirrored.scope():
        model = build()
    model.set_weights(plain.get_weights())
    for count, jit_compile in ((1, False), (6, True), (11, False)):
        x = rows(count)
        found = input_gradients(model, x, 1, batch_size=5, jit_compile=jit_compile)
        np.testing.assert_allclose(found, expected_of(plain, x, 1), atol=1e-6)
        for mode in ("forward", "reverse"):
            found = input_jacobian(model, x, mode, batch_size=5, jit_compile=jit_compile)
            expected = np.stack([expected_of(plain, x, index) for index in (0, 1)], axis=1)
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.ones((0, 3)), "no rows"),
        (iter([]), "no rows"),
        (iter([np.ones((2, 3)), np.ones((2, 4))]), "Pad them to one shape"),
        (iter([np.ones((0, 3))]), "no rows"),
        (3.0, r"shape \(rows, ...\)"),
        ([np.ones((2, 3)), np.ones((3, 3))], r"\[2, 3\] rows"),
        (tf.ragged.constant([[1.0], [2.0, 3.0]]), "to_tensor"),
    ],
)
def test_what_has_no_rows_is_refused(x, says):
    with pytest.raises(ValueError, match=says):
        input_gradients(build(), x, 0)


@pytest.mark.parametrize(
    "argument",
    [{"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": True}, {"jit_compile": "yes"}, {"verbose": 7}],
)
def test_arguments_are_checked_at_the_call(argument):
    (name,) = argument
    with pytest.raises(ValueError, match=f"`{name}` is"):
        input_gradients(build(), iter([]), 0, stream=True, **argument)


class Counts(layers.Layer):
    """Assigns in each call, or in training alone, to a variable that Keras knows or to another."""

    def __init__(self, always=True, known=True):
        super().__init__()
        self.always, self.known = always, known
        self.count = self.add_weight(shape=(), initializer="ones", trainable=False, name="count")
        self.other = tf.Variable(1.0, name="other")

    def call(self, inputs, training=False):
        count = self.count if self.known else self.other
        if training or self.always:
            count.assign_add(1.0)
        return inputs * count


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.counts, self.dense = Counts(), layers.Dense(1)

    def call(self, inputs):
        return self.dense(self.counts(inputs))


def differentiated(x):
    """A call of each function that differentiates with respect to inputs, of a model."""
    return [
        lambda model: input_gradients(model, x, batch_size=len(x)),
        lambda model: input_jacobian(model, x, batch_size=len(x)),
        lambda model: integrated_gradients(model, x, batch_size=len(x)),
        lambda model: hessian_vector_product(model, x, x, batch_size=len(x)),
    ]


@pytest.mark.few(0, "False")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stateful_layer_is_refused_with_the_way_out(wrapped):
    def recurrent(stateful):
        inputs = keras.Input(batch_shape=(2, 3, 2))
        rnn = layers.SimpleRNN(2, stateful=stateful, name="rnn")
        return keras.Model(inputs, layers.Dense(1)((layers.Bidirectional(rnn) if wrapped else rnn)(inputs)))

    model, x = recurrent(True), rows(2, 3, 2)
    for differentiate in differentiated(x):
        with pytest.raises(ValueError, match="assigns to .*rnn.*; build the same model with stateful=False") as said:
            differentiate(model)
    stateless = recurrent(False)
    exec(re.search("for old, new in .*assign\\(old\\)", str(said.value))[0], {"model": model, "stateless": stateless})
    predicted = model.predict(x, batch_size=2, verbose=0)
    np.testing.assert_allclose(predicted, stateless.predict(x, verbose=0), rtol=1e-6)
    assert input_gradients(stateless, x).shape == x.shape


def test_a_layer_that_assigns_in_prediction_is_refused():
    x = rows(2)
    for layer, name in ((Counts(), "count"), (Counts(known=False), "other"), (None, "count")):
        # A model that is built by the call too.
        model = keras.Sequential([keras.Input((3,)), layer, layers.Dense(1)]) if layer else Counting()
        layer = layer or model.counts
        for differentiate in differentiated(x):
            with pytest.raises(ValueError, match=rf"assigns to \S*{name} when it is called with training=False"):
                differentiate(model)
        assert (float(layer.count.value), float(layer.other)) == (1.0, 1.0)
    model = keras.Sequential([keras.Input((3,)), Counts(always=False), layers.Dropout(0.5), layers.Dense(1)])
    np.testing.assert_allclose(input_gradients(model, x), expected_of(model, x), rtol=1e-6)


class MinusMeanOfRows(layers.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, 0, keepdims=True)


def test_a_layer_that_mixes_rows_is_refused():
    model = keras.Sequential([keras.Input((3,)), MinusMeanOfRows(name="mixes"), layers.Dense(1)])
    for differentiate in differentiated(rows(2)):
        with pytest.raises(ValueError, match="The output of 'mixes' for one row depends on the other rows"):
            differentiate(model)


class DropsAlways(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, inputs):
        return self.dropout(inputs, training=True)


def test_random_layers_draw_on():
    model, x = keras.Sequential([keras.Input((3,)), DropsAlways(), layers.Dense(1)]), np.ones((40, 3), "float32")
    found = input_gradients(model, x, batch_size=20)
    kernel = model.layers[-1].kernel.numpy().ravel()
    assert set(np.unique(np.isclose(found, 2 * kernel) | (found == 0))) == {True}
    assert (found[:20] != found[20:]).any()
