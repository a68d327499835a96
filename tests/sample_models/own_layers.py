"""Layers such as users write."""

from keras import layers, ops


class TokenAndPosition(layers.Layer):
    """The usual way to embed a text: the positions are no batch."""

    def __init__(self, length, **kwargs):
        super().__init__(**kwargs)
        self.length = length
        self.tokens, self.positions = layers.Embedding(11, 8), layers.Embedding(length, 8)

    def call(self, inputs):
        return self.tokens(inputs) + self.positions(ops.arange(self.length))
