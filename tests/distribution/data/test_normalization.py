"""Mean and variance against numpy's in float64, and a model that keeps them."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from keras_paragrad.distribution.data import adapt_normalization, normalization_layers, normalize_inputs
from keras_paragrad.distribution.data.adapting import Moments

AXES = [-1, 1, 2, (1, 2), (-1, 1), None]


def adapted(data, axis=-1, **options):
    layer = keras.layers.Normalization(axis=axis)
    adapt_normalization(layer, data, **options)
    return layer


def check(layer, values, axis=-1):
    kept = {} if axis is None else {each % values.ndim for each in np.atleast_1d(axis)}
    reduced = tuple(each for each in range(values.ndim) if each not in kept)
    values = values.astype("float64")
    np.testing.assert_allclose(layer.adapt_mean, values.mean(axis=reduced), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(layer.adapt_variance, values.var(axis=reduced), rtol=1e-6)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(AXES),
    st.sampled_from(["float32", "float64", "int16"]),
    st.sampled_from([0.0, 300.0]),
)
def test_any_axis_type_and_batches(sizes, axis, dtype, offset):
    values = (np.random.default_rng(0).normal(offset, 20.0, size=(sum(sizes), 2, 3))).astype(dtype)
    batches = np.split(values, np.cumsum(sizes)[:-1])
    signature = tf.TensorSpec((None, 2, 3), dtype)
    streamed = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    for data in (values, streamed):
        check(adapted(data, axis), values, axis)


def test_far_from_zero():
    """Where a sum of squares in float32 has nothing left of the variance."""
    values = 1e6 + np.random.default_rng(0).normal(size=(5000, 2))
    check(adapted(values), values)


def test_a_part_at_a_time(monkeypatch):
    values = np.random.default_rng(0).normal(size=(103, 4))
    whole = Moments.of(values, (0,))
    monkeypatch.setattr("keras_paragrad.distribution.data.adapting.CHUNK_BYTES", 7 * 4 * 8)
    parts = Moments.of(values, (0,))
    assert whole.size == parts.size == 103
    np.testing.assert_allclose(parts.deviations, whole.deviations, rtol=1e-12)
    np.testing.assert_allclose(parts.mean, values.mean(axis=0), rtol=1e-12)


def test_as_keras_adapts_and_inverts():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=(50, 4)).astype("float32")
    for invert in (False, True):
        ours, theirs = (keras.layers.Normalization(invert=invert) for _ in range(2))
        adapt_normalization(ours, values)
        theirs.adapt(values)
        np.testing.assert_allclose(ours(values), theirs(values), atol=1e-5)


def test_what_never_changes_is_not_divided_by_zero():
    layer = adapted(np.ones((5, 2)))
    np.testing.assert_array_equal(layer.adapt_variance, [0.0, 0.0])
    np.testing.assert_array_equal(layer(np.ones((1, 2))), [[0.0, 0.0]])


class Batches(keras.utils.PyDataset):
    num_batches = 2

    def __getitem__(self, index):
        return {"a": np.array([[1.0], [3.0]]) * (index + 1), "b": np.array([[[2.0]], [[4.0]]])}, np.zeros(2)


def two_inputs():
    inputs = {"b": keras.Input((1, 1), name="b"), "a": keras.Input((1,), name="a")}
    a = keras.layers.Normalization(name="scale_a")(inputs["a"])
    b = keras.layers.Normalization(name="scale_b")(inputs["b"])
    fixed = keras.layers.Normalization(mean=0.0, variance=1.0)(a)
    return keras.Model(inputs, keras.layers.Add()([fixed, keras.layers.Flatten()(b)]))


def test_every_layer_of_a_model_gets_its_input():
    model = two_inputs()
    assert {layer.name for layer in normalization_layers(model)} == {"scale_a", "scale_b"}
    normalize_inputs(model, Batches())
    assert model.get_layer("scale_a").adapt_mean.numpy() == 3.0
    assert model.get_layer("scale_b").adapt_variance.numpy() == 1.0


def test_the_numbers_are_saved_with_the_model(tmp_path):
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(50, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Normalization(), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", jit_compile=False)
    before = model.predict(x, verbose=0)
    normalize_inputs(model, tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(7))
    after = model.predict(x, verbose=0)
    assert np.abs(after - before).max() > 0.1
    model.fit(x, x[:, :1], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_select_picks_the_input():
    layer = adapted(Batches(), select=lambda x: x["a"])
    assert layer.adapt_mean.numpy() == 3.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: adapted(np.zeros((3, 2)), axis=0), "keeps axis 0"),
        (lambda: adapted(np.zeros((0, 2))), "no rows"),
        (lambda: adapted(np.array([[1.0], [np.nan]])), "NaN or infinite"),
        (lambda: adapted(np.array([["a"]])), "has no mean"),
        (lambda: adapted(iter([np.zeros((2, 2))])), "read only once"),
        (lambda: adapted(tf.data.Dataset.range(4).batch(2).repeat()), "is infinite"),
        (lambda: adapted(Batches()), "2 inputs"),
        (lambda: adapted(tf.ragged.constant([[1.0], [2.0, 3.0]])), "RaggedTensor can't be normalized"),
        (
            lambda: adapt_normalization(keras.layers.Normalization(mean=0.0, variance=1.0), np.zeros((3, 2))),
            "a mean already",
        ),
        (lambda: adapt_normalization(_built((None, 3)), np.zeros((3, 2))), r"takes inputs of shape \(None, 3\)"),
        (lambda: normalize_inputs(keras.Sequential([keras.Input((2,))]), np.zeros((3, 2))), "has no keras.layers"),
        (lambda: normalize_inputs(_hidden(), np.zeros((3, 2))), "does not normalize an input of the model"),
        (lambda: normalize_inputs(two_inputs(), {"a": np.zeros((3, 1))}), "normalizes the input 'b'"),
        (lambda: normalize_inputs(two_inputs(), np.zeros((3, 1))), "takes 2 inputs"),
    ],
    ids=[
        "axis of rows",
        "no rows",
        "nan",
        "text",
        "iterator",
        "endless",
        "two inputs",
        "ragged",
        "own mean",
        "other shape",
        "no layer",
        "hidden",
        "other names",
        "too few inputs",
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def _built(shape):
    layer = keras.layers.Normalization()
    layer.build(shape)
    return layer


def _hidden():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Normalization()])
