"""Checks an accumulating optimizer's arguments and its model, with errors that suggest code."""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import keras

from keras_paragrad.accumulation.window import Steps, StepsSchedule
from keras_paragrad.arguments import (
    MOST_PARTS,
    check_choice,
    check_choice_or_function,
    check_flag,
    check_integer,
    refusal,
)
from keras_paragrad.compat.model import other_optimizers, overrides_train_step
from keras_paragrad.compat.optimizer import accumulation_steps, find_accumulator
from keras_paragrad.compat.state import warn
from keras_paragrad.compat.types import Config
from keras_paragrad.engine.losses.divisors import PARAMETERS, DivisorFunction

Optimizer = TypeVar("Optimizer", bound=keras.optimizers.Optimizer)

WEIGHTINGS = ("auto", "uniform", "examples", "sample_weight", "mask", "sum")
# Slices of a batch are always weighted by their divisors, never uniformly.
SLICE_WEIGHTINGS = tuple(name for name in WEIGHTINGS if name != "uniform")
TAILS = ("flush", "carry", "drop")
ACCUMULATOR_DTYPES = ("float32", "float64", "bfloat16", "float16", None)


class WindowOptions(NamedTuple):
    """The arguments of an `AccumulatingOptimizer`, beside the optimizer that it wraps."""

    steps: Steps = 1
    weighting: str | DivisorFunction = "auto"
    tail: str = "flush"
    accumulator_dtype: str | None = "float32"
    skip_nonfinite: bool = False

    @classmethod
    def checked(cls, *arguments: Any) -> "WindowOptions":
        """Checks the arguments, in this order."""
        steps, weighting, tail, accumulator_dtype, skip_nonfinite = arguments
        return cls(
            StepsSchedule(steps).steps,
            check_choice_or_function("weighting", weighting, WEIGHTINGS, PARAMETERS),
            check_choice("tail", tail, TAILS),
            check_choice("accumulator_dtype", accumulator_dtype, ACCUMULATOR_DTYPES),
            check_flag("skip_nonfinite", skip_nonfinite),
        )

    def applied_to(self, kind: Callable[..., Optimizer], inner: keras.optimizers.Optimizer) -> Optimizer:
        """An optimizer of a class that wraps `inner`, with these arguments."""
        return kind(inner, **self._asdict())

    @property
    def described(self) -> str:
        """The arguments that aren't the default ones, as they are typed."""
        return ", ".join(
            f"{name}={value!r}" for name, value in self._asdict().items() if value != self._field_defaults[name]
        )


def check_parts(deterministic: object) -> int:
    """Validates the argument `deterministic`: returns the number of parts of a batch, 8 for `True`, or `False`."""
    parts = check_integer("deterministic", deterministic, least=2, most=MOST_PARTS, also=(True, False), example=8)
    return 8 if parts is True else parts


def check_inner_optimizer(inner_optimizer: keras.optimizers.Optimizer | str | Config) -> keras.optimizers.Optimizer:
    """Resolves a name, config or instance to an optimizer that can accumulate.

    Raises:
        ValueError: It is not an optimizer, scales the loss, or already accumulates.
    """
    try:
        inner = keras.optimizers.get(inner_optimizer)
    except Exception as error:  # Keras, or the class named in a config, may raise anything here
        raise _optimizer_refusal(inner_optimizer) from error
    if not issubclass(type(inner), keras.optimizers.Optimizer):
        raise _optimizer_refusal(inner_optimizer)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` is a LossScaleOptimizer, which has to see every micro-batch, and so must be the outer "
            "one. Write LossScaleOptimizer(AccumulatingOptimizer(inner)), or leave it out: compile() adds it if the "
            "dtype policy needs it."
        )
    if find_accumulator(inner):
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


def _optimizer_refusal(value: object) -> ValueError:
    """The error for an argument that is not an optimizer; suggests the optimizer whose name is closest."""
    expected = "a Keras optimizer: its name, its config or an instance"
    kinds = (value for value in vars(keras.optimizers).values() if isinstance(value, type))
    names = [kind.__name__.lower() for kind in kinds if issubclass(kind, keras.optimizers.Optimizer)]
    close = difflib.get_close_matches(value.lower(), names, 1) if isinstance(value, str) else []
    return refusal("inner_optimizer", value, expected, repr(close[0]) if close else "keras.optimizers.Adam(1e-3)")


def missing_accumulation_message(model: keras.Model) -> str:
    """The error for a model compiled without an accumulating optimizer; ends with code that calls the model `model`."""
    problem = (
        f"{model.name!r} is compiled with {_optimizer_name(model.optimizer)}, and ExactAccumulation() doesn't say how "
        "many micro-batches an update takes."
    )
    if overrides_train_step(model) and other_optimizers(model):
        return (
            f"{problem} Its train_step updates weights with other optimizers, whose updates may follow each other, so "
            "its micro-batches can't be accumulated one after the other. Leave ExactAccumulation() out, give fit() the "
            "batch_size of an update, and write this before fit(), with the number of rows that fit into memory:\n"
            "keras_paragrad.microbatch(model, size=4)"
        )
    if model.optimizer is None:
        return f"{problem} Write model.compile('adam', loss=...), and ExactAccumulation(steps=4)."
    # What its own step divides by has to be stated, and nearly all divide by the number of examples.
    stated = ", weighting='examples'" if overrides_train_step(model) else ""
    return f"{problem} Write callbacks=[keras_paragrad.ExactAccumulation(steps=4{stated})]."


def recommend_callback(name: str) -> None:
    """Warns that an accumulating optimizer of this name is inexact without `ExactAccumulation`."""
    warn(
        f"{name} weights all micro-batches equally, and its windows continue across epochs, so uneven or weighted "
        "micro-batches and an epoch's last ones are not trained on as one batch. In fit(), pass "
        "callbacks=[keras_paragrad.ExactAccumulation()], which is faster as well. In a custom training loop, write "
        "weighting='uniform', and call optimizer.flush() to close the last window.",
    )


def _optimizer_name(optimizer: keras.optimizers.Optimizer | None) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__
