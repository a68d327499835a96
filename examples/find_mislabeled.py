"""Finds wrong labels by the norms of per-example gradients: flips 5% of the digits' labels, and looks for them.

A model that has not yet learnt its mistakes by heart is pulled hardest by the examples that don't fit the others. So
the norms that each example's gradient had are averaged over the first epochs, and the largest are the suspects. The
picture shows those of which it is surest.

    python examples/find_mislabeled.py

It takes ten seconds on two CPU cores.
"""

from _example import Progress, image_grid, options, require, save

require("sklearn", "matplotlib")

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_paragrad import ExampleGradients, wrap

FLIPPED = 0.05
EPOCHS, BATCH, SHOWN = 8, 32, 18


def digits_with_wrong_labels() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The digits' images in [0, 1], in random order, their labels with some of them wrong, and the right ones."""
    generator = np.random.default_rng(0)
    images, labels = load_digits(return_X_y=True)
    order = generator.permutation(len(images))
    images, labels = images[order].astype("float32") / 16, labels[order]
    flipped = generator.choice(len(labels), round(FLIPPED * len(labels)), replace=False)
    given = labels.copy()
    given[flipped] = (labels[flipped] + generator.integers(1, 10, len(flipped))) % 10
    return images.reshape(-1, 8, 8, 1), given, labels


def mean_norms(images: np.ndarray, labels: np.ndarray, epochs: int) -> np.ndarray:
    """Each example's gradient norm, averaged over the first epochs of training."""
    keras.utils.set_random_seed(0)
    model = wrap(
        keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    examples = ExampleGradients()
    norms = []
    collect = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: norms.append(examples.norms))
    # Not shuffled, so that an example's place is its index.
    with Progress("Training", epochs * -(-len(images) // BATCH)) as progress:
        callbacks = [examples, collect, progress.callback()]
        model.fit(images, labels, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return np.mean(norms, axis=0)


def main() -> None:
    """Trains, ranks, and shows what was found."""
    given = options(__doc__, takes="ten seconds")
    images, labels, right = digits_with_wrong_labels()
    wrong = labels != right
    norms = mean_norms(images, labels, epochs=2 if given.short else EPOCHS)
    ranked = np.argsort(-norms)
    suspects = ranked[: wrong.sum()]
    found = int(wrong[suspects].sum())
    print(f"mean norm {norms[wrong].mean():.2f} where the label is wrong, {norms[~wrong].mean():.2f} elsewhere")
    shown = suspects[:SHOWN]
    captions = [f"{right[each]}, labelled {labels[each]}" if wrong[each] else f"{right[each]}" for each in shown]
    save(
        image_grid(f"The {SHOWN} digits with the largest gradients", images[shown, ..., 0], captions, columns=6),
        given.folder / "suspects.png",
        f"{wrong.sum()} of {len(labels)} labels are wrong. Of the {len(suspects)} examples with the largest gradients, "
        f"{found} are among them.",
    )


if __name__ == "__main__":
    main()
