"""What Keras trains though there is nothing to differentiate or to cut: the components train it as Keras does."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, GradientTelemetry, microbatch
from keras_paragrad.engine.training.builder import StepBuilder

X = np.random.default_rng(0).normal(size=(14, 5)).astype("float32")
Y = X[:, :2] - 1
NO_WEIGHTS = "does not have any trainable weights"


def make_frozen(optimizer="sgd", **mode):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer="ones")])
    model.trainable = False
    model.compile(optimizer, "mse", metrics=["mae"], **mode)
    return model


def fit(model, **arguments):
    with pytest.warns(UserWarning, match=NO_WEIGHTS):
        return model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0, **arguments).history


@functools.cache
def shown_by_keras():
    return fit(make_frozen(run_eagerly=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["slices", "one slice", "accumulation", "telemetry"])
def test_a_model_without_trainable_weights(way):
    model = make_frozen(AccumulatingOptimizer("sgd", steps=2) if way == "accumulation" else "sgd")
    callbacks = {"accumulation": [ExactAccumulation()], "telemetry": [GradientTelemetry()]}.get(way, [])
    size = {"slices": 3, "one slice": 7}.get(way)
    with microbatch(model, size) if size else contextlib.nullcontext():
        history = fit(model, callbacks=callbacks)
    for name, values in shown_by_keras().items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.long
@pytest.mark.own_process
def test_a_model_without_trainable_weights_on_replicas(mirrored):
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        model = make_frozen()
    dist.prepare(model)
    history = fit(model)
    for name, values in shown_by_keras().items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


class Lookup(keras.layers.Layer):
    """A linear layer of sparse inputs."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 2), initializer="ones")

    def call(self, inputs):
        if isinstance(inputs, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(inputs, self.kernel)
        return keras.ops.matmul(inputs, self.kernel)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [3, 7])
def test_slices_of_sparse_inputs(size):
    rows = X[:7] * (X[:7] > 0)

    def train(slices):
        model = keras.Sequential([keras.Input((5,), sparse=True), Lookup()])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not slices)
        data = tf.data.Dataset.from_tensors((tf.sparse.from_dense(rows), Y[:7]))
        with microbatch(model, size) if slices else contextlib.nullcontext():
            history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        return model, history["loss"]

    (sliced, losses), (whole, expected) = train(True), train(False)
    assert largest_difference(sliced, whole) < 1e-6
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 7])
def test_slices_of_sparse_inputs_build_a_model(size):
    def train(slices):
        model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not slices)
        rows = tf.sparse.from_dense(X[:6] * (X[:6] > 0))
        data = tf.data.Dataset.from_tensor_slices((rows, Y[:6])).batch(3)
        with microbatch(model, size) if slices else contextlib.nullcontext():
            model.fit(data, shuffle=False, verbose=0)
        return model

    assert largest_difference(train(True), train(False)) < 1e-6


# A state that no trial knows of, so that what the losses are divided by can't be tried.
ONE = tf.Variable(1.0)


def scalar_loss(y, y_pred):
    return ONE * keras.ops.mean(keras.ops.square(y - y_pred))


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return scalar_loss(y, y_pred)


class AddsLoss(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(ONE * keras.ops.mean(inputs))
        return inputs


INDIVISIBLE = {
    "compute_loss": lambda: (OwnLoss, "mse", []),
    "one number": lambda: (keras.Sequential, scalar_loss, []),
    "add_loss": lambda: (keras.Sequential, "mse", [AddsLoss()]),
}
WORDS = {"one number": "returns one number"}
MODES = {
    "plain": {},
    "xla": {"jit_compile": True},
    "several steps an execution": {"steps_per_execution": 2},
    "eager": {"run_eagerly": True},
}


def indivisible(name, **mode):
    kind, loss, layers = INDIVISIBLE[name]()
    dense = keras.layers.Dense(2, kernel_initializer="ones")
    model = kind([keras.Input((5,)), dense, *layers])
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["mae"], **mode)
    return model


def said_in(caplog):
    """What the package has logged, but for failed trials; TensorFlow may warn of retracing after other tests."""
    said = [record.getMessage() for record in caplog.records if record.name == "keras_paragrad"]
    return [each for each in said if not each.startswith("It was not checked")]


