"""Whole models: known architectures, a small language model and a small vision transformer, and layers of one's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.every_example import check
from sample_models.drawn_layers import randomize, some_inputs
from sample_models.own_layers import TokenAndPosition

# The rules are compiled in tests of their own, and so is a language model here.
JIT = [False, pytest.param(True, marks=pytest.mark.long)]


class TiedHead(layers.Layer):
    """Scores the tokens by the table they were embedded with."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, inputs):
        return ops.matmul(inputs, ops.transpose(self.embedding.embeddings))


class ClassToken(layers.Layer):
    """Owns a weight itself."""

    def build(self, input_shape):
        self.token = self.add_weight(shape=(1, 1, input_shape[-1]))

    def call(self, inputs):
        token = ops.broadcast_to(self.token, (ops.shape(inputs)[0], 1, inputs.shape[-1]))
        return ops.concatenate([token, inputs], axis=1)


def block(x, causal=False):
    normalized = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 4, dropout=0.1)(normalized, normalized, use_causal_mask=causal)
    hidden = layers.Dense(16, activation="gelu")(layers.RMSNormalization()(x))
    return x + layers.Dropout(0.1)(layers.Dense(8)(hidden))


def gpt(length=6):
    tokens = keras.Input((length,), dtype="int32")
    embed = TokenAndPosition(length)
    x = block(embed(tokens), causal=True)
    return keras.Model(tokens, TiedHead(embed.tokens)(layers.LayerNormalization()(x)))


def vision_transformer():
    images = keras.Input((12, 12, 3))
    patches = layers.Reshape((9, 8))(layers.Conv2D(8, 4, strides=4)(images))
    x = block(ClassToken()(patches))
    return keras.Model(images, layers.Dense(4)(layers.LayerNormalization()(x)[:, 0]))


class Subclassed(keras.Model):
    """Calls a layer twice, another not at all, and a model within."""

    def __init__(self):
        super().__init__()
        self.shared, self.unused = layers.Dense(4, activation="tanh"), layers.Dense(3)
        self.inner = keras.Sequential([layers.Dense(5, activation="silu"), layers.Dense(4)])

    def build(self, input_shape):
        for layer in (self.shared, self.unused, self.inner):
            layer.build(input_shape)

    def call(self, inputs):
        return self.shared(self.inner(self.shared(inputs)) + inputs)


def siamese():
    """Both inputs through one convolution and one embedding."""
    image, other = (keras.Input((8, 8, 2), name=name) for name in ("image", "other"))
    words, more = (keras.Input((5,), dtype="int32", name=name) for name in ("words", "more"))
    convolution, embedding, separable = layers.Conv2D(3, 3), layers.Embedding(7, 4), layers.SeparableConv2D(3, 3)
    parts = [layers.Flatten()(layer(side)) for layer in (convolution, separable) for side in (image, other)]
    parts += [layers.Flatten()(embedding(side)) for side in (words, more)]
    inputs = {"image": image, "other": other, "words": words, "more": more}
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(parts)))


# The others are run without XLA.
@pytest.mark.long
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("batch", [3, 6])
def test_a_language_model_with_tied_embeddings(batch, jit_compile):
    model = gpt()
    randomize(model)
    check(model, some_inputs((batch, 6), 11), jit_compile)


@pytest.mark.parametrize("jit_compile", JIT)
def test_a_vision_transformer(jit_compile):
    model = vision_transformer()
    randomize(model)
    check(model, some_inputs((3, 12, 12, 3)), jit_compile)


@pytest.mark.parametrize("jit_compile", JIT)
def test_a_subclassed_model(jit_compile):
    model = Subclassed()
    model(some_inputs((3, 4)))
    check(model, some_inputs((3, 4)), jit_compile)


@pytest.mark.parametrize("jit_compile", JIT)
def test_layers_shared_by_several_inputs(jit_compile):
    model = siamese()
    inputs = {name: some_inputs((3, 8, 8, 2)) for name in ("image", "other")}
    inputs |= {name: some_inputs((3, 5), 7) for name in ("words", "more")}
    inputs["more"] = inputs["more"][::-1].copy()
    check(model, inputs, jit_compile)


