"""Suggested code for a model whose optimizer does not accumulate, or that has several optimizers."""

import warnings
from typing import Any

import keras

from keras_paragrad.compat.capabilities import accumulating, accumulation_steps, unscaled
from keras_paragrad.compat.model import has_own_train_step
from keras_paragrad.engine.losses.normalization import warn_of_batch_statistics


def advice(model: Any) -> str:
    """Error message for a model compiled without an accumulating optimizer; it ends with runnable code.

    Args:
        model: A compiled model, called `model` in that code.
    """
    found = (
        "ExactAccumulation() needs a model that is compiled with an AccumulatingOptimizer; this one has "
        f"{_class_of(model.optimizer)}."
    )
    own = _own_optimizers(model)
    if own:
        return (
            f"{found} Its train_step uses {', '.join(own)}, whose micro-batches can't be weighted. Leave "
            "ExactAccumulation() out, wrap each of these optimizers, and flush them at the end of an epoch. Write this "
            f"before fit(), and pass callbacks=[flush] to it:\n{_lines_for_several(model, own)}"
        )
    if model.optimizer is None:
        return f"{found} Write model.compile(keras_paragrad.AccumulatingOptimizer('adam', steps=4), loss=...)."
    return f"{found} Write this before fit(), with the other arguments of your compile():\n{_lines_for_one(model)}"


def advise_the_callback(name: str, model: Any) -> None:
    """Warns of what `ExactAccumulation` would make exact in an accumulating optimizer that is used without it.

    Args:
        name: The optimizer's.
        model: The model that it is compiled with, if that is known.
    """
    warnings.warn(
        f"{name} weights all micro-batches equally, and its windows continue across epochs, so uneven or weighted "
        "micro-batches and an epoch's last ones are not trained on as one batch. In fit(), pass "
        "callbacks=[keras_paragrad.ExactAccumulation()], which is faster as well. In a custom training loop, write "
        "weighting='uniform', and call optimizer.flush() to close the last window.",
        stacklevel=2,
    )
    if model is not None:
        warn_of_batch_statistics(model)


def _class_of(optimizer: Any) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__


def _own_optimizers(model: Any) -> list[str]:
    """Names of the attributes that hold the optimizers of a custom `train_step`."""
    if not has_own_train_step(model):
        return []
    names = [name for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer)]
    return [name for name in names if name not in ("optimizer", "_optimizer")]


def _lines_for_several(model: Any, names: list[str]) -> str:
    lines = []
    for name in names:
        optimizer = getattr(model, name)
        if accumulating(optimizer) is None:
            lines += _alone(optimizer, f"model.{name}")
            wrapped = f"keras_paragrad.AccumulatingOptimizer(model.{name}, steps=4, weighting='uniform')"
            lines.append(f"model.{name} = {wrapped}")
    flushed = ", ".join(f"model.{name}.flush()" for name in names)
    return "\n".join(
        [
            *lines,
            "model.make_train_function(force=True)",
            f"flush = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: [{flushed}])",
        ]
    )


def _lines_for_one(model: Any) -> str:
    scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    # A LossScaleOptimizer belongs outside the wrapper; compile() adds it again if the dtype policy requires it.
    name = "model.optimizer.inner_optimizer" if scales else "model.optimizer"
    wrapped = f"keras_paragrad.AccumulatingOptimizer({name}, steps=4)"
    return "\n".join([*_alone(unscaled(model.optimizer), name), f"model.compile({wrapped}, loss=model.loss)"])


def _alone(optimizer: Any, name: str) -> list[str]:
    """Lines that turn off Keras's own accumulation in an optimizer."""
    if accumulation_steps(optimizer) > 1:
        return [f"{name}.gradient_accumulation_steps = None"]
    return []
