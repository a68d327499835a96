"""`exact=False` takes the step of one device on batches that divide evenly: it changes no scale by itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit

draw = np.random.default_rng(0)
X, Y = (draw.normal(size=(16, width)).astype("float32") for width in (4, 3))


def mean(y, y_pred):
    return ops.mean(ops.square(y - y_pred))


def total(y, y_pred):
    return 0.05 * ops.sum(ops.square(y - y_pred))


class OwnMean(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return mean(y, y_pred)


class OwnAndKeras(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + mean(y, y_pred)


class SelfReducing(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return mean(y_true, y_pred)


def steps_with(loss):
    class OwnStep(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
            gradients = tape.gradient(value, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": value}

    return OwnStep


SUM = keras.losses.MeanSquaredError(reduction="sum")
CASES = {
    "own mean": (OwnMean, None, {}),
    "own and Keras's": (OwnAndKeras, "mse", {}),
    "loss with __call__": (keras.Sequential, SelfReducing(), {}),
    "Keras's mean": (keras.Sequential, "mse", {"kernel_regularizer": "l2"}),
    "Keras's sum": (keras.Sequential, SUM, {"kernel_regularizer": "l2"}),
    "own step": (steps_with(mean), None, {}),
    "own step of a sum": (steps_with(total), None, {}),
    "own step with Keras's loss": (steps_with(keras.losses.MeanSquaredError()), None, {}),
}


def trained(case, dist):
    kind, loss, layer = CASES[case]
    with dist.scope():
        keras.utils.set_random_seed(0)
        model = kind([keras.Input((4,)), layers.Dense(5, activation="tanh", **layer), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=False)
    return model, dist.fit(model, X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:With exact=False the loss of:UserWarning")
@pytest.mark.parametrize(
    "cases", [["own mean", "own step", "Keras's sum"], pytest.param(list(CASES), marks=pytest.mark.long)]
)
def test_it_is_the_step_of_one_device(cases):
    replicas = DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False, exact=False)
    for case in cases:
        (found, logs), (expected, shown) = trained(case, replicas), trained(case, DistributedFit("none"))
        assert largest_difference(found, expected) < 1e-6, case
        assert logs["loss"] == pytest.approx(shown["loss"], rel=2e-6), case


def test_a_loss_that_may_be_a_sum_is_warned_of():
    with pytest.warns(UserWarning, match="exact=False the loss of .* is divided by the number of replicas"):
        trained("own mean", DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False, exact=False))
