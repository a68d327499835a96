"""The models that several benchmarks train, and their data."""

import keras
import numpy as np
from harness import fashion_mnist
from sizes import ROWS, TOKENS, WIDTH, WORDS


def mlp():
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def cnn(activation="relu"):
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 8, strides=2, padding="same", activation=activation),
            keras.layers.MaxPooling2D(2, 1),
            keras.layers.Conv2D(32, 4, strides=2, activation=activation),
            keras.layers.MaxPooling2D(2, 1),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation=activation),
            keras.layers.Dense(10),
        ]
    )


def transformer():
    tokens = keras.Input((TOKENS,), dtype="int32")
    embedded = keras.layers.Embedding(WORDS, WIDTH)(tokens)
    attended = keras.layers.MultiHeadAttention(4, WIDTH // 4)(embedded, embedded)
    hidden = keras.layers.LayerNormalization()(embedded + attended)
    forward = keras.layers.Dense(WIDTH)(keras.layers.Dense(2 * WIDTH, activation="relu")(hidden))
    hidden = keras.layers.LayerNormalization()(hidden + forward)
    return keras.Model(tokens, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(hidden)))


def low_rank():
    """The transformer with adapters of rank 4; only they and the biases beside them are trained."""
    from keras_paragrad.compat.model import all_layers

    model = transformer()
    for layer in all_layers(model):
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(4)
        elif isinstance(layer, keras.layers.LayerNormalization):
            layer.trainable = False
    return model


def model_of(name):
    keras.utils.set_random_seed(0)
    return {"mlp": mlp, "cnn": cnn, "transformer": transformer, "low_rank": low_rank}[name]()


def batch_of(name, rows=None):
    """The arrays of a batch, with the model's usual number of rows or with `rows`."""
    rows = rows or ROWS[name]
    if name in ("transformer", "low_rank"):
        generator = np.random.default_rng(0)
        return generator.integers(0, WORDS, (rows, TOKENS)).astype("int32"), generator.integers(0, 10, rows)
    images, classes = fashion_mnist(rows)
    return images.reshape(-1, 784) if name == "mlp" else images, classes


def loss_of(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def endless(*batch):
    """A dataset that repeats a batch forever.

    It has no autotuning, whose thread sleeps ever longer, and for which the end of `fit` waits.
    """
    # Imported here, as processes of other frameworks may not have it.
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(batch).cache().repeat().with_options(options)
