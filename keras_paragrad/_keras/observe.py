"""Gradients on their way from the backward pass to the weights, shown to whoever wants to see them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad._keras.apply import unscaled
from keras_paragrad._keras.optimizer import WrappingOptimizer
from keras_paragrad._keras.replicas import replica_count, replica_index

_WINDOW = "_keras_paragrad_window"


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
        observe: Who wants to see them; nobody, if `None`.
        rows: How many examples this replica has.
    """
    if observe is None:
        yield
        return
    optimizer = unscaled(model.optimizer)
    # Replicas are traced in turns, each up to where they meet: the first in opens the window, the last out closes it.
    window = optimizer.__dict__.setdefault(_WINDOW, _Window(optimizer, observe))
    window.enter(rows)
    try:
        yield
    finally:
        if window.leave():
            del optimizer.__dict__[_WINDOW]


class _Window:
    """An optimizer's methods, replaced by ones that show the gradients they are called with."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, observe: Observe):
        self.optimizer, self.observe = optimizer, observe
        self.rows: dict[int, tf.Tensor] = {}
        self.inside = 0
        self.replaced = contextlib.ExitStack()

    def enter(self, rows: tf.Tensor) -> None:
        """Opens it, if it is not, and takes note of this replica's rows."""
        self.rows[replica_index()] = rows
        if not self.inside:
            self._replace()
        self.inside += 1

    def leave(self) -> bool:
        """Closes it, if no other replica is inside, and says so."""
        self.inside -= 1
        if not self.inside:
            self.replaced.close()
        return not self.inside

    def _replace(self) -> None:
        optimizer: Any = self.optimizer
        if isinstance(optimizer, WrappingOptimizer):
            self._before(optimizer.inner_optimizer, self.observe.update)
        elif replica_count() == 1:
            self._before(optimizer, self.observe.update)
        else:
            self._after_reduction(optimizer)
        # Last, so that it is called first.
        self._before(optimizer, self._gradient)

    def _gradient(self, gradients: Sequence[Any]) -> None:
        self.observe.gradient(gradients, self.rows[replica_index()])

    def _before(self, optimizer: Any, show: Callable[[Sequence[Any]], None]) -> None:
        original = optimizer.apply

        def shown(gradients, *arguments, **keywords):
            gradients = list(gradients)
            show(gradients)
            return original(gradients, *arguments, **keywords)

        self.replaced.enter_context(_replaced(optimizer, "apply", shown))

    def _after_reduction(self, optimizer: Any) -> None:
        original = optimizer._all_reduce_sum_gradients

        def shown(grads_and_vars):
            reduced = list(original(grads_and_vars))
            self.observe.update([gradient for gradient, _ in reduced])
            return reduced

        self.replaced.enter_context(_replaced(optimizer, "_all_reduce_sum_gradients", shown))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__.get(name)
    owner.__dict__[name] = value
    try:
        yield
    finally:
        del owner.__dict__[name]
        if before is not None:
            owner.__dict__[name] = before
