"""`Storage`: where a variable's value lives, and all that steps, optimizers, windows and backups ask of it."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import run_if
from keras_paragrad.compat.layers import compiled_by_xla
from keras_paragrad.compat.local import Place
from keras_paragrad.storage.row_gradients import sum_gradients


class Parts(NamedTuple):
    """How the value of a variable is written to files: by each worker those parts that it has.

    Attributes:
        size: How many elements a part has; all of them together are the whole, flat and padded.
        read: Reads this worker's parts, one after the other.
    """

    size: int
    read: Callable[[], Iterator[np.ndarray]]


class Storage(Protocol):
    """Where a variable's value lives; what a class leaves out is as for one that is whole on every replica.

    Attributes:
        variable: The variable, of Keras's or TensorFlow's.
        divided: Whether each replica holds a part. Then gradients are reduced before they are accumulated.
        replaces: Whether the first gradient of a window can replace an accumulator's value, which is zeroed otherwise.
        mesh: The mesh that functions have to run on which compute with it, or `None`.
    """

    variable: Any
    divided: bool = False
    replaces: bool = True
    mesh: Any = None

    @property
    def local(self) -> Any:
        """The variable of TensorFlow's that holds what this replica has of the value."""
        return self.variable.value

    def read(self) -> tf.Tensor:
        """The whole value."""
        return tf.convert_to_tensor(self.local)

    def recompute(self) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """The least that this replica has to keep to read the value again, and what makes the value of it."""
        return tf.identity(self.read()), lambda kept: kept

    def is_replicated(self) -> bool:
        """Whether all replicas hold the same whole value."""
        return getattr(self.local, "synchronization", None) != tf.VariableSynchronization.ON_READ

    @staticmethod
    def reduce(gradients: Sequence[Any], storages: Sequence[Any]) -> list[Any]:
        """Sums whole gradients over the replicas, those of several storages of this class in one exchange."""
        return sum_gradients(gradients)

    def gather(self, gradient: Any) -> Any:
        """The whole of a reduced gradient."""
        return gradient

    def scatter(self, gradient: Any) -> Any:
        """What this replica updates with, of a whole gradient."""
        return gradient

    def square(self, gradient: tf.Tensor) -> tf.Tensor:
        """The squared norm of what this replica has of a reduced gradient."""
        return tf.reduce_sum(tf.square(gradient))

    def accumulate(self, gradient: Any, scale: Any, first: Any) -> None:
        """Adds a gradient, times a scale if that is not `None`, to the value of an accumulator.

        Args:
            gradient: Dense or `tf.IndexedSlices`.
            scale: A scalar or `None`.
            first: Whether a dense one replaces the value, a scalar; if it can at all.
        """
        target = self.local

        def scaled() -> Any:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            return values if scale is None else values * tf.cast(scale, values.dtype)

        def add() -> None:
            # A scaled addition in one pass over memory: the same operation as a step of gradient descent.
            alpha = -tf.cast(1.0 if scale is None else scale, gradient.dtype)
            tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=alpha, delta=gradient)

        if isinstance(gradient, tf.IndexedSlices):
            # Under a strategy the variable has no `scatter_add`.
            tf.raw_ops.ResourceScatterAdd(resource=target.handle, indices=gradient.indices, updates=scaled())
        elif compiled_by_xla():
            # It fuses both, and in a branch copies the accumulator.
            target.assign(tf.where(first, scaled(), target + scaled()))
        else:
            run_if(first, lambda: target.assign(scaled()), add)

    def reset(self, first: Any) -> None:
        """Zeroes the value of an accumulator, if a scalar or a Python bool says so."""
        zeros = functools.partial(tf.zeros, self.local.shape, self.local.dtype)
        if first is not True and compiled_by_xla():
            self.local.assign(tf.where(first, zeros(), self.local))
        else:
            run_if(first, lambda: self.local.assign(zeros()))

    def takes_steps_of(self, optimizer: Any) -> bool:
        """Whether the step of a Keras optimizer may be taken with it as with any variable."""
        return True

    def update(self, optimizer: Any, gradient: Any, learning_rate: Any, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Takes an optimizer's step after some tensors, and returns those that the next one has to wait for."""
        type(optimizer)._backend_update_step(optimizer, [gradient], [self.variable], learning_rate)
        return list(after)

    def updating(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which optimizers update the value, entered outside of the replicas."""
        return contextlib.nullcontext()

    def refresh(self) -> None:
        """Ends an update, on every replica."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which functions run that compute with the value."""
        return contextlib.nullcontext()

    def parts(self, place: Place) -> Parts | None:
        """How a worker writes its parts of the value to files, or `None` if the chief writes the whole."""
        return None


class Whole(Storage):
    """The storage of a variable that is whole on every replica."""

    def __init__(self, variable: Any):
        self.variable = variable


def storage_of(variable: keras.Variable) -> Storage:
    """The storage of a Keras variable: what the attribute `storage` of its value is, or else `Whole`."""
    try:
        # Distributed variables look for attributes in a replica's, which reads some of them.
        return object.__getattribute__(variable._value, "storage")
    except AttributeError:
        return Whole(variable)
