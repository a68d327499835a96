"""What GPUs need, shown without one: variables that a GPU can hold, and layers that XLA can't compile there."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import (
    AccumulatingOptimizer,
    ExactAccumulation,
    GradientTelemetry,
    input_gradients,
    input_jacobian,
    make_private,
    microbatch,
    per_example_gradients,
    per_example_norms,
    recompute,
    transform_gradients,
    wrap,
)
from keras_paragrad.privacy import AdaptiveClip

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = np.random.default_rng(0).normal(size=(12, 2)).astype("float32")
# Of these dtypes TensorFlow keeps variables in host memory, which a step compiled by XLA for a GPU can't reach.
ON_HOST = {"int32", "int16", "int8", "uint64", "uint16", "uint8", "string"}


PRIVACY = {"clip_norm": 1.0, "noise_multiplier": 1.0, "examples": 12, "expected_batch_size": 4, "delta": 1e-3}


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])


def compiled(model: keras.Model, optimizer="adam") -> keras.Model:
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    return model


def private(**options) -> keras.Model:
    model = make_private(mlp(), **{**PRIVACY, **options})
    return compiled(model)


def centered(gradients, variables):
    return [gradient - tf.reduce_mean(gradient) for gradient in gradients]


def sliced() -> keras.Model:
    model = compiled(mlp())
    microbatch(model, 2)
    return model


def recomputed() -> keras.Model:
    model = compiled(mlp())
    recompute(model, every=1)
    return model


def transformed() -> keras.Model:
    model = compiled(mlp())
    transform_gradients(model, centered)
    return model


MODELS = {
    "clipped": lambda: compiled(wrap(mlp(), clip_norm=1.0)),
    "private": private,
    "gradients": lambda: compiled(wrap(mlp(), quantity="gradients", capacity=4)),
    "accumulation": lambda: compiled(mlp(), AccumulatingOptimizer("adam", 2)),
    "norms": lambda: compiled(wrap(mlp())),
    "slices": sliced,
    "recompute": recomputed,
    "transform": transformed,
    "second moment": lambda: compiled(wrap(mlp(), quantity="second_moment")),
    "adaptive": lambda: private(clip_norm=AdaptiveClip(initial=1.0, quantile=0.5, count_noise=5)),
}


@pytest.mark.few(0, "gradients", "accumulation")
@pytest.mark.parametrize("name", MODELS)
def test_steps_have_no_variables_that_gpus_cannot_hold(name):
    created = []

    def record(create, **arguments):
        variable = create(**arguments)
        created.append((variable.name, variable.dtype.name))
        return variable

    with tf.variable_creator_scope(record):
        model = MODELS[name]()
        callbacks = [ExactAccumulation()] if name == "accumulation" else []
        model.fit(X, Y, 4, verbose=0, callbacks=[*callbacks, GradientTelemetry(every=1)])
    assert created
    assert [each for each in created if each[1] in ON_HOST] == []


@pytest.fixture
def without_xla() -> keras.Model:
    """A model with a layer like an LSTM that cuDNN runs."""
    model = mlp()
    model.layers[0].supports_jit = False
    return model


def test_a_layer_that_xla_cannot_compile_is_run_without_it(without_xla):
    name = without_xla.layers[0].name
    for function, arguments in (
        (per_example_norms, (X, Y, "mse")),
        (per_example_gradients, (X, Y, "mse")),
        (input_gradients, (X, 0)),
        (input_jacobian, (X,)),
    ):
        with pytest.warns(UserWarning, match=f"XLA can't compile Dense {name!r}, so jit_compile=True is ignored"):
            ours = function(without_xla, *arguments, jit_compile=True)
        plain = function(without_xla, *arguments, jit_compile=False)
        for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(plain), strict=True):
            np.testing.assert_array_equal(a, b)
