"""Layers without a rule, rules of one's own, and what draws random numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.every_example import check, quantities
from oracles.whole_batches import gradient_error
from sample_models.drawn_layers import randomize, some_inputs

from keras_paragrad.per_example import Generic, Rule, register_rule
from keras_paragrad.per_example import rule as rule_module
from keras_paragrad.per_example.rule import rule_for


class Scale(layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


class Noisy(layers.Dense):
    """A dense layer with a `call` of its own, which the dense rule is not for."""

    def call(self, inputs, training=None):
        return super().call(inputs * inputs, training=training)


class Renamed(layers.Dense):
    """A dense layer that does nothing else."""


class Block(layers.Layer):
    """Owns a weight, has layers within, takes two inputs and gives two outputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dense, self.dropout = layers.Dense(3, activation="tanh"), layers.Dropout(0.5)

    def compute_mask(self, inputs, mask):
        return None

    def build(self, inputs_shape, other_shape):
        self.gate = self.add_weight(shape=(3,))
        self.dense.build(inputs_shape)

    def call(self, inputs, other, mask=None):
        hidden = self.dropout(self.dense(inputs)) * self.gate
        if mask is not None:
            hidden = hidden * ops.cast(mask, hidden.dtype)[..., None]
        return hidden + other, ops.sum(hidden, axis=1)


def blocks():
    x, other = keras.Input((4, 2), name="x"), keras.Input((4, 3), name="other")
    sequence, total = Block()(x, other, mask=ops.greater(x[..., 0], 0))
    return keras.Model([x, other], layers.Concatenate()([layers.Flatten()(sequence), total]))


@pytest.mark.covering
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("layer", [Scale, lambda: Noisy(3)])
def test_a_layer_without_a_rule(layer, jit_compile):
    model = keras.Sequential([keras.Input((4, 2)), layers.Dense(2), layer()])
    randomize(model)
    assert rule_for(model.layers[1]) is None or isinstance(rule_for(model.layers[1]), Generic)
    check(model, some_inputs((3, 4, 2)), jit_compile)


@pytest.mark.parametrize("layer", [Scale, lambda: layers.SimpleRNN(2)])
def test_one_loop_serves_all_quantities(layer, monkeypatch):
    loops = []
    map_fn = tf.map_fn
    monkeypatch.setattr(tf, "map_fn", lambda *arguments, **keywords: loops.append(1) or map_fn(*arguments, **keywords))
    model = keras.Sequential([keras.Input((4, 2)), layers.TimeDistributed(layers.Dense(2)), layer()])
    quantities(model, some_inputs((3, 4, 2)), np.float32(1), np.ones(3, "float32"), False)
    assert len(loops) == sum(bool(each.trainable_variables) for each in model.layers)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_layer_of_layers_with_several_inputs_and_outputs(jit_compile):
    model = blocks()
    randomize(model)
    check(model, [some_inputs((3, 4, 2)), some_inputs((3, 4, 3))], jit_compile)


def test_a_mask_goes_with_its_row():
    x = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(4, 3, mask_zero=True)(x)
    model = keras.Model(
        x, layers.Bidirectional(layers.SimpleRNN(3))(layers.SimpleRNN(4, return_sequences=True)(embedded))
    )
    randomize(model)
    check(model, some_inputs((6, 5), 3))


def test_subclasses_have_the_rule_unless_they_override_call():
    renamed, noisy = Renamed(2), Noisy(2)
    for layer in (renamed, noisy):
        layer.build((None, 3))
    assert rule_for(renamed) is not None
    assert rule_for(noisy) is None


def test_a_rule_of_one_s_own(monkeypatch):
    # Other tests go through all rules.
    monkeypatch.setattr(rule_module, "_RULES", dict(rule_module._RULES))

    class Doubled(Scale):
        def call(self, inputs):
            return 2 * inputs * self.scale

    seen = []

    @register_rule(Doubled)
    class DoubledRule(Rule):
        def gradients(self, call):
            seen.append(call.layer)
            return [2 * tf.reduce_sum(call.input * call.cotangent, 1)]

    model = keras.Sequential([keras.Input((4, 2)), layers.Dense(3), Doubled()])
    check(model, some_inputs((3, 4, 2)))
    assert seen


@pytest.mark.parametrize("wrong", ["Dense", keras.Model.fit])
def test_what_can_t_be_registered(wrong):
    with pytest.raises(TypeError, match="`layers` must be layer classes"):
        register_rule(wrong)
    with pytest.raises(TypeError, match="must decorate a subclass of Rule"):
        register_rule(layers.Dense)(object)


# Dropout within a recurrent layer, and beside a weight in a layer of one's own; before layers that have rules.
@pytest.mark.long
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: keras.Sequential([keras.Input((4, 3)), layers.LSTM(3, dropout=0.4, recurrent_dropout=0.3)]),
            marks=pytest.mark.long,
        ),
        lambda: keras.Sequential(
            [
                keras.Input((4, 3)),
                layers.GRU(3, dropout=0.4, recurrent_dropout=0.3),
                layers.Dropout(0.3),
                layers.Dense(2),
            ]
        ),
        blocks,
    ],
)
def test_random_numbers_are_those_of_the_forward_pass(make, jit_compile):
    model = make()
    randomize(model)
    x = [some_inputs((5, *variable.shape[1:])) for variable in model.inputs]
    x = x[0] if len(x) == 1 else x
    targets = some_inputs((5, *model.output_shape[1:]))
    seeds = [variable for variable in model.non_trainable_variables if "seed" in variable.path]
    before = [seed.numpy() for seed in seeds]

    @tf.function(jit_compile=jit_compile, autograph=False)
    def whole():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) * targets)
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    theirs = [gradient.numpy() for gradient in whole()]
    for seed, value in zip(seeds, before, strict=True):
        seed.assign(value)
    gradients, *_ = quantities(model, x, targets, np.ones(5, "float32"), jit_compile, training=True)
    # The sum over the examples is the gradient of the batch, for the same random numbers.
    assert gradient_error([tf.reduce_sum(gradient, 0) for gradient in gradients], theirs, 1.0) < 1e-5
    assert any(not np.array_equal(a, b.numpy()) for a, b in zip(before, seeds, strict=True))
