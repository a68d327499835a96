"""Trains a GAN on two devices and in slices, each with the weights that one device ends with.

    python examples/gan_on_replicas.py

Its `train_step` has two optimizers, of which the second reads what the first has written. The picture shows what
the three generators draw from the same noise. It takes twenty seconds on two CPU cores.
"""

from _example import Progress, image_grid, options, require, save

require("sklearn", "matplotlib")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_paragrad import DistributedFit, microbatch

NOISE, BATCH, EPOCHS, DRAWN = 16, 97, 10, 8
layers, ops = keras.layers, keras.ops


class Gan(keras.Model):
    """Draws images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        hidden = [layers.Dense(128, activation="silu"), layers.Dense(64, activation="sigmoid")]
        self.generator = keras.Sequential([keras.Input((NOISE,)), *hidden])
        self.discriminator = keras.Sequential(
            [keras.Input((64,)), layers.Dense(128, activation="silu"), layers.Dense(1)]
        )

    def compile(self, d_optimizer, g_optimizer):
        """Compiles with an optimizer for each network."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        """Updates the discriminator, and then the generator by it."""
        real, noise = data
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            true, false = self.discriminator(real), self.discriminator(self.generator(noise))
            d_loss = entropy(ops.ones_like(true), true) + entropy(ops.zeros_like(false), false)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            false = self.discriminator(self.generator(noise))
            g_loss = entropy(ops.ones_like(false), false)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


def build():
    """A compiled model."""
    keras.utils.set_random_seed(0)
    model = Gan()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), keras.optimizers.SGD(0.05, momentum=0.5))
    return model


def main():
    """Trains three times, compares the weights, and draws."""
    given = options(__doc__, takes="twenty seconds")
    epochs = 1 if given.short else EPOCHS
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    real = (load_digits().data / 16).astype("float32")
    noise = np.random.default_rng(0).normal(size=(len(real), NOISE)).astype("float32")
    batches = epochs * -(-len(real) // BATCH)
    arguments = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}

    alone = build()
    with Progress("one device", batches) as progress:
        alone.fit(real, noise, **arguments, callbacks=[progress.callback()])

    sliced = build()
    with Progress("slices of 20", batches) as progress, microbatch(sliced, size=20):
        sliced.fit(real, noise, **arguments, callbacks=[progress.callback()])

    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        spread = build()
    with Progress("two devices", batches) as progress:
        dist.fit(spread, real, noise, **arguments, callbacks=[progress.callback()])

    models = {"one device": alone, "slices of 20": sliced, "two devices": spread}
    differences = []
    for name, model in models.items():
        pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
        differences.append(max(float(np.abs(one - other).max()) for one, other in pairs))
        print(f"{name:>12}: weights differ from those of one device by at most {differences[-1]:.1e}")
    drawn = np.concatenate([np.reshape(model.generator(noise[:DRAWN]), (-1, 8, 8)) for model in models.values()])
    title = "Images drawn after training, from the same noise in each column"
    save(
        image_grid(title, drawn, [""] * len(drawn), columns=DRAWN, rows=list(models)),
        given.folder / "gan.png",
        f"In slices and on two devices, the GAN has the weights of one device to {max(differences):.1e}, and draws the "
        "same images.",
    )


if __name__ == "__main__":
    main()
