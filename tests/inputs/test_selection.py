"""Nested inputs and outputs are picked by name, and what has no gradient is refused with what to write instead."""

import re

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


@pytest.mark.parametrize("mode", ["forward", "reverse"])
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
        (None, "2 outputs. Set output= to one of 'class', 'value', as in output=lambda outputs: outputs\\['value'\\]"),
        (1, "2 outputs"),
        ("score", "'score', which names no single one of the model's 2 outputs"),
        ("vlaue", "Did you mean 'value'"),
        ("class", r"shape \(None, 3\), and a gradient needs one number per row. Write output=0"),
        (lambda y: tf.reduce_sum(y["class"]), r"of shape \(\) for 7 rows"),
        (lambda y: tf.reduce_mean(y["class"], axis=0), r"of shape \(3,\) for 7 rows"),
        (lambda y: y, "The output is 2 tensors"),
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


def followed(said):
    """What a message says to write as `wrt` for each embedding."""
    return re.findall(r"wrt='(.*?)'", said)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("given_as", ["int64", "float32"])
def test_words_are_refused_and_their_embedding_is_named(dtype, several, given_as):
    model = of_words(dtype, several)
    words = np.random.default_rng(0).integers(0, 9, (5, 6)).astype(given_as)
    x = {"words": words, "numbers": normal(5, 2)} if several else words
    with pytest.raises(ValueError, match="embedding gives, write wrt='table'") as caught:
        input_gradients(model, x)
    (wrt,) = followed(str(caught.value))
    assert input_gradients(model, x, wrt=wrt).shape == (5, 6, 4)
    assert ("wrt=['numbers']" in str(caught.value)) == several


class Positions(layers.Layer):
    """An embedding within a layer."""

    def __init__(self):
        super().__init__(name="positions")
        self.table = layers.Embedding(9, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return self.table(ids) + keras.ops.arange(6.0)[:, None]


def embedded(kind):
    """A model, its inputs, and its embeddings with the names of what each was given."""
    ids, mask, other = (keras.Input((6,), dtype="int32", name=name) for name in ("ids", "a_mask", "other"))
    one, two = layers.Embedding(9, 4, mask_zero=True, name="one"), layers.Embedding(9, 4, name="two")
    pool = layers.GlobalAveragePooling1D()
    if kind == "masked":
        return keras.Model(ids, layers.Dense(1)(layers.Bidirectional(layers.LSTM(3))(one(ids)))), {one: ["ids"]}
    if kind == "sequential":
        return keras.Sequential([keras.Input((6,)), two, pool, layers.Dense(1)]), {two: ["ids"]}
    if kind == "mask as an input":
        attended = layers.MultiHeadAttention(2, 2)(two(ids), two(ids), attention_mask=layers.Reshape((1, 6))(mask))
        return keras.Model({"ids": ids, "a_mask": mask}, layers.Dense(1)(pool(attended))), {two: ["ids", "ids"]}
    if kind == "shared":
        return keras.Model([ids, other], layers.Dense(1)(pool(one(ids) * one(other)))), {one: ["ids", "other"]}
    if kind == "several":
        both = layers.Concatenate()([one(ids), two(other)])
        return keras.Model({"ids": ids, "other": other}, layers.Dense(1)(pool(both))), {one: ["ids"], two: ["other"]}
    positions = Positions()
    return keras.Model(ids, layers.Dense(1)(pool(positions(ids)))), {positions.table: ["ids"]}


@pytest.mark.parametrize("kind", ["masked", "sequential", "mask as an input", "shared", "several", "within a layer"])
def test_the_layers_that_the_message_names(kind):
    model, tables = embedded(kind)
    drawn = np.random.default_rng(0).integers(1, 9, (3, 5, 6)).astype("int32")
    drawn[:, :, 4:] = 0
    drawn[1] = drawn[1] != 0
    named = dict(zip(["ids", "a_mask", "other"], drawn, strict=True))
    # By name for inputs that are in a dict or a list, and in the place of the only one.
    x = {tensor.name: named[tensor.name] for tensor in model.inputs} if len(model.inputs) > 1 else named["ids"]
    with pytest.raises(ValueError, match="only real-valued inputs have a gradient") as caught:
        input_gradients(model, x)
    # Every input is of integers: none is left that could be named.
    assert "To exclude it" not in str(caught.value)
    wrt = followed(str(caught.value))
    if any(len(names) > 1 for names in tables.values()):
        with pytest.raises(ValueError, match=f"called 2 times .* Write wrt='{wrt[0]}:0' for its first call"):
            input_gradients(model, x, wrt=wrt[0])
        wrt = [f"{wrt[0]}:0", f"{wrt[0]}:1"]
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(x))
    kernels = [table.embeddings.value for table in tables]
    parts = iter([input_gradients(model, x, wrt=name) for name in wrt])
    for names, expected in zip(tables.values(), tape.gradient(total, kernels), strict=True):
        scattered = np.zeros((9, 4))
        for name in names:
            np.add.at(scattered, named[name], next(parts))
        expected = tf.convert_to_tensor(expected).numpy()
        np.testing.assert_allclose(scattered, expected, atol=1e-6 * abs(expected).max())


