"""Records a layer's call: the tensors that rules compute gradients from, and the weights that the call reads.

A cotangent is the loss's gradient with respect to a tensor. A unit is a layer with weights, whose per-example gradients
one rule computes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import assign_now, mask_of, with_mask


@dataclasses.dataclass
class Call:
    """One recorded call of a layer, with the cotangents of its outputs.

    Attributes:
        layer: The layer.
        arguments: The positional arguments of its `call`.
        keywords: The keyword arguments of its `call`.
        training: Whether it was called in training mode.
        rerun: `rerun(arguments, keywords)` repeats the call with other arguments and returns its outputs.
        recorded: What the rule's `run` stored for its other methods.
        batched: For each of the flattened arguments and keywords, whether it has a row for each example; `None` if
            unknown.
        by_xla: Whether XLA compiles the step, for rules with a faster algorithm in that case.
        outputs: The call's floating-point output tensors, in flattened order.
        cotangents: The loss's gradient with respect to each of `outputs` (to the input of the layer's activation, for
            rules with `before_activation`); set by the backward pass, `None` before it.
        gradients: Per-example gradients `(batch, *shape)` that the rule has cached, if recomputing them is expensive.
        original: The unmodified call, if this is a copy with zeros for examples of weight 0; lets a rule reuse what it
            computed for the norms.
    """

    layer: keras.layers.Layer
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    training: bool
    rerun: Callable[..., Any]
    recorded: Any = None
    batched: Sequence[bool] | None = None
    by_xla: bool = False
    outputs: Sequence[tf.Tensor] = ()
    cotangents: list[tf.Tensor] | None = None
    gradients: list[tf.Tensor] | None = None
    original: "Call | None" = None

    @functools.cached_property
    def input(self) -> tf.Tensor:
        """The first argument, `(batch, ...)`; half precision is cast to float32."""
        return widened(tf.convert_to_tensor((*self.arguments, *self.keywords.values())[0]))

    @property
    def tensors(self) -> dict[tuple[str, int], tf.Tensor]:
        """The floating-point tensors with a row for each example, by field and index in the field."""
        assert self.cotangents is not None, "the backward pass has not reached this call"
        size = self.cotangents[0].shape[0]
        flat = keras.tree.flatten((self.arguments, self.keywords))
        batched = self.batched or [tf.is_tensor(value) and value.shape[:1] == [size] for value in flat]
        arguments = {index: value for index, value in enumerate(flat) if batched[index] and value.dtype.is_floating}
        parts = {"arguments": arguments, "outputs": dict(enumerate(self.outputs))}
        parts |= {"cotangents": dict(enumerate(self.cotangents)), "gradients": dict(enumerate(self.gradients or []))}
        return {(field, index): value for field, values in parts.items() for index, value in values.items()}

    def with_tensors(self, tensors: dict[tuple[str, int], tf.Tensor]) -> "Call":
        """A copy of the call with some of its `tensors` replaced, and with this one as its `original`."""
        flat = keras.tree.flatten((self.arguments, self.keywords))
        parts: dict[str, list[Any]] = {"arguments": flat, "outputs": list(self.outputs)}
        parts |= {"cotangents": list(self.cotangents or []), "gradients": list(self.gradients or [])}
        for (field, index), value in tensors.items():
            parts[field][index] = with_mask(value, mask_of(flat[index])) if field == "arguments" else value
        arguments, keywords = keras.tree.pack_sequence_as((self.arguments, self.keywords), parts["arguments"])
        return dataclasses.replace(
            self,
            arguments=arguments,
            keywords=keywords,
            outputs=parts["outputs"],
            cotangents=parts["cotangents"],
            gradients=parts["gradients"] or None,
            original=self,
        )

    @functools.cached_property
    def cotangent(self) -> tf.Tensor:
        """The first cotangent, `(batch, ...)`; half precision is cast to float32."""
        assert self.cotangents is not None, "the backward pass has not reached this call"
        return widened(self.cotangents[0])


def widened_dtype(dtype: tf.DType) -> tf.DType:
    """Returns float32 for half precision, else the dtype itself: squares of small gradients need float32's range."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widened(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, widened_dtype(tensor.dtype))


class WeightReads(keras.StatelessScope):
    """Allows trainable weights to be read only in the calls of the layers that own them.

    Other variables are read and assigned as usual. The losses that layers add are collected in `losses`.

    Args:
        variables: The weights to guard.
        skip_plain_gradients: Whether to read them through `tf.stop_gradient`.

    Attributes:
        watched: The guarded weights, by `id`.
        readable: The `id`s of the weights that may be read now; empty outside of all units.
        overwritten: The variables assigned since `recording_assignments` was entered, with their values before that, by
            `id`; `None` outside of it.
        read_outside: The guarded weight whose read was refused, if any.
    """

    def __init__(self, variables: Sequence[keras.Variable], skip_plain_gradients: bool):
        values = (
            [(variable, tf.stop_gradient(variable.value)) for variable in variables] if skip_plain_gradients else []
        )
        self.without_gradient = {id(variable) for variable, _ in values}
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
        """Context in which a layer's weights may be read."""
        previous = self.readable
        self.readable = previous | {id(variable) for variable in layer.trainable_variables}
        try:
            yield
        finally:
            self.readable = previous

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value that a variable is read as, or `None` for its stored value; refuses reads outside of its owner."""
        if id(variable) in self.watched and id(variable) not in self.readable:
            self.read_outside = variable
            raise ValueError(
                f"The weight {variable.path!r} is read outside the call of the layer that owns it, so per-example "
                "gradients would miss this use. Wrap the layer that reads it as a whole."
            )
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Assigns at once, as outside of a stateless scope."""
        variable, value = update
        if self.overwritten is not None and id(variable) not in self.overwritten:
            self.overwritten[id(variable)] = variable, tf.identity(variable.value)
        assign_now(*update)
        if id(variable) in self.without_gradient:
            super().add_update((variable, tf.stop_gradient(value)))

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
    """Refuses reads of trainable weights while `owner` computes a loss."""

    def __init__(self, variables: Sequence[keras.Variable], owner: str):
        super().__init__(variables, skip_plain_gradients=False)
        self.owner = owner

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        if id(variable) in self.watched:
            raise ValueError(
                f"{self.owner} reads the weight {variable.path!r}, so per-example gradients would miss this use. "
                "Compute what needs the weight in call(), return it along with the predictions, and use it there."
            )
        return super().get_current_value(variable)


class FixedWeights(keras.StatelessScope):
    """A scope in which weights have the given values, nothing is assigned and no loss is added."""

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(list(values), initialize_variables=False)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Assigns as to a variable: its gradient is that of all reads, and none flows through the assignment."""
        variable, value = update
        before = self.get_current_value(variable)
        if before is not None and variable.trainable:
            value = tf.stop_gradient(tf.cast(value, before.dtype)) + (before - tf.stop_gradient(before))
        super().add_update((variable, value))
