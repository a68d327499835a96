"""What a custom `train_step` takes in slices: beside Keras's step, and a GAN's two updates beside each update alone.

`python benchmarks/custom_steps.py` prints the tables and saves them in `results/custom_steps.json`.
"""

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# As `harness` does, which is imported after TensorFlow here.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import tensorflow as tf
from harness import report_step_times

from keras_paragrad import microbatch

ROWS, SIZE, ROUNDS, STEPS, NOISE = 512, 64, 9, 5, 64
layers, ops = keras.layers, keras.ops


class OwnStep(keras.Sequential):
    """Does what Keras's step does."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


# By name: the class, and whether batches are cut.
KINDS = {
    "Keras's step, whole batch": (keras.Sequential, False),
    "Keras's step in slices": (keras.Sequential, True),
    "own step, whole batch": (OwnStep, False),
    "own step in slices": (OwnStep, True),
}


def step_of(case, jit_compile):
    """The compiled classifier of a case, and the arrays of a batch."""
    kind, sliced = KINDS[case]
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(512, activation="relu") for _ in range(3)]
    model = kind([keras.Input((784,)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit_compile)
    if sliced:
        microbatch(model, SIZE)
    generator = np.random.default_rng(0)
    return model, generator.normal(size=(ROWS, 784)).astype("float32"), generator.integers(0, 10, ROWS)


class Gan(keras.Model):
    """A GAN whose step updates the parts named in `passes`: the discriminator, then the generator, or one alone."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes
        hidden = [[layers.Dense(512, activation="silu") for _ in range(2)] for _ in range(2)]
        self.generator = keras.Sequential([keras.Input((NOISE,)), *hidden[0], layers.Dense(784, activation="sigmoid")])
        self.discriminator = keras.Sequential([keras.Input((784,)), *hidden[1], layers.Dense(1)])

    def compile(self, **options):
        super().compile(**options)
        self.optimizers = {name: keras.optimizers.Adam(1e-4) for name in self.passes}

    def train_step(self, data):
        real, noise = data
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        logs = {}
        for name in self.passes:
            with tf.GradientTape() as tape:
                fake = self.discriminator(self.generator(noise))
                if name == "generator":
                    loss = entropy(ops.ones_like(fake), fake)
                else:
                    true = self.discriminator(real)
                    loss = entropy(ops.ones_like(true), true) + entropy(ops.zeros_like(fake), fake)
            weights = getattr(self, name).trainable_weights
            self.optimizers[name].apply(tape.gradient(loss, weights), weights)
            logs[name] = loss
        return logs


# By name: whose weights a step updates, and whether batches are cut.
PASSES = {
    "both, whole batch": (("discriminator", "generator"), False),
    "discriminator alone": (("discriminator",), True),
    "generator alone": (("generator",), True),
    "both, in slices": (("discriminator", "generator"), True),
}
ALONE = ("discriminator alone", "generator alone")


def gan_of(case, jit_compile):
    """The compiled GAN of a case, and the arrays of a batch."""
    passes, sliced = PASSES[case]
    keras.utils.set_random_seed(0)
    model = Gan(passes)
    model.compile(jit_compile=jit_compile)
    if sliced:
        microbatch(model, SIZE)
    generator = np.random.default_rng(0)
    return model, *(generator.uniform(size=(ROWS, width)).astype("float32") for width in (784, NOISE))


if __name__ == "__main__":
    slices = f"Adam, batch of {ROWS}, slices of {SIZE}"
    times = functools.partial(report_step_times, "custom_steps", rounds=ROUNDS, steps=STEPS)
    times(f"MLP 784-512-512-512-10, {slices}", step_of, KINDS, "Keras's step in slices", "Keras's in slices")
    times(f"GAN of two MLPs, {slices}", gan_of, PASSES, ALONE, "the passes alone")
