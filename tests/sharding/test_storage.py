"""Variables in shards: cut, created, read, saved, and refused where they would be taken for whole ones."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras.src.utils import tracking
from oracles.transforms import shifted

from keras_paragrad import DistributedFit, GradientNoiseScale, GradientTelemetry, microbatch
from keras_paragrad.engine.step import gradient
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage import regathering
from keras_paragrad.storage import sharded as sharded_module
from keras_paragrad.storage.model_variables import rename_keys
from keras_paragrad.storage.sharded import sharded_value
from keras_paragrad.storage.sharding import Partition

X = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")
Y = X[:, :3] ** 2
DEVICES = ["CPU:0", "CPU:1"]
BOTH = pytest.mark.parametrize("shard", ["optimizer", "parameters"])


@given(st.lists(st.integers(1, 40), min_size=0, max_size=4), st.integers(1, 5))
def test_shards_joined_are_the_whole(shape, shards):
    partition = Partition.of(shape, shards)
    whole = np.random.default_rng(0).normal(size=shape).astype("float32")
    parts = [partition.shard(whole, index) for index in range(shards)]
    assert {part.shape[0] for part in parts} == {partition.size}
    np.testing.assert_array_equal(partition.whole(np.concatenate(parts)), whole)
    if partition.rows:
        assert partition.rows * shards - shape[0] < max(shards, partition.rows)


def sharded(shard="parameters", **options):
    return DistributedFit("mirrored", DEVICES, jit=False, shard=shard, min_shard_bytes=64, **options)


class Looking(keras.Sequential):
    """Looks up rows, some of them several times."""

    def __init__(self):
        super().__init__([keras.Input((4,), dtype="int32"), keras.layers.Embedding(40, 8), keras.layers.Dense(1)])


def made(optimizer=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(20, "tanh"), keras.layers.Dense(3)])
    model.compile(optimizer or keras.optimizers.Adam(0.01, epsilon=1e-2, use_ema=True, ema_momentum=0.5), "mse")
    return model


def values(variables):
    return [np.asarray(variable.numpy()) for variable in variables]


def assert_same(ours, theirs, tolerance=0.0):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.own_process
@BOTH
def test_each_replica_holds_its_shard_of_what_one_device_would_draw(shard):
    alone = made()
    dist = sharded(shard)
    with dist.scope():
        model = made()
        model.optimizer.build(model.trainable_variables)
    assert_same(model.get_weights(), alone.get_weights())
    kernel = sharded_value(model.layers[0].kernel)
    assert [part.shape for part in kernel.values] == [(160,), (160,)]
    assert (kernel.copies is None) == (shard == "parameters")
    with DistributedFit(dist.strategy).scope():
        assert sharded_value(made().layers[0].kernel) is None
    # The small bias stays whole, and so do its slots.
    assert sharded_value(model.layers[1].bias) is None
    slots = [variable for variable in model.optimizer.variables if sharded_value(variable)]
    assert len(slots) == 3 * 3
    assert all(sharded_value(slot).copies is None for slot in slots)


@pytest.mark.few(1)
@pytest.mark.own_process
@BOTH
def test_files_are_those_of_whole_variables(shard, tmp_path):
    dist = sharded(shard)
    with dist.scope():
        model = made()
    dist.fit(model, X, Y, batch_size=8, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))

    def restored(target):
        target.optimizer.build(target.trainable_variables)
        tf.train.Checkpoint(model=target, optimizer=target.optimizer).restore(path).assert_existing_objects_matched()
        return target

    alone = [keras.models.load_model(tmp_path / "model.keras"), restored(made())]
    with dist.scope():
        again = [keras.models.load_model(tmp_path / "model.keras"), restored(made())]
    assert sharded_value(again[0].layers[0].kernel) is not None
    for other in (*alone, *again):
        assert_same(values(other.variables), values(model.variables))
        assert_same(values(other.optimizer.variables), values(model.optimizer.variables))
    with pytest.raises(ValueError, match="SavedModel can't hold variables in shards"):
        model.export(tmp_path / "exported", verbose=False)
    with dist.scope():
        third = made()
        third.optimizer.build(third.trainable_variables)
    third.load_weights(tmp_path / "model.weights.h5")
    third.set_weights([weight + 1 for weight in third.get_weights()])
    assert_same(third.get_weights(), [weight + 1 for weight in model.get_weights()])
    model.set_weights(third.get_weights())
    # Tracing takes longer than predicting once.
    model.run_eagerly = third.run_eagerly = True
    np.testing.assert_allclose(model.predict(X, verbose=0), third.predict(X, verbose=0), atol=1e-6)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


@pytest.mark.few(0, "optimizer")
@pytest.mark.own_process
@BOTH
def test_telemetry_and_transforms_see_whole_gradients(shard, tmp_path):
    found = []
    for dist in (None, sharded(shard)):
        telemetry = GradientTelemetry(tmp_path / str(dist is None), every=1)
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.1)
        if dist is None:
            model = made(optimizer)
            model.run_eagerly = True
        else:
            with dist.scope():
                model = made(keras.optimizers.SGD(0.1, global_clipnorm=0.1))
        StepBuilder.of(model).fill(transform=shifted)
        fit = functools.partial(dist.fit, model) if dist else model.fit
        fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[telemetry])
        found.append((model.get_weights(), [vector for vector, _ in telemetry._recent]))
    assert_same(found[1][0], found[0][0], 1e-6)
    assert_same(found[1][1], found[0][1], 1e-5)


@pytest.mark.own_process
def test_the_backward_pass_gathers_weights_again(monkeypatch):
    gathered, losses = [], []
    record_gather, regather = regathering.record_gather, gradient.regather_in_backward
    monkeypatch.setattr(sharded_module, "record_gather", lambda *found: (gathered.append(found), record_gather(*found)))
    monkeypatch.setattr(gradient, "regather_in_backward", lambda loss: (losses.append(loss), regather(loss))[1])
    dist = sharded()
    with dist.scope():
        inputs = keras.Input((8, 16))
        tied = keras.layers.Dense(16, "tanh", kernel_regularizer="l2")
        hidden = keras.layers.Conv1D(16, 3, padding="same")(tied(tied(inputs)))
        model = keras.Model(inputs, keras.layers.EinsumDense("abc,cd->abd", (8, 16))(hidden))
        model.compile("sgd", "mse")
    dist.fit(model, np.ones((8, 8, 16)), np.ones((8, 8, 16)), batch_size=8, verbose=0)
    graph = losses[0].graph
    places = {operation.name: place for place, operation in enumerate(graph.get_operations())}
    kernels = [sharded_value(layer.kernel) for layer in model.layers if layer.weights]
    for loss in losses:
        ends = places[loss.op.name]
        for kernel in kernels:
            mine = [each for storage, _, each in gathered if storage is kernel and each.device == loss.device]
            forward_pass = [each for each in mine if places[each.op.name] < ends]
            used = [use for each in forward_pass for use in each.consumers() if not use.type.startswith("Shape")]
            assert used
            assert all(places[use.name] < ends for use in used)
            again = [each for each in mine if places[each.op.name] > ends]
            assert 0 < len(again) <= len(forward_pass)
            assert all(each.consumers() for each in again)
            # Not before the backward pass has come to it.
            assert all(any(places[each.name] >= ends for each in waited_for(tensor)) for tensor in again)


def waited_for(tensor):
    """The operations that reading the shard of a gathered tensor waits for."""
    found, left = [], [tensor.op]
    while left:
        operation = left.pop()
        found += operation.control_inputs
        left += [each.op for each in operation.inputs]
    return found


@pytest.mark.long
@pytest.mark.own_process
def test_gradients_of_looked_up_rows():
    rows = np.arange(32).reshape(8, 4) % 7
    found = []
    for dist in (None, sharded()):
        keras.utils.set_random_seed(0)
        with dist.scope() if dist else contextlib.nullcontext():
            model = Looking()
            model.compile(keras.optimizers.Adam(0.1, epsilon=1e-2, global_clipnorm=0.01), "mse")
        fit = functools.partial(dist.fit, model) if dist else model.fit
        # In slices the gradient of one device is dense too.
        with contextlib.nullcontext() if dist else microbatch(model, 4):
            fit(rows, np.ones((8, 4, 1)), batch_size=8, epochs=2, verbose=0)
        found.append(model.get_weights())
    assert_same(*found, 1e-6)
    # TensorFlow cancels the other replica, and may report that one.
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError), match="does not have|cancel"):
        fit(rows + 40, np.ones((8, 4, 1)), batch_size=8, verbose=0)


class Unbuilt(keras.Model):
    """Makes its weights in the first step, one of them in a loop."""

    def __init__(self):
        super().__init__()
        self.embedding, self.recurrent = keras.layers.Embedding(40, 8), keras.layers.GRU(8)

    def call(self, inputs):
        return self.recurrent(self.embedding(inputs))


@pytest.mark.long
@pytest.mark.own_process
def test_a_model_that_fit_builds():
    rows = np.arange(32).reshape(8, 4)
    found = []
    for dist in (None, sharded()):
        keras.utils.set_random_seed(0)
        with dist.scope() if dist else contextlib.nullcontext():
            model = Unbuilt()
            model.compile("sgd", "mse", run_eagerly=dist is None)
        (functools.partial(dist.fit, model) if dist else model.fit)(rows, np.ones((8, 8)), batch_size=8, verbose=0)
        found.append(model)
    assert all(sharded_value(variable) for variable in found[1].trainable_variables)
    assert_same(found[1].get_weights(), found[0].get_weights(), 1e-6)


class Centralized(keras.optimizers.SGD):
    """Looks at whole gradients where all optimizers are given them."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([each - keras.ops.mean(each) for each in grads], trainable_variables)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.own_process
