"""Models whose BatchNormalization became GroupNormalization: nothing else changes, and examples are independent."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from sample_models.drawn_layers import randomize

from keras_paragrad import per_example_norms
from keras_paragrad.per_example.units import layer_and_sublayers
from keras_paragrad.privacy import fix_batch_norm


def kinds(model, kind):
    return [layer for layer in layer_and_sublayers(model) if type(layer) is kind]


def check_fixed(model, fixed):
    """Layers, names and weights are those of the model, but for BatchNormalization."""
    # Copies of unnamed inputs have names of their own.
    before, after = (
        [each for each in layer_and_sublayers(whole) if not isinstance(each, layers.InputLayer)]
        for whole in (model, fixed)
    )
    assert [layer.name for layer in after] == [layer.name for layer in before]
    assert not any(layer.trainable for layer in kinds(fixed, layers.BatchNormalization))
    for old, new in zip(before, after, strict=True):
        if isinstance(old, keras.Model):
            continue
        replaced = type(old) is layers.BatchNormalization and old.trainable
        assert type(new) is (layers.GroupNormalization if replaced else type(old))
        kept = [old.gamma, old.beta] if replaced else old.weights
        kept = [variable for variable in kept if variable is not None]
        assert len(new.weights) == len(kept)
        for one, other in zip(new.weights, kept, strict=True):
            assert one is not other and one.path == other.path and one.trainable == other.trainable
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        if replaced:
            assert new.groups <= 32 and old.moving_mean.shape[0] % new.groups == 0
            assert (new.epsilon, new.center, new.scale) == (old.epsilon, old.center, old.scale)
    assert [tensor.shape for tensor in fixed.inputs] == [tensor.shape for tensor in model.inputs]
    assert [tensor.shape for tensor in fixed.outputs] == [tensor.shape for tensor in model.outputs]


def randomized(model):
    randomize(model)
    return model


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (keras.applications.MobileNetV2, 32),
        pytest.param(keras.applications.ResNet50, 32, marks=pytest.mark.long),
        pytest.param(keras.applications.EfficientNetB0, 32, marks=pytest.mark.long),
        pytest.param(keras.applications.DenseNet121, 32, marks=pytest.mark.long),
    ],
)
def test_applications(make, size):
    model = make(weights=None, input_shape=(size, size, 3), classes=4)
    fixed = fix_batch_norm(model)
    assert len(kinds(fixed, layers.GroupNormalization)) == len(kinds(model, layers.BatchNormalization)) > 20
    check_fixed(model, fixed)
    # Each example's output is its own, in training too.
    x = np.random.default_rng(0).uniform(0, 1, (3, size, size, 3)).astype("float32")
    for layer in layer_and_sublayers(fixed):
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    alone = np.concatenate([fixed(x[place : place + 1], training=True) for place in range(3)])
    np.testing.assert_allclose(fixed(x, training=True), alone, atol=1e-5)


def block(filters, **options):
    return [layers.Conv2D(filters, 3), layers.BatchNormalization(**options), layers.ReLU()]


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (7, 7), (32, 32), (48, 24), (64, 32), (74, 2), (37, 1)])
def test_as_many_groups_as_divide_the_channels(channels, groups):
    fixed = fix_batch_norm(keras.Sequential([keras.Input((9, 9, 3)), *block(channels)]))
    assert fixed.layers[1].groups == groups


def test_options_and_weights_are_kept():
    options = {"center": False, "epsilon": 0.5, "gamma_regularizer": "l2", "gamma_constraint": "non_neg", "name": "own"}
    model = randomized(keras.Sequential([keras.Input((9, 9, 3)), *block(6, **options), *block(4, scale=False)]))
    model.layers[0].bias.trainable = False
    fixed = fix_batch_norm(model)
    check_fixed(model, fixed)
    own = fixed.layers[1]
    assert (own.name, own.beta, own.epsilon) == ("own", None, 0.5)
    assert isinstance(own.gamma_regularizer, keras.regularizers.L2)
    assert isinstance(own.gamma_constraint, keras.constraints.NonNeg)
    assert fixed.layers[4].gamma is None
    # The copy has weights of its own.
    fixed.layers[0].kernel.assign(ops.zeros_like(fixed.layers[0].kernel))
    assert model.layers[0].kernel.numpy().any()


def test_an_axis_that_is_not_the_last():
    model = randomized(keras.Sequential([keras.Input((5, 4, 6)), layers.BatchNormalization(axis=1)]))
    fixed = fix_batch_norm(model)
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 6)).astype("float32")
    grouped = x.reshape(2, 5, 1, 4, 6)
    mean, variance = grouped.mean((2, 3, 4), keepdims=True), grouped.var((2, 3, 4), keepdims=True)
    normalized = ((grouped - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape)
    gamma, beta = (weight.numpy().reshape(1, 5, 1, 1) for weight in fixed.layers[0].weights)
    np.testing.assert_allclose(fixed(x), normalized * gamma + beta, atol=1e-5)


def test_vectors_are_one_group():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32), layers.BatchNormalization()])
    fixed = fix_batch_norm(randomized(model))
    check_fixed(model, fixed)
    assert fixed.layers[1].groups == 1
    assert np.ptp(fixed(np.random.default_rng(0).normal(size=(4, 8)).astype("float32")).numpy(), axis=0).min() > 0
    pooled = keras.Sequential([keras.Input((8, 8, 3)), layers.AveragePooling2D(8), layers.BatchNormalization()])
    assert fix_batch_norm(pooled).layers[1].groups == 1
    anywhere = keras.Sequential([keras.Input((None, None, 4)), layers.BatchNormalization()])
    assert fix_batch_norm(anywhere).layers[0].groups == 4


def test_shared_layers_nested_models_and_operations():
    inner = keras.Sequential([keras.Input((8, 8, 3)), *block(4)], name="inner")
    deeper_inputs = keras.Input((8, 8, 3))
    deeper = keras.Model(deeper_inputs, inner(deeper_inputs) * 2.0, name="deeper")
    left, right = keras.Input((8, 8, 3), name="left"), keras.Input((8, 8, 3), name="right")
    norm = layers.BatchNormalization(name="norm")
    both = layers.Concatenate()([norm(deeper(left)), norm(ops.tanh(inner(right)))])
    model = randomized(keras.Model({"left": left, "right": right}, layers.Dense(2)(both)))
    fixed = fix_batch_norm(model)
    check_fixed(model, fixed)
    assert len(kinds(fixed, layers.GroupNormalization)) == len(kinds(model, layers.BatchNormalization))
    assert fixed.get_layer("deeper").get_layer("inner") is fixed.get_layer("inner")
    assert len(fixed.trainable_variables) == len(model.trainable_variables)
    # With the norms taken for what they became, both models compute the same.
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
    deep = ops.relu(fixed.get_layer("inner").layers[1](model.get_layer("inner").layers[0](x)))
    together = [fixed.get_layer("norm")(part) for part in (deep * 2.0, ops.tanh(deep))]
    expected = model.layers[-1](ops.concatenate(together, axis=-1))
    np.testing.assert_allclose(fixed({"left": x, "right": x}), expected, atol=1e-6)


def test_masks_pass():
    words = keras.Input((5,), dtype="int32")
    normalized = layers.BatchNormalization()(layers.Embedding(9, 4, mask_zero=True)(words))
    model = keras.Model(words, layers.GlobalAveragePooling1D()(normalized))
    fixed = fix_batch_norm(randomized(model))
    check_fixed(model, fixed)
    x = np.array([[1, 2, 3, 0, 0]])
    table, norm = fixed.layers[1].embeddings, fixed.layers[2]
    np.testing.assert_allclose(fixed(x), ops.mean(norm(ops.take(table, x, axis=0))[:, :3], 1), atol=1e-6)


def test_frozen_normalization_is_kept():
    model = randomized(keras.Sequential([keras.Input((9, 9, 3)), *block(4), *block(4)]))
    model.layers[1].trainable = False
    model.layers[1].moving_mean.assign([1.0, 2.0, 3.0, 4.0])
    fixed = fix_batch_norm(model)
    check_fixed(model, fixed)
    assert fixed.layers[1].moving_mean.numpy().tolist() == [1.0, 2.0, 3.0, 4.0]
    model.trainable = False
    assert fix_batch_norm(model) is model


def test_adapters_keep_their_scale():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.BatchNormalization()])
    model.layers[0].enable_lora(2, lora_alpha=7.0)
    fixed = fix_batch_norm(randomized(model))
    check_fixed(model, fixed)
    np.testing.assert_allclose(fixed.layers[0].kernel, model.layers[0].kernel, atol=1e-6)


def test_per_example_gradients_of_a_fixed_model():
    model = keras.Sequential([keras.Input((8, 8, 3)), *block(4), layers.Flatten(), layers.Dense(3)])
    x, y = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype("float32"), np.arange(6) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    norms = per_example_norms(fix_batch_norm(model), x, y, loss)
    assert norms.shape == (6,) and (norms > 0).all()


class Block(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm = layers.BatchNormalization()

    def call(self, inputs):
        return self.norm(inputs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, inputs):
        return self.norm(inputs)


def test_what_only_code_can_replace():
    model = keras.Sequential([keras.Input((8, 4)), Block(name="block")], name="whole")
    with pytest.raises(ValueError, match=r"'whole/block', of class Block, .* write keras\.layers\.GroupNormalization"):
        fix_batch_norm(model)
    model = keras.Sequential([keras.Input((8, 4)), layers.TimeDistributed(layers.BatchNormalization(), name="steps")])
    with pytest.raises(ValueError, match=r"/steps', of class TimeDistributed"):
        fix_batch_norm(model)
    model = Subclassed()
    model(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"'subclassed.*', of class Subclassed"):
        fix_batch_norm(model)


def test_what_leaves_nothing():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1), layers.BatchNormalization(name="norm")])
    with pytest.raises(ValueError, match="/norm' normalizes single numbers"):
        fix_batch_norm(model)
    with pytest.raises(ValueError, match=r"is not built, .* Begin it with keras\.Input"):
        fix_batch_norm(keras.Sequential([layers.Dense(3), layers.BatchNormalization()]))
    with pytest.raises(ValueError, match="`model` is 3"):
        fix_batch_norm(3)
