"""A batch that is run in slices is the batch that was run whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference
from sample_models import own_steps
from sample_models.cases import DataCase, OptimizerCase, build_model

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch
from keras_paragrad.engine.training.builder import StepBuilder

TOLERANCE = 1e-6
INNER = OptimizerCase("Adam", {"clipnorm": 0.05}, {}, decays=False)


def fit(model, data, **arguments):
    return model.fit(data.dataset(), epochs=2, shuffle=False, verbose=0, **arguments).history


@pytest.mark.long
@pytest.mark.own_process
def test_loss_scaling_on_two_replicas_sees_what_is_not_finite_on_any(mirrored):
    x, y = DataCase((8,)).batches()[0]
    x[6] = np.nan
    with mirrored.scope():
        model = build_model(keras.optimizers.SGD, strategy=mirrored)
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    before = model.get_weights()
    microbatch(model, 2)
    model.fit(x, y, 8, verbose=0)
    assert model.optimizer.dynamic_scale.numpy() == 2.0**14
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_a_weight_without_a_gradient_is_not_updated():
    """Keras would let it decay if its gradient were zero."""

    class WithUnused(keras.layers.Dense):
        def build(self, shape):
            super().build(shape)
            self.unused = self.add_weight(shape=(), initializer="ones")

    model = keras.Sequential([keras.Input((3,)), WithUnused(1)])
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse", jit_compile=False)
    with microbatch(model, 4), pytest.warns(UserWarning, match="Gradients do not exist"):
        model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=10, verbose=0)
    assert float(model.layers[0].unused) == 1


def test_a_model_that_is_not_built():
    x, y = DataCase((9,)).batches()[0]
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    microbatch(model, 4)
    model.fit(x, y, 9, epochs=2, verbose=0)
    assert model.optimizer.iterations.numpy() == 2


@pytest.mark.long
def test_ragged_inputs_are_cut():
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0], [8.0, 9.0]])

    class Sum(keras.layers.Layer):
        def call(self, inputs):
            return tf.reduce_sum(inputs, axis=1, keepdims=True)

    def trained(size):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((None,), ragged=True), Sum(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        if size:
            microbatch(model, size)
        model.fit(tf.data.Dataset.from_tensor_slices((ragged, tf.ones((5, 1)))).batch(5), shuffle=False, verbose=0)
        return model

    assert largest_difference(trained(2), trained(None)) < TOLERANCE


def test_it_undoes():
    data = DataCase((8, 8))
    model = build_model(INNER, run_eagerly=True)
    handle = microbatch(model, 3)
    assert "make_train_function" in vars(model)
    handle.undo()
    assert "make_train_function" not in vars(model)
    fit(model, data)
    plain = build_model(INNER, run_eagerly=True)
    fit(plain, data)
    assert largest_difference(model, plain) == 0.0


def test_it_lasts_through_compile_and_under_the_callback():
    data = DataCase((8, 8))
    model = build_model(INNER)
    microbatch(model, 3)
    model.compile(AccumulatingOptimizer(INNER(), 2), "mse", run_eagerly=True)
    fit(model, data, callbacks=[ExactAccumulation()])
    assert "make_train_function" in vars(model)
    fit(model, data, callbacks=[ExactAccumulation()])
    assert model.optimizer.iterations.numpy() == 4


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "64", None])
def test_size_is_checked(size):
    with pytest.raises(ValueError, match="Write size=64"):
        microbatch(build_model(INNER), size)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_passes_in_a_loop_are_functions_of_their_own(jit_compile):
    """oneDNN takes a graph with a cycle in any order, and then doesn't find the pooling of a gradient.

    XLA takes three times as long for convolutions in a loop.
    """
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.MaxPooling2D(), keras.layers.Conv2D(1, 4)])
    model.add(keras.layers.MaxPooling2D(1))
    model.compile("sgd", "mse", jit_compile=jit_compile)
    with microbatch(model, size=2):
        step = tf.function(StepBuilder.of(model).one_step, autograph=False)
        traced = step.get_concrete_function((tf.ones([6, 8, 8, 1]), tf.ones([6, 1, 1, 1])))
    functions = traced.graph.as_graph_def().library.function
    pooling = [each for each in functions if any(node.op == "MaxPoolGrad" for node in each.node_def)]
    assert pooling and all(each.attr["_XlaMustCompile" if jit_compile else "_noinline"].b for each in pooling)


def fitted(made, parts):
    model = own_steps.model(made, run_eagerly=True)
    with microbatch(model, parts):
        return model.fit(*own_steps.data(), batch_size=7, shuffle=False, verbose=0).history


def test_what_compute_metrics_adds_has_to_be_had_of_parts():
    expected = fitted(own_steps.PerplexityOfParts, 100)
    assert "perplexity" in expected
    assert fitted(own_steps.PerplexityOfParts, 3)["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    # Of whole batches, Keras's way is kept.
    assert fitted(own_steps.Perplexity, 100)["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    with pytest.raises(ValueError, match="compute_metrics of Perplexity returns.*Override that too"):
        fitted(own_steps.Perplexity, 3)


def test_what_compute_metrics_leaves_out_is_left_out_of_parts():
    expected, found = fitted(own_steps.WithoutError, 100), fitted(own_steps.WithoutError, 3)
    assert found.keys() == expected.keys() == {"loss"}
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
