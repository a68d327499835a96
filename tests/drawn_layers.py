"""Layers of every kind that has a per-example rule, as Hypothesis draws them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import keras
import numpy as np
from keras import layers


class LayerCase(NamedTuple):
    """A layer, what it is fed, and how many examples.

    Attributes:
        make: Makes the layer.
        shape: An example's shape.
        vocabulary: How many numbers there are, for inputs of integers; 0 for floats.
        rows: How many examples.
        jit_compile: Whether to compile with XLA.
    """

    make: Callable[[], keras.layers.Layer]
    shape: tuple[int, ...]
    vocabulary: int = 0
    rows: int = 3
    jit_compile: bool = False

    def model(self, dtype: str = "float32") -> keras.Model:
        """The layer as a model, with weights that are neither zero nor one.

        Args:
            dtype: The layer's dtype policy.
        """
        model = keras.Sequential([keras.Input(self.shape, dtype=self._input_dtype(dtype)), self.make(dtype=dtype)])
        randomize(model)
        return model

    def inputs(self, dtype: str = "float32") -> np.ndarray:
        inputs = some_inputs((self.rows, *self.shape), self.vocabulary)
        return inputs if self.vocabulary else inputs.astype(self._input_dtype(dtype))

    def _input_dtype(self, dtype: str) -> str:
        return "int64" if self.vocabulary else "float64" if dtype == "float64" else "float32"


def randomize(model: keras.Model) -> None:
    """Gives a model weights that are neither zero nor one."""
    generator = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape) * 0.5)


def some_inputs(shape: tuple[int, ...], vocabulary: int = 0) -> np.ndarray:
    """Random inputs; with repetitions, if they are numbers."""
    generator = np.random.default_rng(0)
    return generator.integers(0, vocabulary, shape) if vocabulary else generator.normal(size=shape).astype("float32")


_floats = st.just(0)


def _cases(shapes, make, vocabulary=_floats):
    return st.builds(LayerCase, make=make, shape=shapes, vocabulary=vocabulary, rows=_rows, jit_compile=st.booleans())


def _made(layer, **arguments):
    """Draws arguments of a layer class, and partially applies it to them."""
    return st.fixed_dictionaries(arguments).map(lambda drawn: functools.partial(layer, **drawn))


# Hypothesis begins with the first of each: it has to be a case in which something can go wrong.
_few = st.sampled_from([2, 1, 3, 4])
_rows = st.sampled_from([3, 1, 2, 4, 5])
_bias = st.sampled_from([True, False])
_activation = st.sampled_from(["tanh", None, "silu"])


def _sizes(dimensions, smallest=1):
    return st.tuples(*[st.sampled_from([size for size in (2, 1, 3) if size >= smallest])] * dimensions)


@st.composite
def _convolution(draw, layer, dimensions, grouped=False, causal=False, transposed=False, multiplied=False):
    """A convolution with a stride, a dilation or neither, since TensorFlow has no kernel for both."""
    channels = draw(st.sampled_from([2, 1, 4, 16]))
    arguments = {
        "kernel_size": draw(_sizes(dimensions)),
        "padding": draw(st.sampled_from(["same", "valid", "causal"] if causal else ["same", "valid"])),
        "activation": draw(_activation),
        "use_bias": draw(_bias),
    }
    spaced = draw(st.sampled_from(["strides", "dilation_rate", "neither"]))
    if spaced == "strides":
        # Depthwise convolutions have one stride for both axes.
        size = draw(st.sampled_from([2, 1, 3]))
        arguments["strides"] = size if multiplied else tuple(draw(_sizes(dimensions)))
    elif spaced == "dilation_rate" and not (dimensions == 3 or transposed):
        arguments["dilation_rate"] = draw(st.sampled_from([2, 1]))
    if multiplied:
        arguments["depth_multiplier"] = draw(st.sampled_from([2, 1]))
    if layer not in (layers.DepthwiseConv1D, layers.DepthwiseConv2D):
        groups = draw(st.sampled_from([1, 2])) if grouped and channels % 2 == 0 else 1
        arguments["filters"] = groups * draw(_few)
        if groups > 1:
            arguments["groups"] = groups
    first = draw(st.sampled_from([True, False])) and dimensions == 2 and arguments["padding"] != "causal"
    if first:
        arguments["data_format"] = "channels_first"
    size = tuple(draw(st.integers(6, 8)) for _ in range(dimensions))
    shape = (channels, *size) if first else (*size, channels)
    return LayerCase(functools.partial(layer, **arguments), shape, 0, draw(_rows), draw(st.booleans()))


_EINSUMS = [
    ("abc,cde->abde", (4, 3), (None, 2, 3), "de"),
    ("abcd,cde->abe", (4, 2, 3), (None, 5), "e"),
    ("abc,bcd->abd", (4, 3), (4, 5), "bd"),
    ("abc,bd->adc", (4, 3), (5, 3), "d"),
    ("ab,bc->ac", (4,), (3,), None),
    ("...x,xy->...y", (2, 3, 4), 5, "y"),
    ("acb,bd->adc", (4, 3), (5, 4), "dc"),
    ("abc,cde->abde", (2, 9), (None, 4, 3), "de"),
    ("abc,cde->abde", (2, 9), (None, 4, 3), "e"),
    ("abc,cd->abd", (2, 9), (2, 8), "b"),
]


def _einsum(equation, shape, output_shape, bias_axes):
    return _cases(
        st.just(shape),
        _made(
            layers.EinsumDense,
            equation=st.just(equation),
            output_shape=st.just(output_shape),
            bias_axes=st.sampled_from([bias_axes, None]),
            activation=_activation,
        ),
    )


def _recurrent(layer):
    return _cases(
        _sizes(2, smallest=2), _made(layer, units=_few, return_sequences=st.booleans(), go_backwards=st.booleans())
    )


DRAWN = {
    "dense": _cases(
        st.sampled_from([(5,), (4, 3), (2, 3, 4), (40, 2), (2, 9)]),
        _made(layers.Dense, units=st.sampled_from([3, 1, 50]), activation=_activation, use_bias=_bias),
    ),
    "einsum": st.sampled_from(_EINSUMS).flatmap(lambda arguments: _einsum(*arguments)),
    "conv1d": _convolution(layers.Conv1D, 1, grouped=True, causal=True),
    "conv2d": _convolution(layers.Conv2D, 2, grouped=True),
    "conv3d": _convolution(layers.Conv3D, 3),
    "depthwise1d": _convolution(layers.DepthwiseConv1D, 1, multiplied=True),
    "depthwise2d": _convolution(layers.DepthwiseConv2D, 2, multiplied=True),
    "separable1d": _convolution(layers.SeparableConv1D, 1, multiplied=True),
    "separable2d": _convolution(layers.SeparableConv2D, 2, multiplied=True),
    "transpose1d": _convolution(layers.Conv1DTranspose, 1, transposed=True),
    "transpose2d": _convolution(layers.Conv2DTranspose, 2, transposed=True),
    "transpose3d": _convolution(layers.Conv3DTranspose, 3, transposed=True),
    "embedding": _cases(
        st.sampled_from([(), (1,), (7,), (2, 5)]),
        _made(layers.Embedding, input_dim=st.just(9), output_dim=_few),
        st.sampled_from([2, 9]),
    ),
    "layer_normalization": _cases(
        st.just((4, 6)),
        _made(layers.LayerNormalization, axis=st.sampled_from([-1, 1, [1, 2]]), center=_bias, scale=_bias),
    ).filter(lambda case: case.make.keywords["center"] or case.make.keywords["scale"]),
    "group_normalization": _cases(
        st.sampled_from([(5, 6), (3, 2, 6)]),
        _made(layers.GroupNormalization, groups=st.sampled_from([1, 2, -1]), center=_bias),
    ),
    "rms_normalization": _cases(st.just((4, 6)), _made(layers.RMSNormalization, axis=st.sampled_from([-1, [1, 2]]))),
    "batch_normalization": _cases(st.just((4, 6)), _made(layers.BatchNormalization, axis=st.sampled_from([-1, 1]))),
    "prelu": _cases(st.just((4, 3, 2)), _made(layers.PReLU, shared_axes=st.sampled_from([None, [1], [1, 2]]))),
    "simple_rnn": _recurrent(layers.SimpleRNN),
    "lstm": _recurrent(layers.LSTM),
    "gru": _recurrent(layers.GRU),
}
