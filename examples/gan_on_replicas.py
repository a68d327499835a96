"""Trains a GAN on two devices and in slices, each with the weights that one device ends with; a minute or two on a CPU.

Its `train_step` has two optimizers, of which the second reads what the first has written. The picture shows digits that
the three generators draw from the same noise.

    python examples/gan_on_replicas.py --picture gan.png
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_paragrad import DistributedFit, microbatch

NOISE, BATCH = 16, 97
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--picture", help="a PNG file of drawn digits")
    options = parser.parse_args()
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    real = (load_digits().data / 16).astype("float32")
    noise = np.random.default_rng(0).normal(size=(len(real), NOISE)).astype("float32")
    arguments = {"batch_size": BATCH, "epochs": options.epochs, "shuffle": False, "verbose": 0}

    alone = build()
    alone.fit(real, noise, **arguments)
    print("One device has trained.", flush=True)

    sliced = build()
    with microbatch(sliced, size=20):
        sliced.fit(real, noise, **arguments)
    print("Slices of 20 images have trained.", flush=True)

    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        spread = build()
    dist.fit(spread, real, noise, **arguments)
    print("Two devices have trained.", flush=True)

    models = {"one device": alone, "slices of 20": sliced, "two devices": spread}
    for name, model in models.items():
        pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
        difference = max(float(np.abs(one - other).max()) for one, other in pairs)
        print(f"{name:>12}: weights differ from those of one device by at most {difference:.1e}")
    if options.picture:
        _draw(models, noise[:10], options.picture)


def _draw(models, noise, path):
    """Writes a row of images for each model, eight times as large."""
    rows = [np.hstack(np.reshape(model.generator(noise), (-1, 8, 8))) for model in models.values()]
    pixels = np.kron(np.vstack(rows), np.ones((8, 8)))[..., None]
    tf.io.write_file(path, tf.io.encode_png(tf.cast(255 * (1 - pixels), tf.uint8)))
    print(f"{path}: digits that each draws from the same noise, in the order above.")


if __name__ == "__main__":
    main()
