"""Passes gradients to an observer, between the backward pass and the update."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import accumulating, updating
from keras_paragrad.compat.collectives import replica_count, replica_index
from keras_paragrad.compat.method_patch import MethodPatch, patch_of, patched
from keras_paragrad.storage.row_gradients import scale_gradient


class Observe(Protocol):
    """Sees gradients within the step, on each replica; they have no loss scale any more."""

    def gradient(self, gradients: Sequence[Any], rows: tf.Tensor) -> None:
        """A gradient for each weight or `None`, as the replica's backward pass made it, and its examples' number."""
        ...

    def update(self, gradients: Sequence[Any]) -> None:
        """A gradient for each weight or `None`, as it updates the weights: of the whole window, of all replicas."""
        ...


@contextlib.contextmanager
def observed(model: keras.Model, observe: Observe | None, rows: tf.Tensor) -> Iterator[None]:
    """While a step is traced in it, shows the gradients that reach the model's optimizer; entered on every replica.

    Args:
        model: A compiled model.
        observe: The observer; none, if `None`.
        rows: How many examples this replica has.
    """
    if observe is None:
        yield
        return
    with patched(updating(model.optimizer), lambda: Observation(model.optimizer, observe)) as observation:
        observation.rows[replica_index()] = rows
        yield


def observe_gradient(optimizer: Any, gradients: Sequence[Any]) -> None:
    """Shows the gradients of a replica's micro-batch, without loss scale, if its step is `observed`."""
    observation = patch_of(updating(optimizer), Observation)
    if observation is not None:
        observation.show_gradient(gradients)


def observe_before_sum(model: keras.Model, gradients: Sequence[Any], share: tf.Tensor) -> None:
    """Shows a replica's gradients if they are all-reduced before the optimizer; called on every replica.

    Args:
        model: The model whose step is traced; nothing happens unless it is `observed`.
        gradients: A gradient for each weight or `None`, with the loss scale and
        share: with what the loss was multiplied besides.
    """
    observation = patch_of(updating(model.optimizer), Observation)
    if observation is not None:
        factor = share * tf.cast(model.optimizer.scale_loss(tf.constant(1.0)), "float32")
        observation.shown_before = True
        observation.show_gradient([scale_gradient(each, tf.math.reciprocal_no_nan(factor)) for each in gradients])


class Observation(MethodPatch):
    """Who observes the step that is being traced; kept by the innermost optimizer.

    Attributes:
        rows: How many examples each replica has.
        shown_before: Whether the gradients of replicas' micro-batches are shown before they reach that optimizer.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, observe: Observe):
        super().__init__()
        self.optimizer, self.observer = updating(optimizer), observe
        self.rows: dict[int, tf.Tensor] = {}
        self.shown_before = accumulating(optimizer) is not None

    def patch_all(self) -> None:
        # Keras sums the gradients of replicas within `apply`.
        if replica_count() > 1 and not self.shown_before:
            self.replace(self.optimizer, "_all_reduce_sum_gradients", self._sum)

    def show_gradient(self, gradients: Sequence[Any]) -> None:
        """Shows the gradients of this replica's examples."""
        self.observer.gradient(gradients, self.rows[replica_index()])

    def show(self, gradients: Sequence[Any]) -> None:
        """Shows the gradients with which an update begins."""
        if not self.shown_before:
            self.show_gradient(gradients)
        if self.shown_before or replica_count() == 1:
            self.observer.update(gradients)

    def _sum(self, grads_and_vars: Any) -> list[Any]:
        optimizer: Any = self.optimizer
        summed = list(type(optimizer)._all_reduce_sum_gradients(optimizer, grads_and_vars))
        self.observer.update([gradient for gradient, _ in summed])
        return summed
