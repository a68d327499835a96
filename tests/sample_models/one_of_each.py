"""A layer for each per-example rule, with the shape of an example."""

import keras
from keras import layers, ops


@keras.saving.register_keras_serializable(package="tests")
class Scale(layers.Layer):
    """Has no rule, and gives NaN on zeros."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale / ops.norm(inputs, axis=-1, keepdims=True)


class Noisy(layers.Dense):
    """Draws random numbers, so that it can't be called on one example again."""

    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, inputs, training=None):
        return super().call(self.dropout(inputs, training=True))


IMAGE, ROW, SEQUENCE = (8, 8, 2), (6,), (5, 4)
RULES = {
    "dense": (ROW, lambda: layers.Dense(3)),
    "dense at positions": (SEQUENCE, lambda: layers.Dense(3)),
    "einsum": (SEQUENCE, lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de")),
    "dense with LoRA": (ROW, lambda: layers.Dense(3, lora_rank=2)),
    "einsum with LoRA": (
        SEQUENCE,
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de", lora_rank=2),
    ),
    "attention": (SEQUENCE, lambda: SelfAttention()),
    "convolution": (IMAGE, lambda: layers.Conv2D(3, 3)),
    "large windows": ((32, 32, 16), lambda: layers.Conv2D(2, 3)),
    "causal": (SEQUENCE, lambda: layers.Conv1D(3, 2, padding="causal")),
    "grouped": (IMAGE, lambda: layers.Conv2D(4, 3, groups=2)),
    "transposed": (IMAGE, lambda: layers.Conv2DTranspose(3, 3)),
    "depthwise": (IMAGE, lambda: layers.DepthwiseConv2D(3)),
    "separable": (IMAGE, lambda: layers.SeparableConv2D(3, 3)),
    "layer normalization": (SEQUENCE, lambda: layers.LayerNormalization()),
    "group normalization": (IMAGE, lambda: layers.GroupNormalization(2)),
    "rms normalization": (SEQUENCE, lambda: layers.RMSNormalization()),
    "batch normalization": (SEQUENCE, lambda: layers.BatchNormalization()),
    "prelu": (ROW, lambda: layers.PReLU()),
    "recurrent": (SEQUENCE, lambda: layers.LSTM(3)),
    "no rule": (ROW, Scale),
    "random numbers": (ROW, lambda: Noisy(3)),
}


class SelfAttention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 2)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, inputs):
        return self.attention(inputs, inputs)
