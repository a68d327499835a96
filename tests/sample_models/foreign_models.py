"""Models that were not written for this package: `keras.applications`, tasks of keras_hub, the official examples.

Each is small, has random weights and comes with a few rows of data. Dropout and other noise is left out, as every part
of a batch would draw its own: with that of EfficientNetV2B0, which leaves out whole blocks, slices are 0.35 off in
float64, and without it 4e-8. Batch normalization does not train: a part of a batch has other statistics than the whole
of it, whoever cuts, and the package warns of it. Frozen, as for fine-tuning, it is a function of each row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

ROWS = 7


class Foreign(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        build: Makes the model, not compiled.
        x: Inputs of `ROWS` rows, nested as the model takes them.
        y: Targets.
        loss: A loss.
        sample_weight: Weights of rows or of tokens, or `None`.
        rate: The learning rate; steps are taken with momentum.
        metrics: For `compile`, weighted.
        damping: What `settled` adds to the variances that batch normalization divides by.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    loss: Any
    sample_weight: Any = None
    rate: float = 1e-3
    metrics: tuple[str, ...] = ()
    damping: float = 0.0


def settled(model: keras.Model, case: Foreign) -> keras.Model:
    """The model with its normalization set to its data, and with all of its blocks at work.

    With the statistics that batch normalization begins with, signals and gradients of random weights die out within a
    few blocks, and with the scale that ConvNeXt's blocks begin with they count for nothing: errors would not be seen.
    With those of a few rows they explode, as frozen statistics don't hold them back: rounding would be all one sees.
    The damping of each model lies between, where all layers have gradients of a size.
    """
    normalizations = [layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)]
    for layer in normalizations:
        layer.trainable, layer.momentum = True, 0.0
    if normalizations:
        model(case.x, training=True)
    for layer in normalizations:
        layer.trainable = False
        layer.moving_variance.assign_add(keras.ops.full(layer.moving_variance.shape, case.damping))
    for weight in model.trainable_weights:
        if "layer_scale" in weight.path:
            weight.assign(keras.ops.full(weight.shape, 0.1))
    return model


def frozen(model: keras.Model) -> keras.Model:
    """The model with its batch normalization as it is for inference, and without dropout."""
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    return model


def _images(side: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 255, (ROWS, side, side, 3)).astype("float32")


def _labels(classes: int = 5, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, (ROWS, *shape))


def _from_logits() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _application(name: str, damping: float = 0.0, side: int = 32) -> Foreign:
    def build() -> keras.Model:
        maker = getattr(keras.applications, name)
        return frozen(maker(input_shape=(side, side, 3), weights=None, classes=5, classifier_activation=None))

    return Foreign(build, _images(side), _labels(), _from_logits(), metrics=("accuracy",), damping=damping)


APPLICATIONS = {
    "MobileNetV3Small": _application("MobileNetV3Small", 0.01),
    "EfficientNetV2B0": _application("EfficientNetV2B0", 0.3),
    "ResNet50V2": _application("ResNet50V2", 1.0),
    "ConvNeXtTiny": _application("ConvNeXtTiny"),
    "DenseNet121": _application("DenseNet121", 0.3),
}

TOKENS, WORDS = 12, 50


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and a padding mask, in rows of 3 to 12 tokens."""
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, TOKENS + 1, ROWS)
    mask = np.arange(TOKENS) < lengths[:, None]
    return np.where(mask, draw.integers(1, WORDS, (ROWS, TOKENS)), 0).astype("int32"), mask


def _bert() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(WORDS, 2, 2, 16, 32, dropout=0.0, max_sequence_length=TOKENS)
    return keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0, preprocessor=None)


def _gpt2() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(WORDS, 2, 2, 16, 32, dropout=0.0, max_sequence_length=TOKENS)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def _llama() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(WORDS, 2, 4, 16, 32, num_key_value_heads=2)
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def _vit() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.ViTBackbone((16, 16, 3), (4, 4), 2, 2, 16, 32)
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=5, preprocessor=None)


