"""SimCLR on scikit-learn's digits, where only a slice of the batch fits: 32 pairs at once, as a batch of 256.

A contrastive loss has each image find its other view among those of the batch, so what fits into memory limits what is
learnt. `microbatch` computes the loss of all 256 pairs in the memory of 32. A linear classifier on the frozen features,
trained on few labels, says how good they are after as many updates; the picture shows its accuracy.

    python examples/simclr_in_small_memory.py

It takes half a minute on two CPU cores.
"""

from _example import Progress, bars, options, require, save

require("sklearn", "matplotlib")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from keras_paragrad import microbatch

FITS, BATCH, TEMPERATURE, LABELS, UPDATES = 32, 256, 0.2, 100, 300


class PairLoss(keras.losses.Loss):
    """NT-Xent (Chen et al., 2020): two views of each image, side by side, among all views of the batch."""

    def call(self, y_true, y_pred):
        """The mean loss of each image's two views."""
        ops = keras.ops
        views = ops.concatenate(ops.split(y_pred, 2, axis=-1), axis=0)
        views = views / (ops.norm(views, axis=-1, keepdims=True) + 1e-6)
        images = ops.shape(y_pred)[0]
        similarity = ops.matmul(views, ops.transpose(views)) / TEMPERATURE
        # No view is its own pair.
        similarity = similarity - 1e9 * ops.eye(2 * images)
        other = ops.concatenate([ops.arange(images) + images, ops.arange(images)], axis=0)
        losses = keras.losses.sparse_categorical_crossentropy(other, similarity, from_logits=True)
        return ops.mean(ops.reshape(losses, (2, images)), axis=0)


class Views(keras.layers.Layer):
    """Makes a view of each image: shifted by up to a pixel, brighter or darker, and with noise."""

    def __init__(self, seed: int):
        super().__init__()
        self.shift = keras.layers.RandomTranslation(0.13, 0.13, fill_mode="constant", seed=seed)
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, images):
        """Draws the views."""
        factors = keras.random.uniform((keras.ops.shape(images)[0], 1, 1, 1), 0.6, 1.4, seed=self.generator)
        noise = keras.random.normal(keras.ops.shape(images), stddev=0.15, seed=self.generator)
        return self.shift(images, training=True) * factors + noise


def build() -> tuple[keras.Model, keras.Model]:
    """The model of two views, and the encoder in it."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ]
    )
    head = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(32)])
    images = keras.Input((8, 8, 1))
    model = keras.Model(images, layers.Concatenate()([head(encoder(Views(seed)(images))) for seed in (1, 2)]))
    model.compile(keras.optimizers.Adam(1e-3), PairLoss())
    return model, encoder


def probe(encoder: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """The accuracy of a linear classifier of the features, which has seen a few labels."""
    features = encoder.predict(images, batch_size=512, verbose=0)
    classifier = LogisticRegression(max_iter=2000).fit(features[:LABELS], labels[:LABELS])
    return float(classifier.score(features[LABELS:], labels[LABELS:]))


def main() -> None:
    """Trains with the batch that fits and with the large one, and compares."""
    given = options(__doc__, takes="half a minute")
    updates = 3 if given.short else UPDATES
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[order]
    pairs = tf.data.Dataset.from_tensor_slices((images, np.zeros(len(images)))).shuffle(len(images), seed=0).repeat()
    _, untrained = build()
    reached = {"not trained": probe(untrained, images, labels)}
    for title, batch in ((f"{FITS} pairs, which fit", FITS), (f"{BATCH} pairs, {FITS} at once", BATCH)):
        model, encoder = build()
        # A batch of one slice is trained as it is.
        with microbatch(model, size=FITS), Progress(title, updates) as progress:
            model.fit(
                pairs.batch(batch), steps_per_epoch=updates, shuffle=False, verbose=0, callbacks=[progress.callback()]
            )
        reached[title] = probe(encoder, images, labels)
        print(f"{title}: accuracy {reached[title]:.1%}", flush=True)
    title = f"SimCLR, {updates} updates: accuracy of a linear classifier of {LABELS} labels"
    before, small, large = reached.values()
    save(
        bars(title, reached, "{:.1%}"),
        given.folder / "accuracy.png",
        f"In the memory of {FITS} pairs, batches of {BATCH} lead to features with which {large:.1%} of the digits are "
        f"recognized, batches of {FITS} to {small:.1%}, and no training to {before:.1%}.",
    )


if __name__ == "__main__":
    main()
