"""Models, losses and metrics that mix the examples of a batch are found, and refused or warned of."""

import contextlib
import random
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    microbatch,
    per_example_norms,
    wrap,
)
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes import pure_function, trial
from keras_paragrad.engine.probes.losses import find_mixing
from keras_paragrad.engine.probes.row_independence import find_mixing_layer
from keras_paragrad.engine.probes.states import split_dependent_layers, split_dependent_metrics


class MinusBatchMean(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, 0, keepdims=True)


class OverBatch(layers.Layer):
    def call(self, inputs):
        return ops.cumsum(inputs, 0)


class InTraining(layers.Layer):
    def call(self, inputs, training=False):
        return inputs - ops.mean(inputs, 0) if training else inputs


class Unseeded(layers.Layer):
    def call(self, inputs, training=False):
        return inputs + tf.random.normal(tf.shape(inputs)) if training else inputs


class Shifted(layers.Layer):
    """Has a number of the whole batch in its computation, and not in its output."""

    def call(self, inputs):
        return inputs - ops.stop_gradient(ops.max(inputs)) + ops.stop_gradient(ops.max(inputs))


class ByNumberOfRows(layers.Layer):
    def call(self, inputs):
        return inputs / ops.cast(ops.shape(inputs)[0], inputs.dtype)


class InItsGradient(layers.Layer):
    """Has a number of the whole batch in its gradient, and not in its output."""

    def call(self, inputs):
        mean = ops.mean(inputs, 0, keepdims=True)
        return inputs + mean - ops.stop_gradient(mean)


class NormalizesItsGradient(layers.Layer):
    """Divides what comes back by its norm over the batch."""

    def call(self, inputs):
        @tf.custom_gradient
        def identity(values):
            return tf.identity(values), lambda upstream: upstream / (tf.norm(upstream) + 1e-6)

        return identity(inputs)


class RunningMean(layers.Layer):
    def build(self, input_shape):
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="mean")

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs))
        return inputs


class Recommender(keras.Model):
    """The one of keras.io, whose `tensordot` sums over the batch."""

    def __init__(self):
        super().__init__()
        self.user, self.item = (layers.Embedding(50, 8, embeddings_initializer="he_normal") for _ in range(2))
        self.bias = layers.Embedding(50, 1)

    def call(self, inputs):
        score = ops.tensordot(self.user(inputs[:, 0]), self.item(inputs[:, 1]), 2)
        return ops.sigmoid(score + self.bias(inputs[:, 0]))


def sequential(*within, name=None):
    kernel, probabilities = layers.Dense(3), layers.Dense(2, activation="softmax")
    return keras.Sequential([keras.Input((4,)), kernel, *within, probabilities], name=name)


def values(variables):
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def recommender():
    model = Recommender()
    model(np.zeros((2, 2), "int32"))
    return model


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: sequential(layers.Dropout(0.5), layers.BatchNormalization(), layers.GaussianNoise(1.0)), None),
        (lambda: sequential(Unseeded()), None),
        (lambda: sequential(Shifted()), None),
        (lambda: sequential(layers.LayerNormalization(), layers.SpectralNormalization(layers.Dense(3))), None),
        (lambda: sequential(MinusBatchMean(name="mixes")), "mixes"),
        (lambda: sequential(layers.Dropout(0.5), OverBatch(name="mixes")), "mixes"),
        (lambda: sequential(InTraining(name="mixes")), "mixes"),
        (lambda: sequential(layers.Dropout(0.5), ByNumberOfRows(name="mixes")), "mixes"),
        (lambda: sequential(InItsGradient(), name="whole"), "whole"),
        (lambda: sequential(NormalizesItsGradient(), name="whole"), "whole"),
        (lambda: sequential(Unseeded(), MinusBatchMean(name="mixes")), "mixes"),
        # The last layer lets nothing through.
        (lambda: sequential(MinusBatchMean(name="mixes"), layers.Dense(2, kernel_initializer="zeros")), "mixes"),
        (recommender, "recommender"),
    ],
)
def test_layers(make, found):
    model = make()
    batch = tf.zeros((4, 2), "int32") if isinstance(model, Recommender) else tf.zeros((4, 4))
    before = values(model.variables)
    assert find_mixing_layer(model, batch) == found
    np.testing.assert_equal(values(model.variables), before)
    assert not model.losses


