"""A `train_step` of the model's own and a loss that compares examples, in slices, against whole batches."""

import keras
import numpy as np
import tensorflow as tf

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import difference
from gpu_parts.right import LIMIT, MICRO_BATCH, XLA
from keras_paragrad import microbatch

FEATURES, ROWS = 16, 4 * MICRO_BATCH - 3
cases = Cases()
layers = keras.layers


class Gan(keras.Model):
    """A generator and a discriminator that train by turns, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(32, activation="tanh"), layers.Dense(FEATURES)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(32, activation="tanh"), layers.Dense(1)]
        )
        self.optimizers = [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1)]

    def train_step(self, data):
        real, noise = data[0]
        generated = self.generator(noise, training=True)
        with tf.GradientTape() as tape:
            logits = self.discriminator(keras.ops.concatenate([real, generated]), training=True)
            truth = keras.ops.concatenate([keras.ops.ones_like(real[:, :1]), keras.ops.zeros_like(real[:, :1])])
            loss = keras.ops.mean(keras.losses.binary_crossentropy(truth, logits, from_logits=True))
        weights = self.discriminator.trainable_weights
        self.optimizers[0].apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            logits = self.discriminator(self.generator(noise, training=True), training=True)
            fooled = keras.ops.mean(
                keras.losses.binary_crossentropy(keras.ops.ones_like(logits), logits, from_logits=True)
            )
        weights = self.generator.trainable_weights
        self.optimizers[1].apply(tape.gradient(fooled, weights), weights)
        return {"discriminator": loss, "generator": fooled}


class PairLoss(keras.losses.Loss):
    """Two views of each example, side by side: each finds its own among those of the batch."""

    def call(self, y_true, y_pred):
        views = keras.ops.split(y_pred, 2, axis=-1)
        a, b = (view / keras.ops.norm(view, axis=-1, keepdims=True) for view in views)
        similarity = keras.ops.matmul(a, keras.ops.transpose(b)) / 0.5
        own = keras.ops.arange(keras.ops.shape(similarity)[0])
        return keras.losses.sparse_categorical_crossentropy(own, similarity, from_logits=True)


@cases("a GAN's own train_step in slices, uneven{}", variants=XLA)
def own_step(machine: Machine, jit: bool) -> Line:
    draw = np.random.default_rng(0)
    data = [draw.normal(size=(ROWS, width)).astype("float32") for width in (FEATURES, 4)]

    def weights(size: int | None) -> list[np.ndarray]:
        model = Gan()
        model.compile(jit_compile=jit)
        if size:
            microbatch(model, size)
        model.fit(data, batch_size=ROWS, epochs=3, verbose=0, shuffle=False)
        return [*model.generator.get_weights(), *model.discriminator.get_weights()]

    return check(difference(weights(MICRO_BATCH), weights(None)), LIMIT)


@cases("a loss that compares examples in slices, uneven{}", variants=XLA)
def comparing(machine: Machine, jit: bool) -> Line:
    x = np.random.default_rng(0).normal(size=(ROWS, 2, FEATURES)).astype("float32")

    def weights(size: int | None) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2, FEATURES))
        encoded = layers.Dense(8)(layers.Dense(32, activation="tanh")(inputs))
        model = keras.Model(inputs, layers.Flatten()(encoded))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), PairLoss(), jit_compile=jit)
        if size:
            microbatch(model, size)
        model.fit(x, np.zeros(ROWS, "float32"), batch_size=ROWS, epochs=3, verbose=0, shuffle=False)
        return model.get_weights()

    return check(difference(weights(MICRO_BATCH), weights(None)), LIMIT)
