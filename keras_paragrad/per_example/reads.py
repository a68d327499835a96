"""Who reads which weight: so that none is used behind a rule's back."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.layers import assign_now


class WeightReads(keras.StatelessScope):
    """Within it, trainable weights are read only in the calls of the layers that own them.

    Other variables are read and assigned as ever, and losses that layers add are kept in `losses`.

    Args:
        variables: The weights to watch over.
        detached: Whether they are read without a gradient going back to them.
    """

    def __init__(self, variables: Sequence[keras.Variable], detached: bool):
        values = [(variable, tf.stop_gradient(variable.value)) for variable in variables] if detached else []
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.watched = {id(variable): variable for variable in variables}
        self.readable: set[int] = set()
        self.overwritten: dict[int, tuple[keras.Variable, Any]] | None = None
        self.read_outside: keras.Variable | None = None

    @property
    def is_within_a_unit(self) -> bool:
        """Whether a unit is being called."""
        return bool(self.readable)

    @contextlib.contextmanager
    def by(self, layer: keras.layers.Layer) -> Iterator[None]:
        """Lets a layer's weights be read."""
        before = self.readable
        self.readable = before | {id(variable) for variable in layer.trainable_variables}
        try:
            yield
        finally:
            self.readable = before

    def get_current_value(self, variable: keras.Variable) -> Any:
        """What a weight is read as; `None` for its own value."""
        if id(variable) in self.watched and id(variable) not in self.readable:
            self.read_outside = variable
            raise ValueError(
                f"The weight {variable.path!r} is read outside of the call of the layer that owns it, and the "
                "gradients of the examples would lack what happens there. Wrap the layer that reads it as a whole."
            )
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Assigns at once, as outside of a scope."""
        variable, _ = update
        if self.overwritten is not None and id(variable) not in self.overwritten:
            self.overwritten[id(variable)] = variable, tf.identity(variable.value)
        assign_now(*update)

    @contextlib.contextmanager
    def noting_assignments(self) -> Iterator[list[tuple[keras.Variable, Any]]]:
        """Fills the yielded list, when left, with the variables assigned within and the values they had before."""
        before, self.overwritten = self.overwritten, {}
        noted: list[tuple[keras.Variable, Any]] = []
        try:
            yield noted
        finally:
            noted += self.overwritten.values()
            self.overwritten = before


class LossReads(WeightReads):
    """Within it, a loss is computed, and trainable weights may not be read at all.

    Args:
        variables: The weights to watch over.
        owner: Whose `compute_loss` it is, for the error.
    """

    def __init__(self, variables: Sequence[keras.Variable], owner: str):
        super().__init__(variables, detached=False)
        self.owner = owner

    def get_current_value(self, variable: keras.Variable) -> Any:
        """What a weight is read as; `None` for its own value."""
        if id(variable) in self.watched:
            raise ValueError(
                f"The compute_loss of {self.owner} reads the weight {variable.path!r}, and the examples' gradients "
                "would lack what it does there. Do in call() what needs weights, return its result beside the "
                "predictions, and use it in compute_loss."
            )
        return super().get_current_value(variable)


class Weights(keras.StatelessScope):
    """Within it, weights have the values given, nothing is assigned, and no loss is added.

    Args:
        values: Pairs of a weight and what it is read as.
    """

    def __init__(self, values: Any):
        super().__init__(values, initialize_variables=False)
