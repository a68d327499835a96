"""Trains a classifier of handwritten digits with differential privacy, for several values of epsilon.

    python examples/private_digits.py

Prints the accuracy on held-out rows for each epsilon, and the statement of the last one. Takes about a minute.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_paragrad.privacy import make_private

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
EPOCHS, BATCH_SIZE, DELTA, CLIP_NORM = 30, 256, 1e-4, 1.0


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


def accuracy(epsilon: float | None, verbose: bool = False) -> float:
    """Accuracy on held-out rows after private training, or after ordinary training for `None`."""
    x, y = load()
    held_out = 360
    train, test = (x[held_out:], y[held_out:]), (x[:held_out], y[:held_out])
    model = trained = build()
    if epsilon is not None:
        trained = make_private(
            model,
            clip_norm=CLIP_NORM,
            expected_batch_size=BATCH_SIZE,
            delta=DELTA,
            target_epsilon=epsilon,
            epochs=EPOCHS,
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.SGD(1.0, momentum=0.8), loss, metrics=["accuracy"])
    trained.fit(*train, **({} if epsilon else {"batch_size": BATCH_SIZE}), epochs=EPOCHS, verbose=0)
    if verbose:
        print(trained.privacy.statement())
    return trained.evaluate(*test, verbose=0)[1]


def main() -> None:
    for epsilon in EPSILONS:
        print(f"epsilon {epsilon:4.1f}: accuracy {accuracy(epsilon, verbose=epsilon == EPSILONS[-1]):.3f}")
    print(f"no privacy  : accuracy {accuracy(None):.3f}")


if __name__ == "__main__":
    main()
