"""Checks an accumulating optimizer's arguments and its model, with errors that suggest code."""

import difflib

import keras

from keras_paragrad.arguments import MOST_PARTS, check_integer, refusal
from keras_paragrad.compat.model import other_optimizers, overrides_train_step
from keras_paragrad.compat.optimizer import accumulation_steps, find_accumulator, unwrap_loss_scale
from keras_paragrad.compat.state import warn
from keras_paragrad.compat.types import Config
from keras_paragrad.engine.losses.refusals import warn_of_batch_statistics

WEIGHTINGS = ("auto", "uniform", "examples", "sample_weight", "mask", "sum")
# Slices of a batch are always weighted by their normalizers, never uniformly.
SLICE_WEIGHTINGS = tuple(name for name in WEIGHTINGS if name != "uniform")
TAILS = ("flush", "carry", "drop")
ACCUMULATOR_DTYPES = ("float32", "float64", "bfloat16", "float16", None)


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
        "ExactAccumulation() needs a model that is compiled with an AccumulatingOptimizer; this one has "
        f"{_optimizer_name(model.optimizer)}."
    )
    if overrides_train_step(model) and other_optimizers(model):
        return (
            f"{problem} Its train_step updates weights with other optimizers, whose updates may follow each other, so "
            "its micro-batches can't be accumulated one after the other. Leave ExactAccumulation() out, give fit() the "
            "batch_size of an update, and write this before fit(), with the number of rows that fit into memory:\n"
            "keras_paragrad.microbatch(model, size=4)"
        )
    if model.optimizer is None:
        return f"{problem} Write model.compile(keras_paragrad.AccumulatingOptimizer('adam', steps=4), loss=...)."
    return f"{problem} Write this before fit(), with the other arguments of your compile():\n{_recompile_code(model)}"


def recommend_callback(name: str, model: keras.Model | None) -> None:
    """Warns that an accumulating optimizer is inexact without `ExactAccumulation`.

    Args:
        name: The optimizer's name.
        model: The model that it trains, or `None` if unknown.
    """
    if model is not None and any(find_accumulator(inner) for inner in other_optimizers(model)):
        warn(
            f"{name}, which {type(model).__name__} isn't compiled with, weights all micro-batches equally, and its "
            "windows continue across epochs. ExactAccumulation() takes the model's own optimizer alone. Use the inner "
            "optimizer, give fit() the batch_size of an update, and write keras_paragrad.microbatch(model, size=4), "
            "with the number of rows that fit into memory. For even micro-batches, write weighting='uniform'.",
        )
        return
    warn(
        f"{name} weights all micro-batches equally, and its windows continue across epochs, so uneven or weighted "
        "micro-batches and an epoch's last ones are not trained on as one batch. In fit(), pass "
        "callbacks=[keras_paragrad.ExactAccumulation()], which is faster as well. In a custom training loop, write "
        "weighting='uniform', and call optimizer.flush() to close the last window.",
    )
    if model is not None:
        warn_of_batch_statistics(model)


def _optimizer_name(optimizer: keras.optimizers.Optimizer | None) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__


def _recompile_code(model: keras.Model) -> str:
    """The code that compiles a model with its one optimizer wrapped, to accumulate."""
    scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    # A LossScaleOptimizer belongs outside the wrapper; compile() adds it again if the dtype policy requires it.
    name = "model.optimizer.inner_optimizer" if scales else "model.optimizer"
    # What its own step divides by has to be stated, and nearly all divide by the number of examples.
    stated = ", weighting='examples'" if overrides_train_step(model) else ""
    wrapped = f"keras_paragrad.AccumulatingOptimizer({name}, steps=4{stated})"
    return "\n".join(
        [
            *_turn_off_own(unwrap_loss_scale(model.optimizer), name),
            f"model.compile({wrapped}, loss=model.loss)",
        ]
    )


def _turn_off_own(optimizer: keras.optimizers.Optimizer, name: str) -> list[str]:
    """Lines that turn off Keras's own accumulation in an optimizer."""
    return [f"{name}.gradient_accumulation_steps = None"] if accumulation_steps(optimizer) > 1 else []
