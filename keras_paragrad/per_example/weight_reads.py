"""Scopes that track which layer reads which weight, so that no use of a weight escapes its rule."""

import contextlib
from collections.abc import Generator, Iterable, Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import assign_now


class WeightReads(keras.StatelessScope):
    """Allows trainable weights to be read only in the calls of the layers that own them.

    Other variables are read and assigned as usual. The losses that layers add are collected in `losses`.

    Args:
        variables: The weights to guard.
        detached: Whether to read them through `tf.stop_gradient`.
    """

    def __init__(self, variables: Sequence[keras.Variable], detached: bool):
        values = [(variable, tf.stop_gradient(variable.value)) for variable in variables] if detached else []
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.watched = {id(variable): variable for variable in variables}
        self.readable: set[int] = set()
        self.overwritten: dict[int, tuple[keras.Variable, tf.Tensor]] | None = None
        self.read_outside: keras.Variable | None = None

    @property
    def is_within_a_unit(self) -> bool:
        """Whether the scope is inside the call of a unit."""
        return bool(self.readable)

    @contextlib.contextmanager
    def by(self, layer: keras.layers.Layer) -> Generator[None]:
        """Allows a layer's weights to be read."""
        previous = self.readable
        self.readable = previous | {id(variable) for variable in layer.trainable_variables}
        try:
            yield
        finally:
            self.readable = previous

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value that a variable is read as; `None` for its stored value."""
        if id(variable) in self.watched and id(variable) not in self.readable:
            self.read_outside = variable
            raise ValueError(
                f"The weight {variable.path!r} is read outside the call of the layer that owns it, so per-example "
                "gradients would miss this use. Wrap the layer that reads it as a whole."
            )
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Assigns at once, as outside of a stateless scope."""
        variable, _ = update
        if self.overwritten is not None and id(variable) not in self.overwritten:
            self.overwritten[id(variable)] = variable, tf.identity(variable.value)
        assign_now(*update)

    @contextlib.contextmanager
    def recording_assignments(self) -> Generator[list[tuple[keras.Variable, tf.Tensor]]]:
        """On exit, fills the yielded list with the variables assigned inside and their previous values."""
        previous, self.overwritten = self.overwritten, {}
        assignments: list[tuple[keras.Variable, tf.Tensor]] = []
        try:
            yield assignments
        finally:
            assignments += self.overwritten.values()
            self.overwritten = previous


class LossReads(WeightReads):
    """Refuses reads of trainable weights while the class `owner` computes a loss."""

    def __init__(self, variables: Sequence[keras.Variable], owner: str):
        super().__init__(variables, detached=False)
        self.owner = owner

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        if id(variable) in self.watched:
            raise ValueError(
                f"The compute_loss of {self.owner} reads the weight {variable.path!r}, so per-example gradients would "
                "miss this use. Compute what needs the weight in call(), return it along with the predictions, and use "
                "it in compute_loss."
            )
        return super().get_current_value(variable)


def fixed_weights(values: Iterable[tuple[keras.Variable, tf.Tensor]]) -> keras.StatelessScope:
    """A scope in which weights have the given values, nothing is assigned and no loss is added."""
    return keras.StatelessScope(list(values), initialize_variables=False)
