"""`RepeatableCall`: a call of a function that calls layers, as a function of tensors and of the state it assigns."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import CallState, ReadScope, dense_parts, full_precision, mask_of, pack_dense_parts
from keras_paragrad.compat.private import get_stateless_scope
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.calls.divided import Result
from keras_paragrad.storage.storage import storage_of


class RepeatableCall:
    """A call that runs again in the backward pass, with the same random numbers and without another effect.

    Args:
        call: The function.
        name: Its name in errors.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
        once: Whether some of the layers that it calls may be recomputed within it.
        reason: Why a layer can't assign to a weight in it, and what to do instead.
    """

    def __init__(
        self,
        call: Callable[..., Structure],
        name: str,
        arguments: tuple[Structure, ...],
        keywords: dict[str, Any],
        *,
        once: bool,
        reason: str,
    ):
        self._call, self.name, self._once, self._reason = call, name, once, reason
        self._structure = arguments, keywords
        self._call_state = CallState()
        # The leaves of the arguments, and their masks, which attention removes.
        self.leaves: list[Any] = keras.tree.flatten(self._structure)
        self.masks = [mask_of(leaf) for leaf in self.leaves]
        # The variables of the state.
        self.assigned: list[keras.Variable] = []
        # Found by the last run: the nested outputs and the masks of their leaves, and which state is another.
        self._outputs: Structure = None
        self._output_masks: list[tf.Tensor | None] = []
        self._changed: list[bool] = []

    @property
    def state(self) -> list[tf.Tensor]:
        """The values of the variables that the call assigns."""
        return [load(stored) for stored, load in map(stored_value, self.assigned)]

    def run(
        self, leaves: list[Any], values: list[tuple[keras.Variable, tf.Tensor]], state: list[tf.Tensor]
    ) -> tuple[Result, ReadScope]:
        """Runs the function on `leaves` as its arguments; variables have the given values, and the state.

        Returns:
            The tensors and then the masks of the outputs, the losses that layers add, and the state; and the scope.
        """
        arguments, keywords = keras.tree.pack_sequence_as(self._structure, leaves)
        values = [*values, *zip(self.assigned, state, strict=True)]
        with self._call_state.entered(), ReadScope(self.name, values, self._reason, once=self._once) as scope:
            self._outputs = self._call(*arguments, **keywords)
        after = [scope.get_current_value(variable) for variable in self.assigned]
        self._changed = [one is not other for one, other in zip(after, state, strict=True)]
        outputs = keras.tree.flatten(self._outputs)
        self._output_masks = [mask_of(leaf) for leaf in outputs]
        masks = [mask for mask in self._output_masks if mask is not None]
        return Result(
            [part for leaf in outputs for part in dense_parts(leaf)] + masks, list(scope.losses), after
        ), scope

    def finish(self, result: Result) -> Structure:
        """Assigns the state of a result, and returns the nested outputs."""
        for variable, value, changed in zip(self.assigned, result.state, self._changed, strict=True):
            if changed:
                variable.assign(value)
        remaining, leaves = iter(result.rows), keras.tree.flatten(self._outputs)
        parts = [[next(remaining) for _ in dense_parts(leaf)] for leaf in leaves]
        masks = [None if mask is None else next(remaining) for mask in self._output_masks]
        return keras.tree.pack_sequence_as(self._outputs, pack_dense_parts(leaves, parts, masks))


def stored_value(variable: keras.Variable) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """A tensor to keep for a variable, such as a shard, and a function that makes of it what layers read."""
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    if value is not None:
        return tf.identity(tf.convert_to_tensor(value)), lambda tensor: tensor
    with full_precision():
        return storage_of(variable).recompute()
