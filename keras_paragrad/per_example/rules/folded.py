"""Per-example gradients of depthwise kernels, with the batch folded into the channels.

A tap is a spatial position of the kernel. A chunk is the examples that are folded together.

A depthwise convolution does not mix channels. So examples can be stacked as the channels of one image, and the image's
kernel gradient holds each example's gradient. Rochette et al., https://arxiv.org/abs/1912.06015.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.types import Scalar
from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rules.windows import Geometry, pad_images

# Input entries of the examples that are folded together.
CHUNK = 2**19
# Examples per chunk if the images' size is unknown.
EXAMPLES = 32


def traced_once(compute: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Lets layers of the same sizes share one traced function: tracing a loop for each took a third of a first step."""

    @functools.cache
    def function_of(geometry: Geometry, shape: tuple[int, ...]) -> Callable[..., tf.Tensor]:
        return tf.function(functools.partial(compute, geometry=geometry, shape=shape), autograph=False)

    @functools.wraps(compute)
    def computed(inputs: tf.Tensor, cotangents: tf.Tensor, geometry: Geometry, shape: Sequence[int]) -> tf.Tensor:
        return function_of(geometry, tuple(shape))(inputs, cotangents)

    return computed


@traced_once
def depthwise_gradients(
    inputs: tf.Tensor, cotangents: tf.Tensor, geometry: Geometry, shape: Sequence[int]
) -> tf.Tensor:
    """The per-example kernel gradients of a depthwise convolution.

    Args:
        inputs: The layer's inputs, `(batch, *spatial, channels)` with one or two spatial axes.
        cotangents: The loss's gradient with respect to its outputs, in the same layout.
        geometry: Where the windows are.
        shape: The kernel's shape.

    Returns:
        `(batch, *shape)`
    """
    *taps, channels, multiplier = shape

    def compute_chunk(count: Scalar, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        gradients = _depthwise_gradient(_stack_channels(inputs), _stack_channels(cotangents), geometry, multiplier)
        split = tf.reshape(gradients, [*taps, count, channels, multiplier])
        rank = len(shape)
        return tf.transpose(split, [rank - 2, *range(rank - 2), rank - 1, rank])

    return _map_chunks(compute_chunk, inputs, cotangents, shape)


def can_fold(call: Call) -> bool:
    """Whether the batch of a convolution's call can be folded: in float32 on CPUs without XLA; others are untested."""
    layer = call.layer
    supported_layout = (
        layer.data_format == "channels_last" and layer.padding != "causal" and call.input.shape.rank in (3, 4)
    )
    # TensorFlow's depthwise convolutions need equal strides on both axes, and can't have strides and dilation at once.
    (stride, *strides), (dilation, *dilations) = layer.strides, layer.dilation_rate
    supported_steps = set(strides) <= {stride} and set(dilations) <= {dilation} and 1 in (stride, dilation)
    on_cpu = not call.by_xla and not tf.config.list_logical_devices("GPU")
    return supported_layout and supported_steps and on_cpu and call.input.dtype == tf.float32


def _depthwise_gradient(image: tf.Tensor, cotangent: tf.Tensor, geometry: Geometry, multiplier: int) -> tf.Tensor:
    """The kernel's gradient for one image of many channels, `(*taps, channels, multiplier)` with two axes of taps.

    It is a convolution with the cotangent: a tap's gradient sums pixels times cotangents.
    """
    dynamic = tf.shape(cotangent)
    sizes: Any = [dynamic[axis] if cotangent.shape[axis] is None else cotangent.shape[axis] for axis in (1, 2)]
    kernel_size, strides, dilations = map(_two_axes, geometry[:3])
    plane = Geometry(kernel_size, strides, dilations, geometry.padding)
    height, width = (
        (size - 1) * stride + (taps - 1) * dilation + 1
        for size, taps, stride, dilation in zip(sizes, kernel_size, strides, dilations, strict=True)
    )
    image = pad_images(image, plane, sizes)[:, :height, :width]
    kernel = tf.reshape(cotangent, [*sizes, -1, multiplier])
    # The kernel is now the cotangent, whose pixels are a stride apart; windows, one for each tap, are a dilation apart.
    dilation, stride = dilations[1], strides[1]
    return tf.nn.depthwise_conv2d(image, kernel, [1, dilation, dilation, 1], "VALID", dilations=[stride, stride])


def _map_chunks(
    compute_chunk: Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor],
    inputs: tf.Tensor,
    cotangents: tf.Tensor,
    shape: Sequence[int],
) -> tf.Tensor:
    """The results of all examples, `(batch, *shape)`, computed in chunks.

    `compute_chunk` maps a chunk's number of examples, inputs and cotangents to `(count, *shape)`.
    """
    batch: Any = tf.shape(inputs)[0] if inputs.shape[0] is None else inputs.shape[0]
    entries = inputs.shape[1:].num_elements()
    chunk_size = max(1, CHUNK // entries) if entries else EXAMPLES
    # An even number of equal chunks, so that two threads finish together; for an empty batch, one example of zeros.
    pairs = tf.maximum(-(-batch // (2 * chunk_size)), 1)
    count = tf.maximum(-(-batch // (2 * pairs)), 1)

    def run_chunk(start: tf.Tensor) -> tf.Tensor:
        chunk = [side[start : start + count] for side in (inputs, cotangents)]
        missing: Any = count - tf.shape(chunk[0])[0]
        chunk = [tf.pad(side, [[0, missing], *[[0, 0]] * (side.shape.rank - 1)]) for side in chunk]
        return compute_chunk(count, *chunk)

    starts = tf.range(0, tf.maximum(batch, 1), count)
    gradients = tf.map_fn(run_chunk, starts, fn_output_signature=tf.TensorSpec([None, *shape], inputs.dtype))
    return tf.reshape(gradients, [-1, *shape])[:batch]


def _stack_channels(images: tf.Tensor) -> tf.Tensor:
    """`(count, *spatial, channels)` as one image `(1, height, width, count x channels)`."""
    if images.shape.rank == 3:
        images = images[:, tf.newaxis]
    dynamic = tf.shape(images)
    image = tf.reshape(tf.transpose(images, [1, 2, 0, 3]), [1, dynamic[1], dynamic[2], -1])
    return tf.ensure_shape(image, [1, *images.shape[1:3], None])


def _two_axes(sizes: Sequence[int]) -> list[int]:
    """Sizes along two axes, for one or two."""
    return [1, *sizes][-2:]
