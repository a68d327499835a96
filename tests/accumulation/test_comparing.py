"""Losses that compare the examples of a batch, in slices, are those of the whole batch."""

import logging

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from keras import layers, ops
from oracles.whole_batches import largest_difference
from runner.covering import examples
from sample_models.comparing_losses import LOSSES, NtXent, SupCon, softmax_of_pairs

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch
from keras_paragrad.engine.probes import comparing
from keras_paragrad.engine.step.builder import StepBuilder

TOLERANCE = 1e-6
generator = np.random.default_rng(0)
X = generator.normal(size=(30, 6)).astype("float32")
Y = generator.integers(0, 3, 30).astype("float32")
WEIGHTS = generator.uniform(0.2, 3, 30).astype("float32")


def encoder(*more, **arguments):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    model = keras.Sequential([keras.Input((6,)), hidden, *more, layers.Dense(4)])
    arguments = {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": SupCon(), **arguments}
    model.compile(**arguments)
    return model


def length(y, z):
    return ops.norm(z, axis=-1)


def check(make, size, x, y=None, weights=None, batch_size=12, mode=None, epochs=1):
    """Compares weights and logs with those of Keras's steps on whole batches."""
    how = {"epochs": epochs, "shuffle": False, "verbose": 0, "sample_weight": weights}
    whole = make(run_eagerly=True)
    expected = whole.fit(x, y, batch_size, **how).history
    sliced = make(**(mode or {}))
    with microbatch(sliced, size):
        history = sliced.fit(x, y, batch_size, **how).history
    assert largest_difference(sliced, whole) < TOLERANCE
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    return sliced


@pytest.mark.slow(20)
@pytest.mark.few(2)
@pytest.mark.parametrize("mode", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=["graph", "xla", "eager"])
def test_equals_the_whole_batch(mode):
    @examples(1 if mode.get("jit_compile") else 2)
    @given(st.sampled_from(sorted(LOSSES)), st.sampled_from([5, 4, 1]), st.sampled_from([12, 13]), st.booleans())
    def equal(loss, size, batch_size, weighted):
        def make(**mode):
            return encoder(loss=LOSSES[loss](), metrics=[length], **mode)

        check(make, size, X[:25], Y[:25], WEIGHTS[:25] if weighted else None, batch_size, mode)

    equal()


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_in_uneven_slices(loss):
    check(lambda **mode: encoder(loss=LOSSES[loss](), **mode), 5, X[:12], Y[:12], epochs=2)


class TwoTowers(keras.Model):
    """In-batch negatives, with a temperature that `compute_loss` reads, and a head that it calls."""

    def __init__(self):
        super().__init__()
        self.words, self.left, self.right = layers.Embedding(9, 5), layers.Dense(4), layers.Dense(4)
        self.head = layers.Dense(1, kernel_regularizer="l2")
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def build(self, shapes):
        self.words.build((None, 3))
        self.left.build((None, 5))
        self.right.build((None, 6))
        self.head.build((None, 4))

    def call(self, inputs):
        pooled = ops.mean(self.words(inputs["words"]), axis=1)
        return {"left": self.left(pooled), "right": [self.right(inputs["numbers"])], "unused": ops.zeros_like(pooled)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        left, right = y_pred["left"], y_pred["right"][0]
        values = softmax_of_pairs(left, right, self.temperature) * ops.square(x["numbers"][:, 0])
        return ops.mean(values) + ops.mean(ops.square(self.head(left) - y)) + sum(self.losses)


def test_own_compute_loss_of_nested_inputs_and_outputs():
    x = {"words": generator.integers(0, 9, (11, 3)), "numbers": X[:11]}

    def make(**mode):
        keras.utils.set_random_seed(0)
        model = TwoTowers()
        model.build(None)
        model.compile(keras.optimizers.SGD(0.05), **mode)
        return model

    check(make, 4, x, Y[:11, None], batch_size=11, epochs=2)


class Penalty(layers.Layer):
    """Adds a loss of one value per example, which Keras sums."""

    def call(self, inputs):
        self.add_loss(0.01 * ops.sum(ops.square(inputs), axis=-1))
        return inputs


def test_added_losses_of_a_value_per_example():
    check(lambda **mode: encoder(Penalty(), **mode), 5, X[:12], Y[:12])


def test_outputs_with_masks():
    tokens = np.random.default_rng(1).integers(0, 5, (9, 4))

    def compare(y, z):
        return SupCon().call(y[:, 0], ops.mean(z, axis=1))[:, None] * ops.ones_like(z[..., 0])

    def make(**mode):
        keras.utils.set_random_seed(0)
        words = layers.Embedding(5, 6, mask_zero=True)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), words, layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), compare, **mode)
        return model

    check(make, 4, tokens, np.repeat(Y[:9, None], 4, 1), batch_size=9)


