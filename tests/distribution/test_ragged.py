"""Ragged inputs and outputs on two replicas, one of which gets no row of the last batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit

ROWS = tf.ragged.constant([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [], [8.0, 9.0], [1.0], [2.0, 2.0]])
MATRICES = tf.RaggedTensor.from_row_lengths(tf.reshape(tf.range(44, dtype="float32"), (22, 2)), [3, 4, 1, 0, 7, 5, 2])


class Sum(keras.layers.Layer):
    def call(self, inputs):
        sums = tf.reduce_sum(inputs, axis=1)
        return tf.reshape(sums, (-1, 1)) if inputs.shape.rank == 2 else sums


class Double(keras.layers.Layer):
    def call(self, inputs):
        return inputs * 2.0


def summing():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([Sum(), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=False)
    return model


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("rows", [pytest.param(ROWS, id="rows"), pytest.param(MATRICES, id="matrices")])
def test_ragged_inputs(mirrored, rows):
    data = tf.data.Dataset.from_tensor_slices((rows, np.arange(7.0, dtype="float32")[:, None])).batch(3)
    plain, options = summing(), {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(data, validation_data=data, **options).history
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        ours = summing()
    dist.prepare(ours)
    history = ours.fit(data, validation_data=data, **options).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    assert largest_difference(ours, plain) < 1e-6
    # A part without rows that has inner dimensions can't be handed to Python: TensorFlow has lost them.
    even = data.unbatch().batch(4)
    np.testing.assert_allclose(ours.predict(even, verbose=0), plain.predict(even, verbose=0), rtol=1e-5)


@pytest.mark.long
@pytest.mark.own_process
def test_ragged_outputs(mirrored):
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        model = keras.Sequential([Double()])
        model.compile()
    dist.prepare(model)
    predicted = model.predict(tf.data.Dataset.from_tensor_slices(ROWS).batch(3), verbose=0)
    assert isinstance(predicted, tf.RaggedTensor)
    assert predicted.to_list() == (ROWS * 2.0).to_list()
