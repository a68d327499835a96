"""The lines that an error says to write do what it says, for whatever optimizer is there."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_paragrad
from keras_paragrad import ExactAccumulation

X, Y = np.ones((12, 4), "float32"), np.ones((12, 1), "float32")


def lines_of(error):
    return str(error.value).split(":\n", 1)[1]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: "rmsprop",
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
        lambda: keras.optimizers.Adam(name="of_mine"),
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()),
        lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD())),
    ],
)
def test_one_optimizer(make):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(make(), "mse")
    inner = model.optimizer
    with pytest.raises(ValueError, match="Write this before fit") as error:
        model.fit(X, Y, verbose=0, callbacks=[ExactAccumulation()])
    exec(lines_of(error), {"keras": keras, "keras_paragrad": keras_paragrad, "model": model})
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[ExactAccumulation()])
    assert model.optimizer.inner_optimizer is getattr(inner, "inner_optimizer", inner)
    assert int(model.optimizer.iterations) == 1


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
    with pytest.raises(ValueError, match="Write this before fit") as error:
        model.fit(X, Y, verbose=0, callbacks=[ExactAccumulation()])
    exec(lines_of(error), {"keras": keras, "keras_paragrad": keras_paragrad, "model": model})
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[ExactAccumulation()])
    assert int(model.optimizer.iterations) == 1


class Listed(Adversarial):
    """Keeps its optimizers in a dictionary of lists."""

    def compile(self, *optimizers):
        keras.Model.compile(self, run_eagerly=True)
        self.optimizers = {"both": list(optimizers)}

    d_optimizer = property(lambda self: self.optimizers["both"][0])
    g_optimizer = property(lambda self: self.optimizers["both"][1])


def test_accumulating_optimizers_that_compile_was_not_given():
    """No callback of ours takes them, so none is recommended."""
    model = Listed()
    model.compile(*(keras_paragrad.AccumulatingOptimizer("sgd", 2, name=name) for name in ("of_d", "of_g")))
    with pytest.raises(ValueError, match="updates weights with other optimizers"):
        model.fit(X, verbose=0, callbacks=[ExactAccumulation()])
    with pytest.warns(UserWarning, match="of_d, which Listed isn't compiled with, .*microbatch") as warned:
        model.fit(X, batch_size=6, verbose=0)
    assert not any("callbacks=[" in str(each.message) for each in warned)


def test_several_optimizers():
    model = Adversarial()
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD())
    with pytest.raises(ValueError, match="updates weights with other optimizers") as error:
        model.fit(X, verbose=0, callbacks=[ExactAccumulation()])
    exec(lines_of(error), {"keras_paragrad": keras_paragrad, "model": model})
    model.fit(X, batch_size=8, epochs=2, verbose=0)
    updates = 2 * -(-len(X) // 8)
    assert [int(each.iterations) for each in (model.d_optimizer, model.g_optimizer)] == [updates, updates]
