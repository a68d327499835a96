"""Layers with LoRA have rules of their own, for the trained factors alone, whatever the frozen weight is."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.every_example import check
from sample_models.drawn_layers import randomize, some_inputs

from keras_paragrad import wrap
from keras_paragrad.per_example import Generic
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.rules.low_rank import LowRank
from keras_paragrad.per_example.units import layer_and_sublayers, units_of


def with_kernels(model):
    return [layer for layer in layer_and_sublayers(model) if isinstance(layer, layers.Dense | layers.EinsumDense)]


def adapted(model, rank=2, alpha=3.0):
    """A model with LoRA in each layer that has a rule for it, and random weights."""
    for layer in with_kernels(model):
        layer.enable_lora(rank, lora_alpha=alpha)
    randomize(model)
    return model


def perceptron(shape=(4,)):
    return keras.Sequential([keras.Input(shape), layers.Dense(5, activation="tanh"), layers.Dense(3)])


def attention():
    words = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(9, 4)(words)
    attended = layers.MultiHeadAttention(2, 3)(embedded, embedded)
    return keras.Model(words, layers.Dense(5, activation="gelu")(attended))


def one_of_each():
    words = keras.Input((6,), dtype="int32")
    projected = layers.EinsumDense("abc,cde->abde", (6, 2, 3), bias_axes="de")(layers.Embedding(9, 4)(words))
    return keras.Model(words, layers.Dense(5, activation="gelu")(layers.Flatten()(projected)))


def rules_of(model):
    return [unit.rule for unit in units_of(model)]


# Without XLA, a quantized one is in the next test but three.
@pytest.mark.long
@pytest.mark.parametrize(
    ("jit_compile", "beside_plain"),
    [
        (True, True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((False, False), (False, True), (True, False))),
    ],
)
def test_attention_embeddings_and_dense_layers(jit_compile, beside_plain):
    model = adapted(attention())
    assert sum(isinstance(rule, LowRank) for rule in rules_of(model)) == len(rules_of(model)) - 1 == 5
    check(model, some_inputs((3, 6), 9), jit_compile, beside_plain=beside_plain)


@pytest.mark.parametrize("shape", [(4,), (40, 4), (2, 3, 4)])
def test_only_what_is_trained_counts(shape):
    model = adapted(perceptron(shape))
    model.layers[0].bias.trainable = False
    model.layers[1].lora_kernel_a.trainable = False
    assert len(model.trainable_variables) == 4
    assert not any(isinstance(rule, Generic) for rule in rules_of(model))
    check(model, some_inputs((3, *shape)))


def test_a_layer_that_is_called_twice():
    inputs = keras.Input((3, 4))
    shared = layers.Dense(4, activation="tanh")
    projection = layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="de")
    once = shared(inputs)
    model = keras.Model(inputs, projection(shared(once)) + projection(once))
    check(adapted(model), some_inputs((3, 3, 4)))


def test_an_embedding_takes_the_generic_rule():
    words = keras.Input((5,), dtype="int32")
    table = layers.Embedding(9, 4)
    model = keras.Model(words, table(words) * table(words[:, ::-1]))
    table.enable_lora(2, lora_alpha=3.0)
    randomize(model)
    assert isinstance(rules_of(model)[0], Generic)
    check(model, some_inputs((3, 5), 9))


@pytest.mark.few(0, "False-attention-int8")
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("make", [attention, one_of_each])
@pytest.mark.parametrize("beside_plain", [False, True])
def test_the_frozen_weight_is_quantized(mode, make, beside_plain):
    model = make()
    randomize(model)
    for layer in with_kernels(model):
        layer.quantize(mode)
    adapted(model)
    x = some_inputs((3, 6), 9)
    # Those that a trial run leaves: a layer that is not recorded is taken together with those around it.
    rules = [unit.rule for unit in units_for(model, (tf.constant(x),), {"training": None})]
    assert len(rules) == len(with_kernels(model)) + 1 and not any(isinstance(rule, Generic) for rule in rules)
    check(model, x, beside_plain=beside_plain)


def test_a_quantized_layer_without_lora_trains_its_bias():
    """As of a layer whose weight is frozen: the generic rule."""
    model = perceptron()
    randomize(model)
    for layer in model.layers:
        layer.quantize("int8")
    assert len(model.trainable_variables) == 2
    check(model, some_inputs((3, 4)))


@pytest.mark.parametrize(
    ("equation", "shape", "output_shape", "bias_axes"),
    [
        ("abcd,cde->abe", (4, 2, 3), (None, 5), "e"),
        ("abc,bcd->abd", (4, 3), (4, 5), "bd"),
        ("abcd,edc->abe", (4, 2, 3), (None, 5), "e"),
        ("...x,yx->...y", (2, 3, 4), 5, "y"),
    ],
)
def test_kernels_with_any_last_axis(equation, shape, output_shape, bias_axes):
    layer = layers.EinsumDense(equation, output_shape, "tanh", bias_axes)
    model = adapted(keras.Sequential([keras.Input(shape), layer]))
    assert not any(isinstance(rule, Generic) for rule in rules_of(model))
    check(model, some_inputs((3, *shape)))


def test_a_kernel_whose_last_axis_is_in_all_terms():
    model = keras.Sequential([keras.Input((4, 3)), layers.EinsumDense("abc,cb->ab", (4,))])
    adapted(model)
    assert isinstance(rules_of(model)[0], Generic)
    check(model, some_inputs((3, 4, 3)))


@pytest.mark.few(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_clipped_step(jit_compile):
    """The step of `fit` is that of a loop over the examples, and leaves the frozen weights alone."""
    x, y = some_inputs((6, 4)), np.arange(6) % 3
    ours = adapted(perceptron())
    frozen = [variable.numpy() for variable in ours.non_trainable_variables]
    # In clones, Keras's Dense loses its `lora_alpha`.
    loop = adapted(perceptron())
    for mine, other in zip(loop.weights, ours.weights, strict=True):
        mine.assign(other)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = wrap(ours, clip_norm=0.1)
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=jit_compile)
    model.fit(x, y, batch_size=6, verbose=0)

    totals = [np.zeros(variable.shape, "float32") for variable in loop.trainable_variables]
    before = [variable.numpy() for variable in loop.trainable_variables]
    # Tracing takes longer than a few small steps.
    loop.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=True)
    for place in range(6):
        one = slice(place, place + 1)
        loop.train_on_batch(x[one], y[one])
        steps = [start - variable.numpy() for start, variable in zip(before, loop.trainable_variables, strict=True)]
        norm = np.sqrt(sum(np.square(step).sum() for step in steps))
        for total, step in zip(totals, steps, strict=True):
            total += step * min(1.0, 0.1 / norm) / 6
        for start, variable in zip(before, loop.trainable_variables, strict=True):
            variable.assign(start)
    scale = max(np.abs(total).max() for total in totals)
    for start, total, variable in zip(before, totals, ours.trainable_variables, strict=True):
        # Of differences of weights around 1, of which float32 keeps 24 bits.
        np.testing.assert_allclose(start - variable.numpy(), total, atol=1e-6 * max(scale, 1.0))
    for value, variable in zip(frozen, ours.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(value, variable)
