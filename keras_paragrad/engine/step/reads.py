"""A scope in which layers read variables from tensors."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope


class ReadScope(keras.StatelessScope):
    """Context in which layers read variables from tensors, and which collects their assignments.

    Args:
        name: The name of the layers in errors.
        values: The variables, each with the tensor to read.
        reason: Why a layer can't assign to a weight here, and what to do instead.
        once: Whether the layers run for the first time, so that some of them may be recomputed.

    Attributes:
        missing: Variables that were used and are not among `values`, by id.
    """

    def __init__(
        self, name: str, values: Sequence[tuple[keras.Variable, tf.Tensor]], reason: str, *, once: bool = False
    ):
        super().__init__(state_mapping=values, collect_losses=True, initialize_variables=False)
        self.name, self.values, self.reason, self.once = name, list(values), reason, once
        self.missing: dict[int, keras.Variable] = {}
        self._known = {id(variable) for variable, _ in values}
        self._assigned: dict[int, keras.Variable] = {}

    @property
    def updates(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The assigned variables with their last values, in the order of the first assignment."""
        return [(variable, self.get_current_value(variable)) for variable in self._assigned.values()]

    def get_current_value(self, variable: keras.Variable) -> Any:
        self._record_use(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        self._record_use(variable)
        if variable.trainable:
            raise ValueError(
                f"{self.name!r} assigns to its weight {variable.path!r} when it is called, and {self.reason}"
            )
        self._assigned.setdefault(id(variable), variable)
        # As in assignments to variables, through which no gradient flows.
        super().add_update((variable, tf.stop_gradient(value)))

    def _record_use(self, variable: keras.Variable) -> None:
        if id(variable) not in self._known:
            self.missing[id(variable)] = variable


def current_read_scope() -> ReadScope | None:
    """The innermost open scope, if it is a `ReadScope`."""
    scope = get_stateless_scope() if in_stateless_scope() else None
    return scope if isinstance(scope, ReadScope) else None


def in_other_scope() -> bool:
    """Whether layers read from tensors for another reason: Keras, the user, or a recomputation around them."""
    scope = current_read_scope()
    return in_stateless_scope() and not (scope and scope.once)
