"""Nested inputs and outputs are picked by name, and what has no gradient is refused with what to write instead."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.inputs.gradients import input_gradients
from keras_paragrad.inputs.jacobian import input_jacobian

layers = keras.layers


def normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def two_inputs(nesting="dict"):
    left, right = keras.Input((3,), name="left"), keras.Input((2, 2), name="right")
    hidden = layers.Dense(5, "tanh")(layers.Concatenate()([left, layers.Flatten()(right)]))
    inputs = {"left": left, "right": right} if nesting == "dict" else [left, right]
    outputs = {"class": layers.Dense(3, name="class")(hidden), "value": layers.Dense(1, name="value")(hidden)}
    return keras.Model(inputs, outputs if nesting == "dict" else list(outputs.values()))


def data(nesting="dict"):
    left, right = normal(7, 3), normal(7, 2, 2)
    return {"left": left, "right": right} if nesting == "dict" else [left, right]


def reference(model, x, function):
    tensors = keras.tree.map_structure(tf.constant, x)
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = function(model(tensors, training=False))
    return keras.tree.map_structure(lambda gradient: gradient.numpy(), tape.gradient(value, tensors))


def check(found, expected):
    keras.tree.assert_same_structure(found, expected)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


@pytest.mark.parametrize("nesting", ["dict", "list"])
def test_nested_inputs_and_named_outputs(nesting):
    model, x = two_inputs(nesting), data(nesting)
    key = "value" if nesting == "dict" else 1
    check(input_gradients(model, x, "value", batch_size=3), reference(model, x, lambda y: y[key]))
    dataset = tf.data.Dataset.from_tensor_slices((x if nesting == "dict" else tuple(x), np.zeros(7))).batch(2)
    expected = reference(model, x, lambda y: y[key])
    check(input_gradients(model, dataset, "value", batch_size=3), expected if nesting == "dict" else tuple(expected))


def test_a_function_of_several_outputs():
    model, x = two_inputs(), data()

    def function(outputs):
        return outputs["class"][:, 2] * outputs["value"][:, 0]

    check(input_gradients(model, x, function), reference(model, x, function))


@pytest.mark.parametrize("mode", ["forward", "reverse", "vectorized"])
def test_jacobians_nest_like_the_inputs(mode):
    model, x = two_inputs(), data()
    found = input_jacobian(model, x, mode, output="class", batch_size=4)
    assert {name: jacobian.shape for name, jacobian in found.items()} == {"left": (7, 3, 3), "right": (7, 3, 2, 2)}
    for index in range(3):
        expected = reference(model, x, lambda y, index=index: y["class"][:, index])
        check({name: jacobian[:, index] for name, jacobian in found.items()}, expected)


@pytest.mark.parametrize("nesting", ["dict", "list"])
def test_some_of_the_inputs(nesting):
    model, x = two_inputs(nesting), data(nesting)
    every = input_gradients(model, x, "value")
    left, right = every.values() if nesting == "dict" else every
    check(input_gradients(model, x, "value", wrt="right"), right)
    check(input_gradients(model, x, "value", wrt=1), right)
    check(input_gradients(model, x, "value", wrt=["right", "left"]), [right, left])
    check(input_gradients(model, x, "value", wrt={"it": "left"}), {"it": left})


def test_a_file_for_each_input(tmp_path):
    model, x = two_inputs(), data()
    paths = {"left": tmp_path / "left.npy", "right": tmp_path / "right.npy"}
    check(dict(input_gradients(model, x, "value", out=paths, batch_size=3)), input_gradients(model, x, "value"))
    with pytest.raises(ValueError, match=r"Write out={'left': '0.npy', 'right': '1.npy'}"):
        input_gradients(model, x, "value", out=tmp_path / "both.npy")


def test_a_subclassed_model():
    class Product(keras.Model):
        def call(self, inputs):
            return {"product": inputs["a"] * inputs["b"]}

    x = {"a": normal(5, 1), "b": normal(5, 1) + 3}
    check(input_gradients(Product(), x, "product"), {"a": x["b"], "b": x["a"]})
    check(input_gradients(Product(), x, wrt="b"), x["a"])


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (None, "2 outputs. Set output= to one of 'class', 'value'"),
        (1, "2 outputs"),
        ("score", "outputs are 'class', 'value'"),
        ("class", r"shape \(None, 3\), and a gradient needs one number per row. Write output=0"),
        (lambda y: tf.reduce_sum(y["class"]), r"of 7 rows has shape \(\)"),
        (lambda y: tf.reduce_mean(y["class"], axis=0), r"of 7 rows has shape \(3,\)"),
        (lambda y: y, "several tensors"),
        (lambda y: tf.argmax(y["class"], axis=1), "int64, which has no derivative"),
        (1.5, "`output` is 1.5"),
    ],
)
def test_outputs_that_are_refused(output, says):
    with pytest.raises(ValueError, match=says):
        input_gradients(two_inputs(), data(), output)


def test_an_index_beyond_the_last_is_refused():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
    with pytest.raises(ValueError, match="out of range"):
        input_gradients(model, normal(2, 3), 4)


@pytest.mark.parametrize("wrt", ["up", 2, True, [], ["left", "left"]])
def test_inputs_that_are_not_there_are_refused(wrt):
    with pytest.raises(ValueError, match="left"):
        input_gradients(two_inputs(), data(), "value", wrt=wrt)


def test_an_input_without_a_part_is_refused():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, [layers.Dense(1, name="one")(a), layers.Dense(1, name="two")(b)])
    x = {"a": normal(4, 3), "b": normal(4, 3)}
    for derivative in (input_gradients, lambda *arguments: input_jacobian(*arguments[:2], output=arguments[2])):
        with pytest.raises(ValueError, match=r"does not depend on input 'b'.*write wrt=\['a'\]"):
            derivative(model, x, "one")


def of_words(dtype, several):
    words, numbers = keras.Input((6,), dtype=dtype, name="words"), keras.Input((2,), name="numbers")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4, name="table")(words))
    if not several:
        return keras.Model(words, layers.Dense(1, "tanh")(pooled))
    hidden = layers.Concatenate()([pooled, numbers])
    return keras.Model({"words": words, "numbers": numbers}, layers.Dense(1, "tanh")(hidden))


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("given_as", ["int64", "float32"])
def test_words_are_refused_and_their_embedding_is_named(dtype, several, given_as):
    model = of_words(dtype, several)
    words = np.random.default_rng(0).integers(0, 9, (5, 6)).astype(given_as)
    x = {"words": words, "numbers": normal(5, 2)} if several else words
    with pytest.raises(ValueError, match="embedding 'table'") as caught:
        input_gradients(model, x)
    # What the message says to write is what works.
    said = str(caught.value)
    before = eval(said.split("before = ")[1].split(" and after")[0])
    after = eval(said.split("after = ")[1].split(", and call")[0])
    embedded = before.predict(words, verbose=0)
    if several:
        x = [normal(5, 2), embedded]
        assert "wrt=['numbers']" in said
        numbers = input_gradients(model, {"words": words, "numbers": x[0]}, wrt="numbers")
        np.testing.assert_allclose(input_gradients(after, x)[0], numbers, atol=1e-6)
    gradients = input_gradients(after, x if several else embedded)
    assert (gradients[1] if several else gradients).shape == (5, 6, 4)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_numbers_that_are_not_real_are_refused(dtype):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    says = f"is {dtype}" if dtype == "bool" else "x.astype"
    with pytest.raises(ValueError, match=says):
        input_gradients(model, np.ones((2, 3), dtype))
