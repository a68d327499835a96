"""The arguments of `AccumulatingOptimizer`, checked before anything is built on them."""

import logging
from typing import Any

import keras

from keras_paragrad._keras.apply import parts
from keras_paragrad._keras.optimizer import WrappingOptimizer

_log = logging.getLogger("keras_paragrad")

CHOICES = {
    "weighting": ("auto", "uniform", "examples", "sample_weight", "mask"),
    "tail": ("flush", "carry", "drop"),
    "accumulator_dtype": ("float32", "float64", "bfloat16", "float16", None),
    "skip_nonfinite": (True, False),
}


def check_choices(**arguments: Any) -> None:
    """Raises a `ValueError` for the first argument that is none of its `CHOICES`."""
    for name, value in arguments.items():
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in CHOICES[name]):
            *others, last = (repr(choice) for choice in CHOICES[name])
            raise ValueError(f"`{name}` is {value!r}. Write {name}= one of {', '.join(others)} or {last}.")


def checked_inner(inner_optimizer: Any) -> keras.optimizers.Optimizer:
    """The optimizer that was named, configured or handed over, if it can be wrapped.

    Raises:
        ValueError: It is none, scales the loss, or accumulates already.
    """
    inner = keras.optimizers.get(inner_optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"`inner_optimizer` is {inner_optimizer!r}, and must be a Keras optimizer: a name such as 'adam', a config "
            "or an instance."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` is a LossScaleOptimizer, which must see every micro-batch and so belongs outside. Write "
            "LossScaleOptimizer(AccumulatingOptimizer(inner)), or leave it to compile(), which adds it by itself."
        )
    if isinstance(inner, WrappingOptimizer):
        raise ValueError(
            f"`inner_optimizer` is {type(inner).__name__}, which accumulates already. Wrap its optimizer instead: "
            "AccumulatingOptimizer(optimizer.inner_optimizer, steps=...)."
        )
    if any(part.gradient_accumulation_steps for part in parts(inner)):
        raise ValueError(
            f"`inner_optimizer` has gradient_accumulation_steps={inner.gradient_accumulation_steps}, and would "
            "accumulate what has been accumulated. Leave it out there, and write steps= here."
        )
    return inner


def advise_the_callback(name: str) -> None:
    """Tells who uses an accumulating optimizer of this name without `ExactAccumulation` what that would bring."""
    _log.warning(
        "%s counts every micro-batch the same, and lets windows go on from one epoch into the next. Pass "
        "callbacks=[keras_paragrad.ExactAccumulation()] to fit() for uneven and weighted micro-batches, a closed "
        "window before validation and faster steps, or write weighting='uniform' if this is what you want.",
        name,
    )
