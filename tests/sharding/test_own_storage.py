"""A storage of one's own: the steps, the optimizers, the window and backups ask it, and know no more of it."""

import uuid

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation
from keras_paragrad.distribution import Backup
from keras_paragrad.distribution.checkpoint.files import BackupFiles
from keras_paragrad.storage.storage import Parts, Storage, storage_of

ASKED: list[str] = []


class Doubled(BaseResourceVariable):
    """Kept in float64, and read and assigned in float32."""

    def __init__(self, value):
        self.held = held = tf.Variable(value, dtype="float64")
        name = f"doubled_{uuid.uuid4().hex}"
        super().__init__(
            trainable=True, shape=held.shape, dtype=tf.float32, handle=held.handle, handle_name=name, unique_id=name
        )
        self.storage = InFloat64(self)

    def _read_variable_op(self, no_copy=False):
        @tf.custom_gradient
        def read(value):
            return tf.cast(value, "float32"), lambda gradient: gradient

        return read(self.held.read_value())

    def assign(self, value, use_locking=None, name=None, read_value=True):
        return self.held.assign(tf.cast(value, "float64"))

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        return self.held.assign_add(tf.cast(delta, "float64"))

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        return self.held.assign_sub(tf.cast(delta, "float64"))


class InFloat64(Storage):
    """Of a `Doubled`: it takes an optimizer's step itself, and is written to files in two parts."""

    @property
    def local(self):
        return self.variable

    def takes_steps_of(self, optimizer):
        return False

    def update(self, optimizer, gradient, learning_rate, after):
        ASKED.append("update")
        optimizer.update_step(tf.cast(gradient, "float32"), self.variable, learning_rate)
        return list(after)

    def parts(self, placement):
        ASKED.append("parts")
        flat = np.ravel(self.variable.numpy())
        size = -(-len(flat) // placement.replicas)
        return Parts(size, lambda: iter([np.resize(flat, size)]))


def trained(optimizer, *, doubled, epochs=2, callbacks=()):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    kernel = model.layers[0].kernel
    if doubled:
        kernel._value = Doubled(kernel.numpy())
    model.compile(optimizer, "mse", jit_compile=False)
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=(40, columns)).astype("float32") for columns in (6, 3))
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5)


def accumulating():
    return AccumulatingOptimizer(adam(), steps=4, tail="carry")


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "callbacks"),
    [
        *(pytest.param(each, (), marks=pytest.mark.long) for each in (adam, accumulating)),
        (accumulating, (ExactAccumulation,)),
    ],
)
def test_trains_as_any_other(tmp_path, optimizer, callbacks):
    def ending(doubled, epochs=2, directory=None):
        backups = [Backup(directory, delete_when_done=False)] if directory else []
        return trained(
            optimizer(), doubled=doubled, epochs=epochs, callbacks=[*(each() for each in callbacks), *backups]
        )

    plain = ending(False).get_weights()
    ASKED.clear()
    ours = ending(True)
    assert isinstance(storage_of(ours.layers[0].kernel), InFloat64)
    assert type(storage_of(ours.layers[1].kernel)) is Storage
    ending(True, 1, tmp_path)
    (path,) = BackupFiles(tmp_path, 2).paths()
    # What is whole, and shards.
    assert len(BackupFiles(tmp_path, 2).read(path).archives) == 2
    resumed = ending(True, 2, tmp_path)
    # A kernel kept in more digits rounds later.
    for found in (ours.get_weights(), resumed.get_weights()):
        for weight, expected in zip(found, plain, strict=True):
            np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert "parts" in ASKED
    # Keras's own step assigns what it updates.
    assert ("update" in ASKED) == (optimizer is accumulating)
