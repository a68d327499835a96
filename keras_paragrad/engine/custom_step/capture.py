"""Captures the calls of `optimizer.apply` in a model's own `train_step`."""

import functools
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.optimizer import innermost_optimizer
from keras_paragrad.compat.state import MethodPatch, patched, state_of
from keras_paragrad.compat.types import Gradients

# Receives an optimizer, and the gradients and variables that its `apply` was called with.
Handler = Callable[[keras.optimizers.Optimizer, list[Any], list[keras.Variable]], None]


class _ApplyCapture(MethodPatch):
    """Passes calls of `apply` to each replica's handler: of any optimizer, wherever the step has it from."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.model = model
        self.handlers: dict[int, Handler | None] = {}

    def patch_all(self) -> None:
        for kind in _classes_with_apply(BaseOptimizer):
            original = vars(kind)["apply"]
            self._exits.callback(setattr, kind, "apply", original)
            kind.apply = self._capturing(original)
        innermost = innermost_optimizer(self.model.optimizer)
        if innermost is not None and state_of(innermost).intercepted is not None:
            # The transform of an update replaces `apply` on the instance.
            self.replace(innermost, "apply", functools.partial(self._capturing(_apply_of(innermost)), innermost))

    def _capturing(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply)
        def capture(
            optimizer: keras.optimizers.Optimizer,
            grads: Gradients,
            trainable_variables: Sequence[keras.Variable] | None = None,
            **keywords: Any,
        ) -> Any:
            handler = self.handlers.get(replica_index())
            if handler is None:
                return apply(optimizer, grads, trainable_variables, **keywords)
            variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            handler(optimizer, list(grads), list(variables))
            return None

        return capture


def _apply_of(optimizer: Any) -> Callable[..., None]:
    apply = vars(optimizer)["apply"]
    return lambda _, grads, variables: apply(grads, variables)


def _classes_with_apply(kind: type) -> Iterator[type]:
    """A class and its subclasses, of those that define `apply`."""
    if "apply" in vars(kind):
        yield kind
    for each in kind.__subclasses__():
        yield from _classes_with_apply(each)


@contextmanager
def capturing_applies(model: keras.Model, handler: Handler) -> Generator[Callable[[], Any]]:
    """Context in which calls of any optimizer's `apply` go to a handler instead; entered on every replica.

    Yields a context, within which `apply` updates variables again.
    """
    with patched(model, lambda: _ApplyCapture(model)) as capture:
        replica = replica_index()

        @contextmanager
        def released() -> Generator[None]:
            capture.handlers[replica] = None
            try:
                yield
            finally:
                capture.handlers[replica] = handler

        capture.handlers[replica] = handler
        try:
            yield released
        finally:
            del capture.handlers[replica]


def train_step_of(model: keras.Model) -> Callable[[Any], Any]:
    """A model's `train_step`, without the `tf.function` that it may be decorated with."""
    decorated = type(model).__dict__.get("train_step")
    function = getattr(decorated, "python_function", None)
    if function is None or "train_step" in vars(model):
        return model.train_step
    return types.MethodType(tf.autograph.to_graph(function), model)
