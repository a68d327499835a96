"""Trains a classifier of handwritten digits with differential privacy, for several values of epsilon.

    python examples/private_digits.py

Prints the accuracy on held-out rows for each epsilon, and the statement of the last one. The picture shows how the
accuracy grows with epsilon, beside that of training without privacy. It takes about a minute on two CPU cores.
"""

from _example import Progress, lines, options, require, save

require("sklearn", "matplotlib", "dp_accounting")

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_paragrad.privacy import make_private

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
EPOCHS, BATCH_SIZE, DELTA, CLIP_NORM, HELD_OUT = 30, 256, 1e-4, 1.0, 360


def load() -> tuple[np.ndarray, np.ndarray]:
    """The images, scaled by a constant and not by statistics of the data, and their labels; shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16 - 0.5).astype("float32").reshape(-1, 8, 8, 1), labels[order]


def build() -> keras.Model:
    """A small network with bounded activations, which train better with noise (Papernot et al., 2021)."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="tanh", padding="same"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def accuracy(epsilon: float | None, epochs: int, verbose: bool = False) -> float:
    """Accuracy on held-out rows after private training, or after ordinary training for `None`."""
    x, y = load()
    train, test = (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])
    model = trained = build()
    if epsilon is not None:
        trained = make_private(
            model,
            clip_norm=CLIP_NORM,
            expected_batch_size=BATCH_SIZE,
            delta=DELTA,
            target_epsilon=epsilon,
            epochs=epochs,
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.SGD(1.0, momentum=0.8), loss, metrics=["accuracy"])
    title = "no privacy" if epsilon is None else f"epsilon {epsilon}"
    with Progress(title, epochs * -(-len(train[0]) // BATCH_SIZE)) as progress:
        options = {} if epsilon else {"batch_size": BATCH_SIZE}
        trained.fit(*train, **options, epochs=epochs, verbose=0, callbacks=[progress.callback()])
    if verbose:
        print(trained.privacy.statement())
    reached = trained.evaluate(*test, verbose=0)[1]
    print(f"{title}: accuracy {reached:.3f}", flush=True)
    return reached


def main() -> None:
    """Trains with each epsilon and without, and draws."""
    given = options(__doc__, takes="about a minute")
    epsilons, epochs = (EPSILONS[2:3], 2) if given.short else (EPSILONS, EPOCHS)
    reached = [accuracy(epsilon, epochs, verbose=epsilon == epsilons[-1]) for epsilon in epsilons]
    without = accuracy(None, epochs)
    series = {"without privacy": [without] * len(epsilons), "private": reached}
    labels = [f"{epsilon:g}" for epsilon in epsilons]
    save(
        lines("Accuracy on held-out digits, by epsilon", ("epsilon", labels), "accuracy", series, "{:.0%}"),
        given.folder / "accuracy.png",
        f"At epsilon {epsilons[-1]:g} and delta {DELTA:g} the private classifier is right on {reached[-1]:.1%} of "
        f"held-out digits, and one without privacy on {without:.1%}.",
    )


if __name__ == "__main__":
    main()
