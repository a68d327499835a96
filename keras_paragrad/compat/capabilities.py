"""Capabilities of optimizers, determined by attributes, never by type.

An optimizer that wraps another, as `LossScaleOptimizer` does, holds it in `inner_optimizer`; wrappers nest. One with
`accumulates = True` implements `Accumulating`.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import keras

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class Accumulating(Protocol):
    """An optimizer that accumulates gradients and all-reduces their sum once per update, before clipping."""

    accumulates: bool
    weighting: str

    @property
    def gradient_weight(self) -> keras.Variable:
        """The variable whose gradient, passed to `apply` with the others, is their `Contribution` as a tensor.

        It is overwritten by its gradient, as float8 scales are: wrappers pass such gradients on as they are.
        """
        ...


def nested(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those inside it, from the outermost to the one that updates the weights."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def updating(optimizer: Any) -> Any:
    """The optimizer whose `apply` updates the weights: the innermost."""
    *_, innermost = nested(optimizer)
    return innermost


def parts(optimizer: Any) -> list[Any]:
    """The optimizers that update variables: the innermost, and those that a `MultiOptimizer` delegates to."""
    innermost = updating(optimizer)
    return [innermost, *getattr(innermost, "optimizers", [])]


def unscaled(optimizer: Any) -> Any:
    """The optimizer that a `LossScaleOptimizer` is around, or the optimizer itself."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scaled else optimizer


def accumulating(optimizer: Any) -> Accumulating | None:
    """The nested optimizer that accumulates gradients, or `None`."""
    return next((each for each in nested(optimizer) if getattr(each, "accumulates", False)), None)


def accumulation_steps(optimizer: Any) -> int:
    """The number of gradients per update in Keras's own accumulation; 1 without it."""
    return max(part.gradient_accumulation_steps or 1 for part in parts(optimizer))


def clips(optimizer: Any) -> bool:
    """Whether an optimizer clips gradients."""
    return any(getattr(part, name, None) for part in parts(optimizer) for name in _CLIPPING)
