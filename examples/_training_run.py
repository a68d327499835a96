"""One training of the digits demo, in a process of its own so that its time and its peak memory are its own."""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from keras_paragrad import AccumulatingOptimizer, DistributedFit

SEED = 0


class Reporter(keras.callbacks.Callback):
    """Counts the batches of a training, and prints a line of JSON as each epoch ends."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        """Counts the batch."""
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        """Tells the demo how far the training is."""
        print(json.dumps({"epoch": epoch + 1, "accuracy": logs["val_accuracy"]}), flush=True)


def digits():
    """The images and labels to train on, and those to validate with."""
    data = load_digits()
    order = np.random.default_rng(SEED).permutation(len(data.target))
    images = (data.images[order, :, :, np.newaxis] / 16).astype("float32")
    labels = data.target[order]
    training = len(labels) * 4 // 5
    return (images[:training], labels[:training]), (images[training:], labels[training:])


def convolutional_model():
    """A small classifier, the same function of an image whatever batch that is in."""
    # Enlarged images, so that what a batch takes is seen beside what TensorFlow takes by itself. Nothing here has a
    # kink or a tie, as ReLU and max-pooling have: an image that rounding moves across one moves the weights by much
    # more than the rounding, even if only the order of the images in a batch is changed.
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.UpSampling2D(4),
            keras.layers.Conv2D(32, 3, padding="same"),
            keras.layers.GroupNormalization(8),
            keras.layers.Activation("silu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(64, 3, padding="same"),
            keras.layers.GroupNormalization(8),
            keras.layers.Activation("silu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def distributed(replicas):
    """A `DistributedFit` on so many devices: this processor, as it is or divided."""
    if replicas == 1:
        return DistributedFit(strategy="none")
    parts = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    return DistributedFit(devices=[f"CPU:{index}" for index in range(replicas)])


def compiled(dist, steps):
    """The classifier, to be updated once for every `steps` batches."""
    keras.utils.set_random_seed(SEED)
    with dist.scope():
        adam = keras.optimizers.Adam(1e-3)
        model = convolutional_model()
        model.compile(
            AccumulatingOptimizer(adam, steps=steps) if steps > 1 else adam,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def train(batch_size, steps, replicas, epochs, folder):
    """Trains with one update for every `steps` batches, and returns the model and its results."""
    dist = distributed(replicas)
    (folder / "explanation.txt").write_text(str(dist.explain()) + "\n")
    model = compiled(dist, steps)
    training, validation = digits()
    reporter = Reporter()
    loaded = peak_megabytes()
    began = time.perf_counter()
    history = dist.fit(
        model,
        *training,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        validation_data=validation,
        callbacks=[keras.callbacks.TensorBoard(folder), reporter],
        verbose=0,
    )
    return model, {
        "accuracy": history.history["val_accuracy"][-1],
        "updates": int(model.optimizer.iterations.numpy()),
        "batches": reporter.batches,
        "seconds": time.perf_counter() - began,
        "peak_megabytes": peak_megabytes(),
        "megabytes_of_training": peak_megabytes() - loaded,
    }


def peak_megabytes():
    """The most memory that this process has held at any time."""
    # macOS counts in bytes and Linux in KiB. On Linux the count begins with what the parent held when it started this
    # process, so the parent must not load TensorFlow.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main():
    """Trains as the command line says, and leaves the weights and the results in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="how many batches an update takes")
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    # The shortened multiplications of recent GPUs would drown the rounding that is measured here.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    model, results = train(**vars(arguments))
    np.savez(arguments.folder / "weights.npz", *model.get_weights())
    (arguments.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
