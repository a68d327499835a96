"""What fills the stages of a step."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import keras

from keras_paragrad._keras.losses.normalization import LossNormalization
from keras_paragrad._keras.step.gradient import Gradient
from keras_paragrad._keras.step.uncut import Foreseen


class Spread(NamedTuple):
    """Fills the *take* and *log* stages: how a batch is spread over replicas.

    Attributes:
        normalize: Measures what a replica's gradient counts for, or `None` if those of all count the same.
        by_xla: Whether XLA compiles each replica's forward and backward pass.
        foreseen: On one replica, says what more of them would refuse.
    """

    normalize: LossNormalization | None = None
    by_xla: bool = False
    foreseen: Foreseen | None = None


class Split(Protocol):
    """Fills the *split* stage: a batch cut into slices, and its gradient put together again."""

    size: int
    normalize: LossNormalization

    @property
    def foreseen(self) -> Foreseen:
        """Says of batches that are one slice what several would refuse."""
        ...

    def cuts(self, data: Any) -> bool | None:
        """Whether a batch has more examples than a slice; `None` where its shapes don't say."""
        ...

    def __call__(self, model: keras.Model, gradient_of_slice: Callable[[Any], Gradient], data: Any) -> Gradient:
        """The gradient of a batch, from those of its slices."""
        ...


class Apply(Protocol):
    """Fills the *combine* and *apply* stages: when gradients that were gathered reach the weights."""

    @property
    def foreseen(self) -> Foreseen | None:
        """Where each batch makes an update by itself, says what several would refuse."""
        ...

    def plan(self, batches: int) -> list[bool]:
        """Whether each of the next batches ends with an update; asked by the host before they are run."""
        ...

    def ended(self, batches: int, exhausted: bool) -> None:
        """Tells that the planned batches have run, or that the data ran out before the first of them."""
        ...

    def skipped(self, batches: int) -> None:
        """Tells that so many batches of the epoch were taken and not run, as training has seen them already."""
        ...

    def gathering(self, gradient: Gradient | None) -> contextlib.AbstractContextManager[Any]:
        """The context in which the optimizer gathers a gradient, or those of a `train_step` that can't be seen into."""
        ...

    def end(self, update: bool) -> None:
        """Ends the step on this replica, with an update or without."""
        ...