@pytest.mark.parametrize("group", [layers.MultiHeadAttention, layers.GroupQueryAttention])
def test_attention(group):
    x = keras.Input((5,), dtype="int32")
    # Keras warns that grouped attention's projections lose a mask.
    embedded = layers.Embedding(9, 6, mask_zero=group is layers.MultiHeadAttention)(x)
    attention = group(2, 3) if group is layers.MultiHeadAttention else group(3, 4, 2)
    model = keras.Model(x, attention(embedded, embedded))
    randomize(model)
    check(model, some_inputs((4, 5), 9))


class WordModel(keras.Model):
    """Embeds words, mixes them, and scores them by the table."""

    def __init__(self, **options):
        super().__init__()
        self.words = layers.ReversibleEmbedding(9, 4, **options)
        self.mix = layers.Conv1D(4, 2, padding="causal", activation="tanh")

    def build(self, input_shape):
        self.words.build()
        self.mix.build((None, 5, 4))
        self.built = True

    def call(self, inputs):
        return self.words(self.mix(self.words(inputs)), reverse=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("options", [{}, {"tie_weights": False}, {"logit_soft_cap": 0.5}])
def test_a_reversible_embedding(options, jit_compile):
    model = WordModel(**options)
    model(some_inputs((2, 5), 9))
    randomize(model)
    check(model, some_inputs((4, 5), 9), jit_compile)


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_half_of_a_reversible_embedding(reverse, tie_weights):
    layer = layers.ReversibleEmbedding(9, 4, tie_weights=tie_weights)
    inputs = keras.Input((5, 4)) if reverse else keras.Input((5,), dtype="int32")
    model = keras.Model(inputs, layer(inputs, reverse=reverse))
    randomize(model)
    check(model, some_inputs((3, 5, 4)) if reverse else some_inputs((3, 5), 9))


def test_images_of_any_size():
    model = keras.Sequential(
        [
            keras.Input((None, None, 2)),
            layers.Conv2D(3, 3, padding="same", strides=2, activation="tanh"),
            layers.DepthwiseConv2D(2),
            layers.Conv2DTranspose(4, 2, strides=2),
            layers.SeparableConv2D(3, 3),
            layers.GlobalAveragePooling2D(),
        ]
    )
    check(model, some_inputs((3, 13, 12, 2)))


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        # Of many layers, or of tens of millions of weights, whose gradients are kept for each example. In `make test`,
        # the model above has their kinds of convolutions.
        *(
            pytest.param(*large, marks=pytest.mark.long)
            for large in (
                ("MobileNet", 32),
                ("MobileNetV2", 32),
                ("VGG16", 32),
                ("ResNet50", 32),
                ("EfficientNetV2B0", 32),
                ("ConvNeXtTiny", 32),
                ("Xception", 71),
            )
        ),
    ],
)
@pytest.mark.grappler
def test_known_architectures(architecture, size):
    model = getattr(keras.applications, architecture)(weights=None, input_shape=(size, size, 3), classes=5)
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    # In a loop of single images matrix products round otherwise, and some ReLU's input falls on the other side of zero.
    check(
        model,
        np.random.default_rng(0).uniform(0, 1, (2, size, size, 3)).astype("float32"),
        tolerance=1e-4,
        run_eagerly=False,
    )


def test_half_of_a_model_is_frozen():
    model = gpt()
    randomize(model)
    model.layers[1].trainable = False
    model.layers[-1].trainable = False
    check(model, some_inputs((3, 6), 11))


@pytest.mark.parametrize("size", [(8,), (3, 8), (2, 2, 8)])
@pytest.mark.parametrize("frozen", ["kernel", "bias"])
def test_a_kernel_or_its_bias_is_frozen(size, frozen):
    model = keras.Sequential([keras.Input(size), layers.Dense(9)])
    randomize(model)
    getattr(model.layers[0], frozen).trainable = False
    check(model, some_inputs((4, *size)))


def test_a_low_rank_adapter():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)])
    model.layers[0].enable_lora(2)
    randomize(model)
    check(model, some_inputs((3, 4)))


def test_two_outputs_and_a_loop_within():
    class Repeated(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(4, activation="tanh")

        def build(self, input_shape):
            self.dense.build(input_shape)

        def call(self, inputs):
            return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, self.dense(x)), (0, inputs))[1]

    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Repeated()])
    check(model, some_inputs((3, 4)))