def _language(build: Callable[[], keras.Model]) -> Foreign:
    ids, mask = _tokens()
    y = np.roll(ids, -1, axis=1)
    x, weight = {"token_ids": ids, "padding_mask": mask}, mask.astype("float32")
    return Foreign(build, x, y, _from_logits(), weight, metrics=("sparse_categorical_accuracy",))


def _tasks() -> dict[str, Foreign]:
    ids, mask = _tokens()
    classified = {"token_ids": ids, "segment_ids": ids % 2, "padding_mask": mask}
    return {
        "BertTextClassifier": Foreign(_bert, classified, _labels(3), _from_logits(), metrics=("accuracy",)),
        "GPT2CausalLM": _language(_gpt2),
        "LlamaCausalLM": _language(_llama),
        "ViTImageClassifier": Foreign(_vit, _images(16) / 255, _labels(), _from_logits()),
    }


TASKS = _tasks()


def mnist_convnet() -> keras.Model:
    """keras.io/examples/vision/mnist_convnet."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )


@keras.saving.register_keras_serializable(package="foreign")
class TransformerBlock(layers.Layer):
    """keras.io/examples/nlp/text_classification_with_transformer."""

    def __init__(self, width: int, heads: int, hidden: int, **options: Any):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width)
        self.feed_forward = keras.Sequential([layers.Dense(hidden, activation="relu"), layers.Dense(width)])
        self.first, self.second = layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs: Any) -> Any:
        attended = self.first(inputs + self.attention(inputs, inputs))
        return self.second(attended + self.feed_forward(attended))


@keras.saving.register_keras_serializable(package="foreign")
class TokenAndPositionEmbedding(layers.Layer):
    """Of the same example."""

    def __init__(self, length: int, words: int, width: int, **options: Any):
        super().__init__(**options)
        self.tokens, self.positions = layers.Embedding(words, width), layers.Embedding(length, width)

    def call(self, ids: Any) -> Any:
        return self.tokens(ids) + self.positions(keras.ops.arange(keras.ops.shape(ids)[-1]))


def text_transformer() -> keras.Model:
    """keras.io/examples/nlp/text_classification_with_transformer."""
    inputs = keras.Input((TOKENS,), dtype="int32")
    hidden = TokenAndPositionEmbedding(TOKENS, WORDS, 16)(inputs)
    hidden = TransformerBlock(16, 2, 32)(hidden)
    hidden = layers.Dense(20, activation="relu")(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(hidden))


def bidirectional_lstm() -> keras.Model:
    """keras.io/examples/nlp/bidirectional_lstm_imdb, with padding masked."""
    inputs = keras.Input((TOKENS,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(hidden)
    hidden = layers.Bidirectional(layers.LSTM(6))(hidden)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))


@keras.saving.register_keras_serializable(package="foreign")
class Patches(layers.Layer):
    """keras.io/examples/vision/image_classification_with_vision_transformer."""

    def call(self, images: Any) -> Any:
        patches = keras.ops.image.extract_patches(images, size=4)
        return keras.ops.reshape(patches, (-1, 16, 48))


@keras.saving.register_keras_serializable(package="foreign")
class PatchEncoder(layers.Layer):
    """Of the same example."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.projection, self.positions = layers.Dense(12), layers.Embedding(16, 12)

    def call(self, patches: Any) -> Any:
        return self.projection(patches) + self.positions(keras.ops.expand_dims(keras.ops.arange(16), axis=0))


def vision_transformer() -> keras.Model:
    """keras.io/examples/vision/image_classification_with_vision_transformer."""
    inputs = keras.Input((16, 16, 3))
    hidden = PatchEncoder()(Patches()(inputs))
    for _ in range(2):
        normed = layers.LayerNormalization(epsilon=1e-6)(hidden)
        hidden = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=12)(normed, normed), hidden])
        normed = layers.LayerNormalization(epsilon=1e-6)(hidden)
        mixed = layers.Dense(12, activation="gelu")(layers.Dense(24, activation="gelu")(normed))
        hidden = layers.Add()([mixed, hidden])
    hidden = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(hidden))
    return keras.Model(inputs, layers.Dense(5)(layers.Dense(16, activation="gelu")(hidden)))