def test_a_layer_that_mixes_in_training_alone():
    model = sequential(InTraining(name="mixes"))
    y = np.zeros((3, 2), "float32")
    assert per_example_norms(model, X[:3], y, "mse").shape == (3,)
    with pytest.raises(ValueError, match="The output of 'mixes' for one example"):
        per_example_norms(model, X[:3], y, "mse", training=True)


def test_a_step_whose_parts_cannot_be_compared_runs_whole(monkeypatch, caplog):
    def fault(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(pure_function.PureFunction, "__call__", fault)
    model, whole = (sequential(MinusBatchMean()) for _ in range(2))
    whole.set_weights(model.get_weights())
    for each in (model, whole):
        each.compile("sgd", "sparse_categorical_crossentropy", metrics=[Maximum()], run_eagerly=True)
    with caplog.at_level("INFO", "keras_paragrad"), microbatch(model, 3):
        model.fit(X, Y, verbose=0)
    whole.fit(X, Y, verbose=0)
    for one, other in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert re.search("not checked whether parts of the first batch.*a fault", caplog.text)
    assert "couldn't be compared" in caplog.text


class Leaves(layers.Layer):
    """Leaves a trace of each call, in every way that a layer has."""

    def build(self, input_shape):
        self.state, self.calls, self.last = self.add_weight(shape=(), initializer="zeros", trainable=False), [], None

    def call(self, inputs):
        self.calls.append(inputs.shape)
        self.last = inputs
        self.state.assign_add(ops.sum(inputs))
        self.add_loss(ops.mean(inputs) * np.random.uniform() * random.random())
        return inputs + 0.01 * keras.random.normal(ops.shape(inputs)) + 0.01 * tf.random.normal(tf.shape(inputs))


class Counts(keras.Model):
    """Its metric is of what a layer has seen last."""

    def __init__(self):
        super().__init__()
        self.leaves, self.kernel, self.rows = Leaves(), layers.Dense(2), keras.metrics.Sum("rows")
        self.within = keras.Sequential([layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)])

    def call(self, inputs, training=False):
        return self.within(self.leaves(self.kernel(inputs)), training=training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.rows.update_state(ops.shape(self.leaves.last)[0])
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.long
def test_a_trial_leaves_nothing_behind(monkeypatch):
    tried = []

    def trained():
        keras.utils.set_random_seed(0)
        model = Counts()
        model.compile("adam", "mse", metrics=[Maximum(0.9)], jit_compile=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sliced = microbatch(model, 3, weighting="examples")
            history = model.fit(X, X[:, :2], batch_size=6, epochs=2, shuffle=False, verbose=0).history
            sliced.undo()
        drawn = [random.random(), np.random.uniform(), tf.random.uniform([]).numpy()]
        drawn.append(ops.convert_to_numpy(keras.random.uniform(())))
        variables = model.variables + model.metrics_variables + model.optimizer.variables
        calls = [tuple(shape) for shape in model.leaves.calls]
        return values(variables), drawn, calls, len(model.leaves._losses), history

    compute = pure_function.PureFunction.__call__
    monkeypatch.setattr(pure_function.PureFunction, "__call__", lambda *given: tried.append(given) or compute(*given))
    found = trained()
    assert len(tried) > 8
    monkeypatch.setattr(trial, "ThreadPoolExecutor", None)
    np.testing.assert_equal(found, trained())
    assert found[-1]["rows"] == [6, 6]


def test_a_state_that_keras_does_not_know_is_left_alone():
    class Draws(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = tf.random.Generator.from_seed(1)

        def call(self, inputs):
            return inputs + self.generator.normal(tf.shape(inputs)) - ops.mean(inputs, 0)

    model = sequential(Draws())
    before = model.layers[1].generator.state.numpy()
    assert find_mixing_layer(model, tf.zeros((4, 4))) is None
    np.testing.assert_equal(model.layers[1].generator.state.numpy(), before)


class InBatchNegatives(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -ops.diagonal(ops.log_softmax(ops.matmul(y_pred, ops.transpose(y_true))))


class OfPairs(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.relu(1.0 - (y_pred[::2] - y_pred[1::2]))


class OfNeighbours(keras.losses.Loss):
    def call(self, y_true, y_pred):
        pairs = ops.flip(ops.reshape(y_pred, (-1, 2, y_pred.shape[-1])), 1)
        return ops.mean(ops.square(y_pred - ops.reshape(pairs, ops.shape(y_pred))), -1)


class OfElements(keras.losses.Loss):
    """Flattens the examples' elements, as losses of tokens do."""

    def call(self, y_true, y_pred):
        return ops.reshape(ops.square(y_pred - y_true), (-1,))


class DividesItself(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_pred - y_true), -1) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


@pytest.mark.parametrize(
    ("loss", "targets", "mixes"),
    [
        (keras.losses.Circle(), ((4,), "int32"), True),
        (keras.losses.Circle(), ((4, 1), "float32"), True),
        (InBatchNegatives(), ((4, 5), "float32"), True),
        (OfPairs(), ((4, 5), "float32"), True),
        (OfNeighbours(), ((4, 5), "float32"), True),
        (DividesItself(), ((4, 5), "float32"), True),
        (OfElements(), ((4, 5), "float32"), False),
        (keras.losses.MeanSquaredError(), ((4, 5), "float32"), False),
        (keras.losses.CategoricalCrossentropy(from_logits=True), ((4, 5), "float32"), False),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), ((4,), "int32"), False),
        (keras.losses.Dice(axis=-1), ((4, 5), "float32"), False),
    ],
)
def test_losses(loss, targets, mixes):
    assert (find_mixing(LossTerm(loss, tf.zeros(*targets), tf.zeros((4, 5)), None)) is not None) == mixes


def test_numbers_that_are_not_finite_are_not_compared(caplog):
    """NaN matches NaN, whatever a loss or a layer computes."""

    class OfNegatives(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return ops.mean(y_pred) + ops.log(-1 - ops.abs(y_pred[:, 0]))

    assert not find_mixing(LossTerm(OfNegatives(), tf.zeros([4, 1]), tf.zeros([4, 2]), None))
    assert "the losses are not finite on synthetic rows" in caplog.text
    mixing = layers.Lambda(lambda x: ops.mean(x) + ops.log(-1 - ops.abs(x)))
    mixing.build((None, 3))
    assert find_mixing_layer(mixing, (tf.zeros([4, 3]),)) is None
    assert "the outputs are not finite on synthetic rows" in caplog.text


class Maximum(keras.metrics.Metric):
    def __init__(self, decay=None, name="maximum"):
        super().__init__(name=name)
        self.decay, self.state = decay, self.add_variable((), "zeros", name="state")

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.decay is None:
            self.state.assign(ops.maximum(self.state, ops.max(y_pred)))
        else:
            self.state.assign(self.decay * self.state + (1 - self.decay) * ops.mean(y_pred))

    def result(self):
        return ops.convert_to_tensor(self.state)


def error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("metric", "on_replicas", "one_after_the_other"),
    [
        (keras.metrics.AUC(), ([], []), ([], [])),
        (keras.metrics.R2Score(), ([], []), ([], [])),
        (Maximum(), (["maximum"], []), ([], [])),
        (Maximum(0.9), (["maximum"], []), (["maximum"], [])),
        (error, ([], ["error"]), ([], ["error"])),
    ],
)
def test_metrics(metric, on_replicas, one_after_the_other):
    model = sequential()
    model.compile("sgd", "mse", metrics=[metric])
    model.test_on_batch(np.zeros((4, 4), "float32"), np.zeros((4, 2), "float32"))
    before = values(model.metrics_variables)
    tensors = [tf.zeros((4, 2)), tf.zeros((4, 2)), None]
    assert split_dependent_metrics(model, *tensors, on_replicas=True) == on_replicas
    assert split_dependent_metrics(model, *tensors, on_replicas=False) == one_after_the_other
    np.testing.assert_equal(values(model.metrics_variables), before)


class Updating(layers.Layer):
    """Assigns what `update(state, inputs)` returns, and returns what `read(inputs, state)` does."""

    def __init__(self, update, read=lambda inputs, state: inputs, start="zeros", shape=(), aggregation="none"):
        super().__init__(name="updating")
        self.update, self.read = update, read
        self.state = self.add_weight(shape=shape, initializer=start, trainable=False, aggregation=aggregation)

    def call(self, inputs, training=False):
        # As many do, it reads the state from before.
        outputs = self.read(inputs, self.state + 0)
        if training:
            self.state.assign(self.update(self.state, inputs))
        return outputs


class Codebook(Updating):
    """As of a VQ-VAE: rows are replaced by the nearest of four, which move to the mean of theirs."""

    def __init__(self):
        super().__init__(self.move, self.nearest, "random_normal", (4, 3))

    def chosen(self, state, inputs):
        distances = ops.sum(ops.square(inputs[:, None] - state), -1)
        return ops.one_hot(ops.argmin(distances, -1), 4)

    def move(self, state, inputs):
        chosen = self.chosen(state, inputs)
        means = ops.matmul(ops.transpose(chosen), inputs) / ops.maximum(ops.sum(chosen, 0), 1)[:, None]
        return 0.9 * state + 0.1 * means

    def nearest(self, inputs, state):
        return inputs + ops.stop_gradient(ops.matmul(self.chosen(state, inputs), state) - inputs)


class UnknownToKeras(layers.Layer):
    def __init__(self):
        super().__init__(name="updating")
        self.state = tf.Variable(0.0)

    def call(self, inputs, training=False):
        self.state.assign_add(1.0)
        return inputs


def scaled(inputs, state):
    return inputs / (1 + ops.abs(state))


def largest(state, inputs):
    return ops.maximum(state, ops.max(ops.abs(inputs)))


def slow_mean(state, inputs):
    return 0.9999 * state + 0.0001 * ops.mean(inputs)


def sum_of_rows(state, inputs):
    return state + ops.sum(inputs)


def power_iteration(state, inputs):
    return ops.normalize(ops.matmul(ops.reshape(ops.arange(9.0) + 1, (3, 3)), state[:, None])[:, 0], axis=0)


# Of each layer, whether parts in sequence leave or read another state than the whole, and whether replicas leave one.
STATES = {
    "maximum, read": (lambda: Updating(largest, scaled, "ones"), True, True),
    "maximum": (lambda: Updating(largest, start=keras.initializers.Constant(9.0)), False, True),
    "minimum, read": (lambda: Updating(lambda s, x: ops.minimum(s, ops.min(x)), scaled), True, True),
    "sum": (lambda: Updating(sum_of_rows), False, True),
    "sum, read": (lambda: Updating(sum_of_rows, scaled), True, True),
    "batches": (lambda: Updating(lambda s, x: s + 1), True, False),
    "mean": (lambda: Updating(slow_mean, aggregation="mean"), True, True),
    "slow mean of much": (lambda: Updating(slow_mean, start=keras.initializers.Constant(50.0)), True, True),
    "power iteration": (lambda: Updating(power_iteration, start="ones", shape=(3,)), True, False),
    "codebook": (Codebook, True, True),
    "of TensorFlow": (UnknownToKeras, True, True),
    "constant": (lambda: Updating(lambda s, x: s), False, False),
    "settled": (lambda: Updating(lambda s, x: s * 0 + 3, scaled, keras.initializers.Constant(3.0)), False, False),
    "drawn": (Unseeded, False, False),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", STATES)
def test_states_of_layers(name):
    make, in_sequence, on_replicas = STATES[name]
    model = sequential(layers.Normalization(mean=0, variance=1), layers.Dropout(0.5), make())
    before = values(model.variables)
    for expected, ways in (
        (in_sequence, {"in_sequence": True, "on_replicas": False}),
        (on_replicas, {"in_sequence": False, "on_replicas": True}),
    ):
        found = split_dependent_layers(model, tf.zeros((4, 4)), **ways)
        assert found == (["updating"] if expected else []), ways
    np.testing.assert_equal(values(model.variables), before)


def test_a_state_that_parts_leave_elsewhere_is_refused():
    says = "The state of updating is updated with each of"
    model = sequential(Updating(largest, scaled, "ones"))
    model.compile("sgd", "sparse_categorical_crossentropy")
    weights = model.get_weights()
    model.compile(AccumulatingOptimizer("sgd", 2), "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match=rf"{says} micro-batches.*on_train_batch_end.*recompute.*weighting='"):
        model.fit(X, Y, batch_size=3, verbose=0, callbacks=[ExactAccumulation()])
    np.testing.assert_equal(model.get_weights(), weights)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with microbatch(model, 3, weighting="examples"), pytest.warns(UserWarning, match=says):
        model.fit(X, Y, verbose=0)


X, Y = np.random.default_rng(0).normal(size=(6, 4)).astype("float32"), np.array([0, 1] * 3)
MIXING = [
    (
        lambda: sequential(MinusBatchMean(name="mixes")),
        "sparse_categorical_crossentropy",
        "The output of 'mixes' for one example depends on the others",
    ),
    (sequential, keras.losses.Circle(), "The loss 'circle' compares examples"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "loss", "says"), MIXING)
def test_who_is_refused(make, loss, says):
    model = make()
    model.compile(AccumulatingOptimizer("sgd", 2), loss)
    with pytest.raises(ValueError, match=rf"{says}.*write AccumulatingOptimizer\(..., weighting='uniform'\)"):
        model.fit(X, Y, batch_size=3, verbose=0, callbacks=[ExactAccumulation()])
    model.compile("sgd", loss)
    wrapped = wrap(make())
    wrapped.compile("sgd", loss)
    with pytest.raises(
        ValueError, match="The (output of 'mixes'|value of the loss .*) for one example depends on the others"
    ):
        wrapped.fit(X, Y, verbose=0)


class Convolved(layers.Layer):
    """What the nodes of a graph send each other, of which a batch has all."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, name="of_nodes")

    def build(self, shapes):
        self.dense.build(shapes[0])

    def compute_output_shape(self, shapes):
        return shapes[0][0], 3

    def call(self, inputs):
        nodes, adjacency = inputs
        return self.dense(ops.matmul(adjacency, nodes))


class OwnStep(keras.Model):
    def train_step(self, data):
        (nodes, adjacency), y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self([nodes, adjacency]))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def graph_of(rows, kind=keras.Model):
    """A model of graphs, and a batch that is one, with this many rows or an unknown number."""
    inputs = [keras.Input((4,)), keras.Input((rows,))]
    model = kind(inputs, Convolved()(inputs))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    shapes = (tf.TensorSpec((rows, 4)), tf.TensorSpec((rows, rows))), tf.TensorSpec((rows,), "int64")
    return model, tf.data.Dataset.from_generator(lambda: iter([((X, np.eye(6)), Y)]), output_signature=shapes)


@pytest.mark.parametrize(("rows", "kind"), [(6, keras.Model), (None, keras.Model), (6, OwnStep)])
def test_rows_that_are_no_examples_are_taken_together(rows, kind):
    """The layer that sends between nodes is entered, and the one within it divided."""

    def trained(size):
        keras.utils.set_random_seed(0)
        model, data = graph_of(rows, kind)
        with microbatch(model, size) if size else contextlib.nullcontext():
            model.fit(data, shuffle=False, verbose=0)
        return model.get_weights()

    for one, other in zip(trained(4), trained(None), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_an_error_of_the_models_own_is_not_explained_by_parts():
    class Fails(layers.Layer):
        def call(self, inputs):
            return ops.matmul(inputs, ops.ones((5, 5)))

        def compute_output_shape(self, shape):
            return shape

    model = sequential(Fails())
    model.compile("sgd", "sparse_categorical_crossentropy")
    with microbatch(model, 3), pytest.raises(ValueError, match="Dimensions must be equal"):
        model.fit(X, Y, batch_size=6, verbose=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "loss", "says"), MIXING)
def test_what_it_names_instead(make, loss, says):
    model = make()
    # Tracing takes longer than a step or two.
    model.compile(AccumulatingOptimizer("sgd", 2, weighting="uniform"), loss, run_eagerly=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* weights all parts equally")
        model.fit(X, Y, batch_size=3, verbose=0, callbacks=[ExactAccumulation()])
    model.compile("sgd", loss, run_eagerly=True)
    with microbatch(model, 3, weighting="examples"), pytest.warns(UserWarning, match=says):
        model.fit(X, Y, verbose=0)


class Tracked(keras.Sequential):
    """Keeps metrics of its own, as a variational autoencoder does."""

    def __init__(self):
        super().__init__([keras.Input((4,)), layers.Dense(1)])
        self.of_batches, self.of_examples = keras.metrics.Mean("of_batches"), keras.metrics.Mean("of_examples")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = ops.mean(ops.square(y_pred - ops.cast(ops.reshape(y, (-1, 1)), "float32")), -1)
        self.of_examples.update_state(losses)
        loss = ops.mean(losses)
        self.of_batches.update_state(loss)
        return loss


def test_metrics_of_the_models_own():
    model = Tracked()
    model.compile("sgd", run_eagerly=True)
    with microbatch(model, 5, weighting="examples"), pytest.warns(UserWarning, match="metrics of_batches, which"):
        history = model.fit(X, Y, batch_size=len(X), verbose=0).history
    np.testing.assert_allclose(history["of_examples"], history["loss"], rtol=1e-6)


@pytest.mark.long
@pytest.mark.own_process
def test_on_replicas(mirrored):
    dist = DistributedFit(mirrored)

    def fit(make, loss="sparse_categorical_crossentropy", metrics=(), dist=dist):
        with dist.scope():
            model = make()
            # All but one without a graph, as tracing each replica takes longer than a step.
            eagerly = make is not MIXING[0][0]
            model.compile("sgd", loss, metrics=[metric() for metric in metrics], run_eagerly=eagerly)
        dist.fit(model, X, Y, verbose=0)
        return dist, model

    for make, loss, says in MIXING:
        with pytest.raises(ValueError, match=rf"{says}.*write DistributedFit\(..., exact=False\)"):
            fit(make, loss)
        with dist.scope():
            model = make()
            model.compile("sgd", loss, run_eagerly=make is not MIXING[0][0])
        dist.prepare(model)
        with pytest.raises(ValueError, match=rf"{says}.*write DistributedFit\(..., exact=False\)"):
            model.evaluate(dist.dataset(X, Y), verbose=0)
    fit(*MIXING[1][:2], dist=DistributedFit(mirrored, exact=False))
    with pytest.raises(ValueError, match="maximum differ when a batch is split"):
        fit(sequential, metrics=[Maximum])
    with pytest.warns(UserWarning, match="parts of different sizes"):
        fit(sequential, metrics=[lambda: lambda y_true, y_pred: ops.mean(y_pred)])
    dist, model = fit(lambda: sequential(layers.BatchNormalization(synchronized=True), layers.Dropout(0.5)))
    with dist.scope():
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[Maximum()], run_eagerly=True)
    dist.prepare(model)
    with pytest.raises(ValueError, match="maximum differ when a batch is split"):
        model.evaluate(dist.dataset(X, Y), verbose=0)


class OwnLoss(keras.Model):
    def __init__(self, loss):
        super().__init__()
        self.dense, self.own_loss = layers.Dense(1), loss

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own_loss(y_pred)


class Adds(layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, inputs):
        self.add_loss(self.loss(inputs))
        return inputs


def refused_unless(is_right):
    says = "is not what the loss of .* is divided by. On 8 made-up rows"
    return contextlib.nullcontext() if is_right else pytest.raises(ValueError, match=says)


def mean_of_squares(values):
    return ops.mean(ops.square(values))


def sum_of_squares(values):
    return ops.sum(ops.square(values))


def square_of_mean(values):
    return ops.sum(ops.square(ops.mean(values, 0)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("loss", "is_right"), [(mean_of_squares, True), (sum_of_squares, False), (square_of_mean, False)]
)
@pytest.mark.parametrize("adds", [True, False])
def test_a_loss_that_is_not_divided_as_was_said(loss, is_right, adds):
    model = sequential(Adds(loss)) if adds else OwnLoss(loss)
    model.compile("sgd", "sparse_categorical_crossentropy" if adds else None, run_eagerly=True)
    with microbatch(model, 3, weighting="examples"), refused_unless(is_right):
        model.fit(X, Y, verbose=0)


class OfWords(keras.Model):
    """Averages over the words that are no padding, and predicts them all alike."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(2, 4, embeddings_initializer="zeros")
        self.logits = layers.Dense(2, kernel_initializer="zeros")

    def call(self, inputs):
        return self.logits(self.words(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        mask = ops.cast(x != 0, losses.dtype)
        return ops.sum(losses * mask) / ops.sum(mask)


def visible():
    model = sequential()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"))
    return model, (X, Y, np.arange(6.0))


def invisible():
    model = OfWords()
    model.compile("sgd")
    return model, (np.arange(24).reshape(6, 4) % 2, np.ones((6, 4), "int32"))


class Variational(keras.Model):
    def __init__(self, generator):
        super().__init__()
        self.kernel, self.seed = layers.Dense(4), keras.random.SeedGenerator(1)
        self.generator = tf.random.Generator.from_seed(1) if generator else None

    def call(self, inputs):
        shape = ops.shape(inputs)
        noise = self.generator.normal(shape) if self.generator else keras.random.normal(shape, seed=self.seed)
        return self.kernel(inputs) + 0.1 * noise

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(x - y_pred))


def random_loss(generator=False):
    model = Variational(generator)
    model.compile("sgd")
    return model, (X, X)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "weighting", "is_right"),
    [
        (visible, "examples", False),
        (visible, "sample_weight", True),
        (invisible, "examples", False),
        (random_loss, "examples", True),
        (random_loss, "sum", False),
    ],
)
def test_a_weighting_that_is_not_the_losss(make, weighting, is_right):
    model, data = make()
    with microbatch(model, 3, weighting=weighting), refused_unless(is_right):
        model.fit(*data[:2], sample_weight=(*data, None)[2], verbose=0)


def test_a_loss_that_cannot_be_tried(caplog):
    model, data = random_loss(generator=True)
    with microbatch(model, 3, weighting="sum"):
        model.fit(*data, verbose=0)
    assert "a state that is unknown to Keras" in caplog.text
    assert "not checked whether weighting='sum' is what the loss is divided by" in caplog.text
