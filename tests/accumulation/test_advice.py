"""The lines that an error says to write do what it says, for whatever optimizer is there."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_paragrad
from keras_paragrad import ExactAccumulation

X, Y = np.ones((12, 4), "float32"), np.ones((12, 1), "float32")


def advised(error):
    """The callback that an error says to write."""
    return eval(str(error.value).rpartition("callbacks=[")[2].removesuffix("]."))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: "rmsprop",
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
        lambda: keras.optimizers.Adam(name="of_mine"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()),
        lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD())),
    ],
)
def test_one_optimizer(make):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(make(), "mse")
    own = model.optimizer
    with pytest.raises(ValueError, match="how many micro-batches an update takes") as error:
        model.fit(X, Y, verbose=0, callbacks=[ExactAccumulation()])
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[advised(error)])
    assert model.optimizer is own
    assert int(own.iterations) == 1


def test_keras_own_accumulation_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2), "mse")
    with pytest.raises(ValueError, match="accumulated twice. Remove that, and write steps= here"):
        model.fit(X, Y, verbose=0, callbacks=[ExactAccumulation(steps=4)])


class Adversarial(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = keras.layers.Dense(4), keras.layers.Dense(1)
        self.generator.build((None, 4))
        self.discriminator.build((None, 4))
        self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            fake = self.discriminator(self.generator(data))
            g_loss, d_loss = -tf.reduce_mean(fake), tf.reduce_mean(fake - self.discriminator(data))
        for layer, loss, optimizer in (
            (self.discriminator, d_loss, self.d_optimizer),
            (self.generator, g_loss, self.g_optimizer),
        ):
            weights = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"d_loss": d_loss}


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_a_step_with_the_models_own_optimizer():
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="how many micro-batches an update takes") as error:
        model.fit(X, Y, verbose=0, callbacks=[ExactAccumulation()])
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[advised(error)])
    assert int(model.optimizer.iterations) == 1


def test_several_optimizers():
    model = Adversarial()
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD())
    with pytest.raises(ValueError, match="updates weights with other optimizers") as error:
        model.fit(X, verbose=0, callbacks=[ExactAccumulation()])
    exec(str(error.value).split(":\n", 1)[1], {"keras_paragrad": keras_paragrad, "model": model})
    model.fit(X, batch_size=8, epochs=2, verbose=0)
    updates = 2 * -(-len(X) // 8)
    assert [int(each.iterations) for each in (model.d_optimizer, model.g_optimizer)] == [updates, updates]
