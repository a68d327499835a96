"""Derivatives with respect to what a layer gives within the model's call, with masks and all that follows it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import hessian_vector_product, input_gradients, input_jacobian, integrated_gradients

layers = keras.layers
TOKENS = np.array([[1, 2, 3, 0], [4, 1, 0, 0], [2, 2, 2, 2]], "int32")


def watched(model, x, layer, function=lambda y: y, call=0):
    """The gradient by GradientTape with respect to the output of one of a layer's calls, and that output."""
    original, outputs = layer.call, []

    def watching(*arguments, **keywords):
        output = original(*arguments, **keywords)
        tape.watch(output)
        outputs.append(output)
        return output

    with tf.GradientTape() as tape:
        layer.__dict__["call"] = watching
        try:
            value = function(model(x, training=False))
        finally:
            del layer.__dict__["call"]
    return tape.gradient(value, outputs[call]).numpy(), outputs[call].numpy()


def check(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-6 * abs(expected).max())


def attending(kind):
    """A model of tokens whose mask is made of them, and used by attention or a recurrent layer."""
    tokens = keras.Input((4,), dtype="int32")
    vectors = layers.Embedding(5, 3, mask_zero=True, name="table")(tokens)
    after = {
        "attention": lambda: layers.Attention()([vectors, vectors]),
        "additive": lambda: layers.AdditiveAttention()([vectors, vectors]),
        "heads": lambda: layers.MultiHeadAttention(1, 2)(vectors, vectors),
        "normalized": lambda: (lambda q: layers.MultiHeadAttention(1, 2)(q, q))(layers.LayerNormalization()(vectors)),
        "recurrent": lambda: layers.LSTM(2)(vectors),
        "joined": lambda: layers.LSTM(2)(layers.Concatenate()([vectors, vectors])),
        "pooled": lambda: layers.GlobalAveragePooling1D()(vectors),
    }[kind]()
    after = layers.GlobalAveragePooling1D()(after) if len(after.shape) == 3 else after
    return keras.Model(tokens, layers.Dense(1, "tanh")(after))


@pytest.mark.few(0, "heads", "pooled")
@pytest.mark.parametrize("kind", ["attention", "heads", "recurrent", "pooled", "additive", "normalized", "joined"])
def test_it_is_the_tape_with_the_mask(kind):
    model = attending(kind)
    expected, _ = watched(model, TOKENS, model.get_layer("table"))
    found = input_gradients(model, TOKENS, wrt="table", batch_size=2)
    assert found.shape == (3, 4, 3) and found.dtype == np.float32
    check(found, expected)


def test_every_function_of_derivatives():
    model = attending("attention")
    gradient, vectors = watched(model, TOKENS, model.get_layer("table"))
    check(input_jacobian(model, TOKENS, wrt="table", mode="forward")[:, 0], gradient)
    attributions = integrated_gradients(model, TOKENS, wrt="table", steps=30, batch_size=2)
    before = model.get_layer("table").embeddings.numpy().copy()
    end = model(TOKENS).numpy()
    model.get_layer("table").embeddings.assign(np.zeros_like(before))
    start = model(TOKENS).numpy()
    model.get_layer("table").embeddings.assign(before)
    np.testing.assert_allclose(attributions.sum((1, 2)), (end - start)[:, 0], atol=1e-5)

    vector = np.random.default_rng(0).normal(size=vectors.shape).astype("float32")
    step = 1e-2

    def gradient_at(offset):
        moved = keras.layers.Lambda(lambda inputs: inputs + offset)
        table = model.get_layer("table")
        original = table.call
        table.__dict__["call"] = lambda inputs: moved(original(inputs))
        try:
            return watched_at(model, table)
        finally:
            del table.__dict__["call"]

    def watched_at(model, table):
        inner, outputs = table.__dict__["call"], []

        def watching(inputs):
            output = inner(inputs)
            tape.watch(output)
            outputs.append(output)
            return output

        with tf.GradientTape() as tape:
            table.__dict__["call"] = watching
            value = model(TOKENS)
        return tape.gradient(value, outputs[0]).numpy()

    differences = (gradient_at(step * vector) - gradient_at(-step * vector)) / (2 * step)
    found = hessian_vector_product(model, TOKENS, vector, wrt="table")
    np.testing.assert_allclose(found, differences, atol=2e-3 * abs(differences).max())


class Own(keras.Model):
    """Calls a layer twice, and one within a layer."""

    def __init__(self):
        super().__init__()
        self.shared, self.block = layers.Dense(3, "tanh", name="shared"), keras.Sequential(name="block")
        self.block.add(layers.Dense(3, "tanh", name="inner"))

    def call(self, inputs):
        return keras.ops.sum(self.block(self.shared(self.shared(inputs))) ** 2, axis=-1)


