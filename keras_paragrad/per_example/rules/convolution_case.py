"""The layers on which the rules of convolutions are tested."""

import functools
from typing import Any

import keras

from keras_paragrad.per_example.rule import Pick, RuleCase


def convolution_case(layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
    """A convolution with a stride, a dilation or neither, since TensorFlow has no kernel for both.

    Args:
        layer: A convolution class of any kind.
        pick: See `Rule.case`.
    """
    name = layer.__name__
    rank = next(rank for rank in (1, 2, 3) if f"{rank}D" in name)
    is_depthwise, is_transposed = name.startswith("Depthwise"), name.endswith("Transpose")
    has_multiplier = is_depthwise or name.startswith("Separable")
    channels = pick([2, 1, 4, 16])
    arguments: dict[str, Any] = {
        "kernel_size": tuple(pick([2, 1, 3]) for _ in range(rank)),
        "padding": pick(["same", "valid", "causal"] if name == "Conv1D" else ["same", "valid"]),
        "activation": pick(["tanh", None, "silu"]),
        "use_bias": pick([True, False]),
    }
    spacing = pick(["strides", "dilation_rate", "neither"])
    if spacing == "strides":
        # Depthwise convolutions have one stride for both axes.
        arguments["strides"] = pick([2, 1, 3]) if has_multiplier else tuple(pick([2, 1, 3]) for _ in range(rank))
    elif spacing == "dilation_rate" and not (rank == 3 or is_transposed):
        arguments["dilation_rate"] = pick([2, 1])
    if has_multiplier:
        arguments["depth_multiplier"] = pick([2, 1])
    if not is_depthwise:
        groups = pick([1, 2]) if name in ("Conv1D", "Conv2D") and channels % 2 == 0 else 1
        arguments["filters"] = groups * pick([2, 1, 3, 4])
        if groups > 1:
            arguments["groups"] = groups
    channels_first = pick([True, False]) and rank == 2
    if channels_first:
        arguments["data_format"] = "channels_first"
    sizes = [pick([6, 7, 8]) for _ in range(rank)]
    return RuleCase(functools.partial(layer, **arguments), (channels, *sizes) if channels_first else (*sizes, channels))