def segmentation() -> keras.Model:
    """keras.io/examples/vision/oxford_pets_image_segmentation: a U-Net of separable convolutions with skips."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, padding="same")(inputs)))
    skip = x
    for filters in (12, 16):
        for _ in range(2):
            x = layers.SeparableConv2D(filters, 3, padding="same")(layers.Activation("relu")(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        skip = layers.Conv2D(filters, 1, strides=2, padding="same")(skip)
        skip = x = layers.add([x, skip])
    for filters in (16, 12, 8):
        for _ in range(2):
            x = layers.Conv2DTranspose(filters, 3, padding="same")(layers.Activation("relu")(x))
            x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        skip = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(skip))
        skip = x = layers.add([x, skip])
    return frozen(keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x)))


def sequence_to_sequence() -> keras.Model:
    """keras.io/examples/nlp/lstm_seq2seq: an encoder's states begin the decoder."""
    encoder_inputs, decoder_inputs = keras.Input((None, 7)), keras.Input((None, 9))
    _, *states = layers.LSTM(8, return_state=True)(encoder_inputs)
    hidden, *_ = layers.LSTM(8, return_sequences=True, return_state=True)(decoder_inputs, initial_state=states)
    return keras.Model([encoder_inputs, decoder_inputs], layers.Dense(9, activation="softmax")(hidden))


def _examples() -> dict[str, Foreign]:
    ids, _ = _tokens()
    draw = np.random.default_rng(3)
    texts = [draw.normal(size=(ROWS, length, width)).astype("float32") for length, width in ((6, 7), (5, 9))]
    sparse, binary = keras.losses.SparseCategoricalCrossentropy(), keras.losses.BinaryCrossentropy()
    digits = draw.uniform(0, 1, (ROWS, 28, 28, 1)).astype("float32")
    weights = draw.uniform(0.2, 3.0, ROWS).astype("float32")
    return {
        "mnist_convnet": Foreign(mnist_convnet, digits, _labels(), _from_logits(), metrics=("accuracy",)),
        "text_transformer": Foreign(text_transformer, ids, _labels(2), sparse, metrics=("accuracy",)),
        "bidirectional_lstm": Foreign(bidirectional_lstm, ids, _labels(2, (1,)), binary, weights),
        "vision_transformer": Foreign(vision_transformer, _images(16) / 255, _labels(), _from_logits()),
        "segmentation": Foreign(segmentation, _images(16) / 255, _labels(3, (16, 16)), sparse, damping=0.3),
        "sequence_to_sequence": Foreign(sequence_to_sequence, texts, _labels(9, (5,)), sparse),
    }


EXAMPLES = _examples()
FOREIGN = {**APPLICATIONS, **TASKS, **EXAMPLES}


class Variational(keras.Model):
    """keras.io/examples/generative/vae: a `train_step` of its own."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(6)])
        self.seeds = keras.random.SeedGenerator(3)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total]

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance = keras.ops.split(self.encoder(x), 2, axis=1)
            noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
            again = self.decoder(mean + keras.ops.exp(0.5 * log_variance) * noise)
            kl = -0.5 * (1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance))
            loss = keras.ops.mean(keras.ops.square(x - again)) + keras.ops.mean(kl)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        return {"total": self.total.result()}

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x)[:, :2])


class Recommender(keras.Model):
    """keras.io/examples/structured_data/collaborative_filtering_movielens: its `tensordot` adds up over rows too."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.users, self.user_bias = layers.Embedding(10, 4), layers.Embedding(10, 1)
        self.movies, self.movie_bias = layers.Embedding(10, 4), layers.Embedding(10, 1)

    def call(self, inputs: Any) -> Any:
        users, movies = inputs[:, 0], inputs[:, 1]
        likes = keras.ops.tensordot(self.users(users), self.movies(movies), 2)
        return keras.ops.sigmoid(likes + self.user_bias(users) + self.movie_bias(movies))
