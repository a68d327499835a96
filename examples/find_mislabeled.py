"""Finds wrong labels by the norms of per-example gradients: flips 5% of the digits' labels, and looks for them.

A model that has not yet learnt its mistakes by heart is pulled hardest by the examples that don't fit the others. So
the norms that each example's gradient had are averaged over the first epochs, and the largest are the suspects.
"""

import keras
import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.text import Text
from sklearn.datasets import load_digits

from keras_paragrad import ExampleGradients, wrap

FLIPPED = 0.05
EPOCHS = 8
SHADES = " ░▒▓█"


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


def mean_norms(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
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
    model.fit(images, labels, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[examples, collect])
    return np.mean(norms, axis=0)


def drawn(image: np.ndarray, caption: str) -> Text:
    """A digit in characters, with a line below."""
    levels = np.minimum((image[..., 0] * len(SHADES)).astype(int), len(SHADES) - 1)
    return Text("\n".join("".join(SHADES[level] * 2 for level in row) for row in levels) + f"\n{caption}\n")


def main() -> None:
    """Trains, ranks, and shows what was found."""
    console = Console(width=120, highlight=False)
    images, given, right = digits_with_wrong_labels()
    wrong = given != right
    norms = mean_norms(images, given)
    suspects = np.argsort(-norms)[: wrong.sum()]
    found = int(wrong[suspects].sum())
    console.print(
        f"{wrong.sum()} of {len(given)} labels are wrong. Of the {len(suspects)} examples with the largest gradients, "
        f"{found} are among them.\n"
    )
    console.print(f"precision {found / len(suspects):.3f}")
    console.print(f"recall    {found / wrong.sum():.3f}")
    console.print(
        f"mean norm {norms[wrong].mean():.2f} where the label is wrong, {norms[~wrong].mean():.2f} elsewhere\n"
    )
    console.print("The largest:\n")
    captions = {index: f"{right[index]}, called {given[index]}" for index in suspects}
    console.print(Columns([drawn(images[index], captions[index]) for index in suspects[:12]], width=18))
    console.print("The largest of those whose label is right:\n")
    innocent = suspects[~wrong[suspects]][:6]
    console.print(Columns([drawn(images[index], str(right[index])) for index in innocent], width=18))


if __name__ == "__main__":
    main()
