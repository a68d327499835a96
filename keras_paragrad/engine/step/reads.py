"""Layers that read tensors where they would read variables."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope


class Reads(keras.StatelessScope):
    """Context in which layers read variables from tensors, and which keeps what they assign.

    Args:
        name: What errors call the layers.
        values: The variables, and for each the tensor that is read.
        why: Why a layer can't assign to a weight here, and what to do instead.
        once: Whether the layers are run here for the first time, so that some of them may be recomputed.

    Attributes:
        missing: Variables that were used without a tensor to read from, by their ids.
    """

    def __init__(self, name: str, values: Sequence[tuple[keras.Variable, tf.Tensor]], why: str, *, once: bool = False):
        super().__init__(state_mapping=values, collect_losses=True, initialize_variables=False)
        self.name, self.values, self.why, self.once = name, list(values), why, once
        self.missing: dict[int, keras.Variable] = {}
        self._known = {id(variable) for variable, _ in values}
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def updates(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The variables that were assigned, in the order of the first assignment, with their last values."""
        return [(variable, self.get_current_value(variable)) for variable in self._assigned.values()]

    def get_current_value(self, variable: keras.Variable) -> Any:
        self._look(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        self._look(variable)
        if variable.trainable:
            raise ValueError(f"{self.name!r} assigns to its weight {variable.path!r} when it is called, and {self.why}")
        self._assigned.setdefault(id(variable), variable)
        # As if it were read from a variable.
        super().add_update((variable, tf.stop_gradient(value)))

    def _look(self, variable: keras.Variable) -> None:
        if id(variable) not in self._known:
            self.missing[id(variable)] = variable


def reads_here() -> Reads | None:
    """The innermost `Reads` that is open, unless another scope is open in it."""
    scope = get_stateless_scope() if in_stateless_scope() else None
    return scope if isinstance(scope, Reads) else None


def in_scope_of_others() -> bool:
    """Whether layers read from tensors because they are recomputed already, or because Keras or the user says so."""
    reads = reads_here()
    return in_stateless_scope() and not (reads and reads.once)