def test_an_embedding_within_a_model():
    inner = keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(9, 4, name="inside"), layers.Flatten()]
    )
    words = keras.Input((6,), dtype="int32")
    model, x = keras.Model(words, layers.Dense(1)(inner(words))), np.ones((2, 6), "int32")
    with pytest.raises(ValueError, match="write wrt='inside'") as caught:
        input_gradients(model, x)
    assert input_gradients(model, x, wrt=followed(str(caught.value))[0]).shape == (2, 6, 4)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_numbers_that_are_not_real_are_refused(dtype):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    says = f"is {dtype}" if dtype == "bool" else "x.astype"
    with pytest.raises(ValueError, match=says):
        input_gradients(model, np.ones((2, 3), dtype))


def of_one_name(kind):
    """A model with two outputs of one name, and the functions that pick each."""
    inputs = keras.Input((3,))
    one, other, head = layers.Dense(4, "tanh"), layers.Dense(4, "tanh"), layers.Dense(1, name="head")
    first, second = head(one(inputs)), head(other(inputs))
    if kind == "list":
        return keras.Model(inputs, [first, second]), [lambda y: y[0], lambda y: y[1]]
    outputs = {"left": {"head": first}, "right": {"head": second}}
    return keras.Model(inputs, outputs), [lambda y: y["left"]["head"], lambda y: y["right"]["head"]]


def test_a_name_of_two_outputs_is_refused():
    model, (_, second) = of_one_name("list")
    x = normal(5, 3)
    write = r"Set output= to one of a function of the outputs, as in output=lambda outputs: outputs\[1\]"
    for output in ("head", None):
        with pytest.raises(ValueError, match=rf"{output}.*, which names no single one of the model's 2.*{write}"):
            input_gradients(model, x, output)
    check(input_gradients(model, x, lambda outputs: outputs[1]), reference(model, x, second))


def test_paths_of_nested_outputs():
    model, functions = of_one_name("nested")
    x = normal(5, 3)
    for path, function in zip(["left/head", "right/head"], functions, strict=True):
        check(input_gradients(model, x, path), reference(model, x, function))
    for output in ("head", None):
        with pytest.raises(ValueError, match="Set output= to one of 'left/head', 'right/head', as in"):
            input_gradients(model, x, output)


def test_a_name_of_two_inputs_is_refused():
    class Product(keras.Model):
        def call(self, inputs):
            return inputs["left"]["x"] * inputs["right"]["x"]

    x = {"left": {"x": normal(5, 1)}, "right": {"x": normal(5, 1) + 3}}
    check(input_gradients(Product(), x, wrt="left/x"), x["right"]["x"])
    check(input_gradients(Product(), x, wrt=1), x["left"]["x"])
    for derivative in (input_gradients, input_jacobian):
        with pytest.raises(ValueError, match="wrt=0 for the input left/x, or 1 for the input"):
            derivative(Product(), x, wrt="x")