def test_a_call_of_several_and_a_layer_within_a_layer():
    model, x = Own(), np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    model(x)
    for call in (0, 1):
        expected, _ = watched(model, x, model.shared, call=call)
        check(input_gradients(model, x, wrt=f"shared:{call}", batch_size=2), expected)
    expected, _ = watched(model, x, model.block.layers[0])
    check(input_gradients(model, x, wrt="inner"), expected)
    check(input_gradients(model, x, wrt={"it": "block/inner"})["it"], expected)
    check(input_gradients(model, x, wrt="block"), expected)
    with pytest.raises(ValueError, match="'shared', and that layer is called 2 times.*Write wrt='shared:0' for"):
        input_gradients(model, x, wrt="shared")
    with pytest.raises(ValueError, match="`wrt` is 'shared:2', and that layer is called 2 times"):
        input_gradients(model, x, wrt="shared:2")
    for several in (["shared:0", "shared:1"], ["inner", 0]):
        with pytest.raises(ValueError, match="or one layer. For several layers make a call for each"):
            input_gradients(model, x, wrt=several)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_other_dtypes(policy):
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(5, 3, name="table", dtype=policy),
            layers.Flatten(dtype=policy),
            layers.Dense(1, "tanh", dtype=policy),
        ]
    )
    expected, _ = watched(model, TOKENS, model.get_layer("table"))
    found = input_gradients(model, TOKENS, wrt="table")
    assert found.dtype == ("float64" if policy == "float64" else "float32")
    np.testing.assert_allclose(found, expected.astype("float64"), rtol=1e-6 if policy == "float64" else 0.02)


def test_under_xla_and_on_two_replicas():
    model = attending_seeded()
    expected, _ = watched(model, TOKENS, model.get_layer("table"))
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = attending_seeded()
    check(input_gradients(model, TOKENS, wrt="table", jit_compile=True), expected)


def attending_seeded():
    keras.utils.set_random_seed(0)
    return attending("attention")


class Looping(layers.Layer):
    def __init__(self):
        super().__init__(name="looping")
        self.inner = layers.Dense(3, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return tf.while_loop(lambda _: False, lambda value: (self.inner(value),), (inputs,))[0]


def refused(kind):
    x = keras.Input((3,), name="x")
    if kind == "several":
        given = layers.LSTM(2, return_state=True, name="given")(layers.Reshape((3, 1))(x))
        return keras.Model(x, layers.Dense(1)(given[1]))
    if kind == "integers":
        given = layers.Discretization([0.0], name="given")(x)
        return keras.Model(x, layers.Dense(1)(layers.Embedding(3, 2)(given)[:, 0]))
    if kind == "loop":
        return keras.Model(x, layers.Dense(1)(Looping()(x)))
    if kind == "unused":
        model = Own()
        model.unused = layers.Dense(1, name="given")
        model.unused.build((None, 3))
        return model
    if kind == "twice":
        parts = [keras.Sequential([keras.Input((3,)), layers.Dense(3, name="given")], name=name) for name in "ab"]
        return keras.Model(x, layers.Dense(1)(parts[1](parts[0](x))))
    if kind == "input":
        inner = keras.Sequential([keras.Input((3,)), layers.Dense(3, name="x")], name="part")
        return keras.Model(x, layers.Dense(1)(inner(x)))
    dense = layers.Dense(2, name="given")
    return keras.Model(x, layers.Dense(1)(keras.ops.reshape(dense(keras.ops.reshape(x, (-1, 1))), (-1, 6))))


@pytest.mark.parametrize(
    ("kind", "wrt", "says"),
    [
        ("several", "given", r"'given' is 3 tensors.*keras.layers.Identity\(name=...\)"),
        ("integers", "given", "output of layer 'given' is int"),
        ("loop", "inner", "'inner' is called in a loop.*Name a layer around or after it"),
        ("unused", "given", "`wrt` is 'given', and that layer is called 0 times"),
        ("twice", "given", "2 inputs or layers of .* Write wrt='a/given' for the layer, or 'b/given' for the layer"),
        ("input", "x", "Write wrt=0 for the input x, or 'part/x' for the layer"),
        ("rows", "given", r"'given' is of shape \(.*\) for 2 rows"),
        ("rows", "gievn", r"no input or layer of that name. Did you mean 'given'\?"),
        ("rows", "given:1", "`wrt` is 'given:1', and that layer is called 1 times when .* Write wrt='given:0'"),
    ],
)
def test_layers_that_are_refused(kind, wrt, says):
    with pytest.raises(ValueError, match=says):
        input_gradients(refused(kind), np.ones((2, 3), "float32"), wrt=wrt)


@pytest.mark.long
def test_a_loop_in_a_saved_model_that_was_differentiated_eagerly(tmp_path):
    keras.Sequential([keras.Input((3, 2)), layers.LSTM(2)]).export(tmp_path / "lstm", verbose=False)
    x = tf.ones((4, 3, 2))

    def saved():
        return keras.Sequential([keras.Input((3, 2)), layers.TFSMLayer(tmp_path / "lstm", name="saved")])

    model = saved()
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)[:, 0]
    theirs = tape.gradient(outputs, x)
    with pytest.raises(ValueError, match="SavedModel of 'saved' in a graph: it has a loop.* Make the layer anew"):
        input_gradients(model, x, output=0)
    check(input_gradients(saved(), x, output=0), theirs.numpy())
