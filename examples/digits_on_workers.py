"""Trains a digit classifier on every process that it is started in, and compares with Keras alone in one process.

Two processes that train together:

    python -m keras_paragrad launch --workers 2 examples/digits_on_workers.py

`python examples/digits_on_workers.py` trains in one. The picture shows the loss of each epoch, of all processes and of
Keras alone. It takes half a minute on two CPU cores.
"""

from _example import lines, options, require, save

require("sklearn", "matplotlib")

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_paragrad import DistributedFit

BATCH, EPOCHS = 100, 5


def build() -> keras.Model:
    """A small classifier."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="silu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, and prints what can be compared."""
    # Waits for the other workers; must come before TensorFlow does anything else.
    dist = DistributedFit()
    given = options(__doc__, takes="half a minute", chief=dist.is_chief)
    epochs = 2 if given.short else EPOCHS
    digits = load_digits()
    images, labels = (digits.data / 16).astype("float32"), digits.target
    # 1797 images in batches of 100: the last batch of an epoch has 97, and two workers take 49 and 48 of them.
    arguments = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 2 if dist.is_chief else 0}
    with dist.scope():
        model = build()
    history = dist.fit(model, images, labels, **arguments).history
    if not dist.is_chief:
        return
    print("Keras alone, in one process:", flush=True)
    alone = build()
    expected = alone.fit(images, labels, **arguments).history
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    difference = max(float(np.abs(one - other).max()) for one, other in pairs)
    workers = dist.plan.replicas.value
    here = f"{workers} process{'es' if workers > 1 else ''}"
    title = f"The digits' loss: {here}, and Keras alone"
    epochs_shown = [str(number + 1) for number in range(epochs)]
    series = {"Keras alone": expected["loss"], here: history["loss"]}
    save(
        lines(title, ("epoch", epochs_shown), "loss", series, "{:.2f}"),
        given.folder / "loss.png",
        f"replicas: {workers}, accuracy: {history['accuracy'][-1]:.4f}. After {epochs} epochs the weights differ from "
        f"those of Keras in one process by at most {difference:.1e}.",
    )


if __name__ == "__main__":
    main()
