"""Validation of the arguments of `AccumulatingOptimizer`."""

from typing import Any

import keras

from keras_paragrad.arguments import refusal
from keras_paragrad.compat.capabilities import accumulating, accumulation_steps

WEIGHTINGS = ("auto", "uniform", "examples", "sample_weight", "mask", "sum")
# Slices of a batch are always weighted by their normalizer, never uniformly.
SLICE_WEIGHTINGS = tuple(each for each in WEIGHTINGS if each != "uniform")
TAILS = ("flush", "carry", "drop")
ACCUMULATOR_DTYPES = ("float32", "float64", "bfloat16", "float16", None)


def checked_inner(inner_optimizer: Any) -> keras.optimizers.Optimizer:
    """Resolves a name, config or instance to an optimizer that can be wrapped.

    Raises:
        ValueError: It is not an optimizer, scales the loss, or already accumulates.
    """
    try:
        inner = keras.optimizers.get(inner_optimizer)
    except Exception as error:  # Keras, or the class named in a config, may raise anything here
        raise _no_optimizer(inner_optimizer) from error
    if not issubclass(type(inner), keras.optimizers.Optimizer):
        raise _no_optimizer(inner_optimizer)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` is a LossScaleOptimizer, which has to see every micro-batch, and so must be the outer "
            "one. Write LossScaleOptimizer(AccumulatingOptimizer(inner)), or leave it out: compile() adds it if the "
            "dtype policy needs it."
        )
    if accumulating(inner):
        raise ValueError(
            f"`inner_optimizer` is {type(inner).__name__}, which already accumulates. Wrap its inner optimizer: "
            "AccumulatingOptimizer(optimizer.inner_optimizer, steps=...)."
        )
    if accumulation_steps(inner) > 1:
        raise ValueError(
            f"`inner_optimizer` has gradient_accumulation_steps={accumulation_steps(inner)}, so gradients would be "
            "accumulated twice. Remove that, and write steps= here."
        )
    return inner


def _no_optimizer(found: Any) -> ValueError:
    expected = "a Keras optimizer: its name, its config or an instance"
    return refusal("inner_optimizer", found, expected, "keras.optimizers.Adam(1e-3)")