class Noise(layers.Layer):
    """Draws from a generator of its own, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(3)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        self.calls.assign(self.calls + 1)
        return inputs + 0.1 * self.calls * keras.random.normal(ops.shape(inputs), seed=self.generator)


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_both_runs_of_a_slice_draw_the_same_numbers(mode, monkeypatch):
    """As if the slices ran one after the other under one tape, which their state would be refused for."""
    refused = encoder(Noise(), loss=NtXent())
    with (
        microbatch(refused, 5),
        pytest.raises(ValueError, match="The state of noise.* is updated with each of the sli"),
    ):
        refused.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    monkeypatch.setattr(comparing, "state_problem", lambda *arguments: None)

    def make(**mode):
        return encoder(layers.Dropout(0.5, seed=1), Noise(), loss=NtXent(), **mode)

    whole, sliced = make(), make(**mode)
    for _ in range(2):
        with tf.GradientTape() as tape:
            outputs = [whole(X[first : first + 5][: 12 - first], training=True) for first in (0, 5, 10)]
            regularizers = sum(whole.losses)
            loss = NtXent()(Y[:12], tf.concat(outputs, 0)) + regularizers
        whole.optimizer.apply(tape.gradient(loss, whole.trainable_weights), whole.trainable_weights)
    with microbatch(sliced, 5, prove=False):
        sliced.fit(X[:12], Y[:12], batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert largest_difference(sliced, whole) < TOLERANCE
    for ours, theirs in zip(sliced.non_trainable_variables, whole.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_no_weight_is_updated_before_all_gradients_are_there():
    """In optimized graphs, the backward pass of the last slice may read an updated weight otherwise."""
    model = encoder(loss=NtXent(), jit_compile=False)
    with microbatch(model, 5):
        step = tf.function(StepBuilder.of(model).one_step, autograph=False)
        graph = step.get_concrete_function((tf.constant(X[:12]), tf.constant(Y[:12]))).graph
    handles = {
        inner.op for outer, inner in graph.captures for each in model.trainable_weights if outer is each.value.handle
    }
    updates = [op for op in graph.get_operations() if op.type.startswith("Assign") and op.inputs[0].op in handles]
    assert len(updates) == len(model.trainable_weights)

    def products_before(operation):
        """The products, among them those that make the gradients of the last slice, which is in no loop."""
        before, seen, pending = [], set(), [(operation, operation.inputs)]
        while pending:
            each, inputs = pending.pop()
            before += [each.name] if each.type == "MatMul" else []
            for source in {*(tensor.ref() for tensor in inputs), *each.control_inputs} - seen:
                seen.add(source)
                tensor = source.deref() if hasattr(source, "deref") else None
                of = source if tensor is None else tensor.op
                # Optimized graphs have one Identity for each tensor, which holds up no other.
                alone = of.type == "IdentityN" and tensor is not None
                pending.append((of, [of.inputs[tensor.value_index]] if alone else of.inputs))
        return set(before)

    first, *others = map(products_before, updates)
    assert len(first) > len(model.trainable_weights) / 2
    assert all(each == first for each in others)


def test_under_a_loss_scale_and_with_sparse_gradients():
    tokens = np.random.default_rng(1).integers(0, 5, (11, 4))

    def make(**mode):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(5, 6), layers.Flatten()])
        model.add(layers.Dense(3, trainable=False))
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), SupCon(), **mode)
        return model

    check(make, 4, tokens, Y[:11], batch_size=11, epochs=2)


def test_it_says_so_once(caplog):
    caplog.set_level(logging.INFO, "keras_paragrad")
    model = encoder()
    with microbatch(model, 5):
        for _ in range(2):
            model.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    (said,) = [each.getMessage() for each in caplog.records if "compares the examples of a batch" in each.getMessage()]
    assert "each slice runs twice" in said


class Centered(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Activity(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.mean(inputs))
        return inputs


class Stacked(layers.Layer):
    def call(self, inputs):
        return ops.concatenate([inputs, -inputs], axis=0)


class Unseeded(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


def of_all(y, z):
    return ops.mean(ops.logsumexp(ops.matmul(z, ops.transpose(z)), axis=1))


REFUSED = {
    "a layer": (lambda: Centered(name="centered"), SupCon(), "'centered' mixes them as well.*recompute"),
    "batch normalization": (lambda: layers.BatchNormalization(name="norm"), SupCon(), "'norm' mixes them as well"),
    "an added mean": (Activity, SupCon(), "may be a sum or a mean over them"),
    "views as rows": (Stacked, of_all, r"has the shape \(16, 4\) for 8 examples"),
    "numbers without a seed": (Unseeded, SupCon(), "runs twice, and its operation .* draws random numbers"),
}


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:1 BatchNormalization layer normalizes with the statistics:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    layer, loss, says = REFUSED[name]
    model = encoder(layer(), loss=loss)
    with microbatch(model, 5), pytest.raises(ValueError, match=says):
        model.fit(X[:12], Y[:12], batch_size=12, verbose=0)


@pytest.mark.parametrize("weighting", ["auto", "uniform"])
def test_windows_are_refused(weighting):
    """Micro-batches of a window are not there at the same time."""
    model = encoder(optimizer=AccumulatingOptimizer("sgd", 2, weighting=weighting))
    with microbatch(model, 5), pytest.raises(ValueError, match=r"microbatch\(model, size=\.\.\.\)"):
        model.fit(X[:24], Y[:24], batch_size=12, verbose=0, callbacks=[ExactAccumulation()])
