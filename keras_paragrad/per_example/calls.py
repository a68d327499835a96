"""The record of a layer's call that rules compute gradients from."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import mask_of, with_mask


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
        beside_plain: Whether the weights' plain gradient is computed in the same graph.
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
    beside_plain: bool = False
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
        """A copy of the call with some of its `tensors` replaced."""
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
    """Float32 for half precision, otherwise the dtype itself: squares of small gradients need the range."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widened(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, widened_dtype(tensor.dtype))