def batches(*sizes):
    """Batches whose sizes a graph does not know."""
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    signature = (tf.TensorSpec((None, 5)), tf.TensorSpec((None, 2)))
    data = tf.data.Dataset.from_generator(lambda: ((X[part], Y[part]) for part in rows), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(sizes)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "eager") for name in INDIVISIBLE),
        *(("one number", mode) for mode in ("plain", "xla")),
        ("one number", "several steps an execution"),
        # As those of one number are.
        *(pytest.param(name, "plain", marks=pytest.mark.long) for name in ("compute_loss", "add_loss")),
    ],
)
def test_what_can_not_be_weighed_is_computed_whole(name, mode):
    """Its calls of layers are divided."""
    plain, ours = indivisible(name, **MODES[mode]), indivisible(name, **MODES[mode])
    options = {"shuffle": False, "verbose": 0}
    microbatch(ours, 4)
    for sizes in ((4, 4, 3), (9, 5)):
        expected = plain.fit(batches(*sizes), epochs=2, **options).history
        history = ours.fit(batches(*sizes), epochs=2, **options).history
        for shown, values in expected.items():
            np.testing.assert_allclose(history[shown], values, rtol=2e-6, err_msg=shown)
    assert largest_difference(ours, plain) < 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "mode"), [*((name, "eager") for name in INDIVISIBLE), ("one number", "xla")])
def test_windows_of_one_batch_are_trained_whole(name, mode, caplog):
    plain, ours = indivisible(name, **MODES[mode]), indivisible(name, **MODES[mode])
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(batches(4, 3), **options).history
    arguments = {"loss": ours.loss, "metrics": ["mae"], **MODES[mode]}
    ours.compile(AccumulatingOptimizer(keras.optimizers.SGD(0.1), 1), **arguments)
    history = ours.fit(batches(4, 3), callbacks=[ExactAccumulation()], **options).history
    for shown, values in expected.items():
        np.testing.assert_allclose(history[shown], values, rtol=1e-6, err_msg=shown)
    assert largest_difference(ours, plain) < 1e-6
    assert not said_in(caplog)
    ours.compile(AccumulatingOptimizer(keras.optimizers.SGD(0.1), 2), **arguments)
    with pytest.raises(ValueError, match=WORDS.get(name, name)):
        ours.fit(batches(4, 3), callbacks=[ExactAccumulation()], **options)


@pytest.mark.filterwarnings("error")
def test_windows_of_one_batch_are_not_warned_of():
    model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile(AccumulatingOptimizer("sgd", 1), "mse", run_eagerly=True)
    model.fit(batches(4, 3), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])


def test_what_is_foreseen_is_not_run():
    """A loss that counts its calls counts those of the step alone."""
    calls = tf.Variable(0)

    def counted(y, y_pred):
        calls.assign_add(1)
        return scalar_loss(y, y_pred)

    for way in (lambda model: microbatch(model, 4), DistributedFit("none").prepare):
        calls.assign(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile("sgd", counted)
        way(model)
        model.fit(
            tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(4, drop_remainder=True), shuffle=False, verbose=0
        )
        assert int(calls) == 3


def test_a_window_of_one_slice_and_of_several():
    """Those of one slice count for their rows, as the others do."""

    def model_of(optimizer):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
        return model

    whole = model_of(keras.optimizers.SGD(0.1))
    whole.train_on_batch(X[:11], Y[:11])
    ours = model_of(AccumulatingOptimizer(keras.optimizers.SGD(0.1), 2))
    microbatch(ours, 4)
    ours.train_on_batch(X[:3], Y[:3])
    ours.train_on_batch(X[3:11], Y[3:11])
    assert largest_difference(ours, whole) < 1e-6


def test_divisible_models_are_trained_without_a_word(caplog):
    for way in (lambda model: microbatch(model, 4), DistributedFit("none").prepare):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        way(model)
        model.fit(batches(4, 3), shuffle=False, verbose=0)
        model.train_on_batch(X[:4], Y[:4])
    assert not said_in(caplog)


def test_what_is_not_cut_is_not_weighed():
    """A loss of one number can't be weighed, which a batch that is one slice does not need."""

    def train(slices):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred)))
        data = tf.data.Dataset.from_tensors((X, Y))
        with microbatch(model, 14) if slices else contextlib.nullcontext():
            model.fit(data, epochs=2, shuffle=False, verbose=0)
        return model

    assert largest_difference(train(True), train(False)) == 0


def test_other_batches_are_divided_anew():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    divisions = []
    with microbatch(model, 7):
        for batch_size in (7, 14):
            model.fit(X, Y, batch_size=batch_size, verbose=0)
            divisions.append(StepBuilder.of(model).describe_division())
    assert divisions[0].startswith("Nothing is divided") and divisions[1].startswith("A part weighs"), divisions