def test_refusals():
    with pytest.raises(ValueError, match="needs two replicas"):
        DistributedFit("mirrored", ["CPU:0"], shard="parameters")
    with pytest.raises(ValueError, match="there are no replicas that could each hold a shard"):
        DistributedFit("one_device", shard="optimizer")
    with pytest.raises(ValueError, match="must be None, 'optimizer' or 'parameters'"):
        DistributedFit(shard="weights")
    dist = sharded(exact=False)
    with dist.scope():
        accumulating = made(keras.optimizers.SGD(gradient_accumulation_steps=2))
        observed = made("sgd")
        centralized = made(keras.optimizers.LossScaleOptimizer(Centralized(0.1)))
    with pytest.raises(ValueError, match="compile with AccumulatingOptimizer"):
        dist.prepare(accumulating)
    with pytest.raises(ValueError, match="Centralized.apply overrides Keras's, and would get shards"):
        dist.prepare(centralized)
    with pytest.raises(ValueError, match="looks at the gradients of each replica"):
        dist.fit(observed, X, Y, batch_size=8, verbose=0, callbacks=[GradientNoiseScale()])


@pytest.mark.own_process
def test_a_train_step_of_one_s_own_updates_shards_whatever_exact_says():
    def trained(dist):
        keras.utils.set_random_seed(0)
        with dist.scope():
            own = OwnStep([keras.Input((16,)), keras.layers.Dense(3)])
            own.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), "mse")
        dist.fit(own, X[:13], Y[:13], batch_size=8, shuffle=False, verbose=0)
        return own.get_weights()

    for ours, theirs in zip(trained(sharded(exact=False)), trained(DistributedFit("none")), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_an_optimizer_is_saved_after_its_keys_were_renamed(tmp_path):
    """As in the `build` of Keras 3.16, which Keras doesn't track, so that TensorFlow does."""
    optimizer = keras.optimizers.SGD()
    with tracking.DotNotTrackScope():
        optimizer.decays_by_key = {}
    optimizer.decays_by_key["old"] = True
    rename_keys(optimizer, {"old": "new"})
    assert dict(optimizer.decays_by_key) == {"new": True}
    assert tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "checkpoint"))
