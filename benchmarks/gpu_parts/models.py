"""The models that are trained, by name, and random data for them."""

import keras
import numpy as np

CLASSES = 10
layers = keras.layers


def mlp(width: int = 64) -> keras.Model:
    """Two hidden layers on 32 features."""
    hidden = [layers.Dense(width, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((32,)), *hidden, layers.Dense(CLASSES, dtype="float32")])


def cnn(width: int = 16, size: int = 12, blocks: int = 1) -> keras.Model:
    """Residual blocks with group normalization, on images."""
    inputs = keras.Input((size, size, 3))
    hidden = layers.Conv2D(width, 3, padding="same")(inputs)
    for _ in range(blocks):
        inner = layers.Conv2D(width, 3, padding="same")(layers.ReLU()(layers.GroupNormalization(4)(hidden)))
        hidden = hidden + layers.Conv2D(width, 3, padding="same")(layers.ReLU()(inner))
    pooled = layers.GlobalAveragePooling2D()(layers.MaxPooling2D(2)(hidden))
    return keras.Model(inputs, layers.Dense(CLASSES, dtype="float32")(pooled))


def transformer(
    width: int = 32, tokens: int = 12, blocks: int = 1, heads: int = 2, words: int = 50, dropout: float = 0.0
) -> keras.Model:
    """Blocks of attention and a dense network on embedded tokens."""
    inputs = keras.Input((tokens,), dtype="int32")
    hidden = layers.Embedding(words, width)(inputs)
    for index in range(blocks):
        # A model of its own for each block, which is what `recompute` runs again.
        inside = keras.Input((tokens, width))
        normed = layers.LayerNormalization()(inside)
        mixed = inside + layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(normed, normed)
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(mixed))
        outputs = mixed + layers.Dropout(dropout)(layers.Dense(width)(inner))
        hidden = keras.Model(inside, outputs, name=f"block_{index}")(hidden)
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES, dtype="float32")(pooled))


def lstm(width: int = 16) -> keras.Model:
    """A recurrent layer, which cuDNN runs on a GPU where XLA doesn't compile it."""
    return keras.Sequential([keras.Input((10, 8)), layers.LSTM(width), layers.Dense(CLASSES, dtype="float32")])


MODELS = {"MLP": mlp, "CNN": cnn, "Transformer": transformer, "LSTM": lstm}


def made(name: str, **sizes: int | float) -> keras.Model:
    """A model with the same initial weights every time."""
    keras.utils.set_random_seed(0)
    return MODELS[name](**sizes)


def data_for(model: keras.Model, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, classes, and weights of the examples."""
    draw = np.random.default_rng(0)
    shape = (rows, *model.input_shape[1:])
    tokens = keras.backend.is_int_dtype(model.inputs[0].dtype)
    x = draw.integers(0, 50, shape).astype("int32") if tokens else draw.normal(size=shape).astype("float32")
    return x, draw.integers(0, CLASSES, rows), draw.uniform(0.1, 3, rows).astype("float32")


def loss(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    """The loss of all of them."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def largest(weights: list[np.ndarray]) -> float:
    """The largest weight."""
    return max(float(np.abs(weight).max()) for weight in weights)


def difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference, as a share of the largest weight; NaN if there is one."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)])) / largest(theirs)
