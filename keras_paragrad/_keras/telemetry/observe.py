"""Passes gradients to an observer, between the backward pass and the update."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.capabilities import accumulating, unscaled, updating
from keras_paragrad._keras.objects.method_patch import MethodPatch, patch_of, patched
from keras_paragrad._keras.replicas.collectives import replica_count, replica_index
from keras_paragrad._keras.step.forward import scaled_gradient


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
    optimizer = unscaled(model.optimizer)
    with patched(optimizer, lambda: _Window(optimizer, observe)) as window:
        window.rows[replica_index()] = rows
        yield


def show_before_sum(model: keras.Model, gradients: Sequence[Any], share: tf.Tensor) -> None:
    """Shows a replica's gradients if they are all-reduced before the optimizer; called on every replica.

    Args:
        model: The model whose step is traced; nothing happens unless it is `observed`.
        gradients: A gradient for each weight or `None`, with the loss scale and
        share: with what the loss was multiplied besides.
    """
    window = patch_of(unscaled(model.optimizer), _Window)
    if window is not None:
        factor = share * tf.cast(model.optimizer.scale_loss(tf.constant(1.0)), "float32")
        window.sums_first = True
        window.show_own([scaled_gradient(each, tf.math.reciprocal_no_nan(factor)) for each in gradients])


class _Window(MethodPatch):
    """Patches an optimizer's methods to show the gradients they are called with."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, observe: Observe):
        super().__init__()
        self.optimizer, self.observe = optimizer, observe
        self.rows: dict[int, tf.Tensor] = {}
        self.sums_first = False

    def patch_all(self) -> None:
        optimizer: Any = self.optimizer
        if accumulating(optimizer):
            self._before(updating(optimizer), self.observe.update)
        elif replica_count() == 1:
            self._before(optimizer, self.observe.update)
        else:
            self._after_reduction(updating(optimizer))
        # Last, so that it is called first.
        self._before(optimizer, self._arrived)

    def _arrived(self, gradients: Sequence[Any]) -> None:
        if self.sums_first:
            self.observe.update(gradients)
        else:
            self.show_own(gradients)

    def show_own(self, gradients: Sequence[Any]) -> None:
        """Shows the gradients of this replica's examples."""
        self.observe.gradient(gradients, self.rows[replica_index()])

    def _before(self, optimizer: Any, show: Callable[[Sequence[Any]], None]) -> None:
        original = optimizer.apply

        def shown(gradients, trainable_variables=None, **keywords):
            gradients = list(gradients)
            variables = None if trainable_variables is None else list(trainable_variables)
            show(self._without_contribution(gradients, variables))
            return original(gradients, variables, **keywords)

        self.replace(optimizer, "apply", shown)

    def _without_contribution(self, gradients: Sequence[Any], variables: Sequence[Any] | None) -> Sequence[Any]:
        """The gradients without the `Contribution` that an accumulating optimizer gets beside them."""
        accumulator = accumulating(self.optimizer)
        if accumulator is None or variables is None or not self.optimizer.built:
            return gradients
        weight = accumulator.gradient_weight
        return [gradient for gradient, variable in zip(gradients, variables, strict=True) if variable is not weight]

    def _after_reduction(self, optimizer: Any) -> None:
        original = optimizer._all_reduce_sum_gradients

        def shown(grads_and_vars):
            reduced = list(original(grads_and_vars))
            self.observe.update([gradient for gradient, _ in reduced])
            return reduced

        self.replace(optimizer, "_all_reduce_sum_gradients", shown)
