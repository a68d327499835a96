"""Captures the inputs and output cotangents of a model's units in one ordinary backward pass.

A unit is a layer with weights, whose per-example gradients one rule computes. A cotangent is the loss's gradient with
respect to a tensor.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import (
    call_method,
    called_for_training,
    compiled_by_xla,
    mask_of,
    override_attributes,
    with_mask,
    without_remat_scope,
)
from keras_paragrad.compat.types import Structure
from keras_paragrad.per_example.calls import Call, WeightReads
from keras_paragrad.per_example.units import Unit, check_training


class Capture:
    """Calls a layer and records every call of its units, with the cotangents of the backward pass.

    Calls of a unit's sublayers aren't recorded.

    Each unit's output passes through an identity that also takes a scalar, the `anchor`. The identity's gradient
    records the cotangent and returns zero for the anchor. The gradient of the anchor is therefore complete only once
    all cotangents are recorded.

    Args:
        layer: A built layer or model.
        units: Its units; see `units_for`.
        anchor: A float32 scalar watched by a tape.
        skip_plain_gradients: Whether the backward pass skips the gradients of the layer's weights.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        units: Sequence[Unit],
        anchor: tf.Tensor,
        skip_plain_gradients: bool = False,
    ):
        self.layer, self.units, self.anchor, self.by_xla = layer, units, anchor, compiled_by_xla()
        self.graph = tf.compat.v1.get_default_graph()
        self.calls: dict[int, list[Call]] = {id(unit.layer): [] for unit in units}
        self.reads = WeightReads(layer.trainable_variables, skip_plain_gradients)
        self._used_in_other_graph: keras.Variable | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Structure:
        """Calls the layer and returns its outputs."""
        if called_for_training():
            check_training(self.layer)
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_remat_scope(self.layer))
            for unit in self.units:
                recording = {call_method(unit.layer): self._record_calls(unit)}
                stack.enter_context(override_attributes(unit.layer, **recording))
            stack.enter_context(self.reads)
            return self.layer(*arguments, **keywords)

    @property
    def offending_weight(self) -> keras.Variable | None:
        """The weight that made the call fail: read outside its owner's call, or used in another graph; or `None`."""
        return self._used_in_other_graph if self.reads.read_outside is None else self.reads.read_outside

    def weight_without_batch(self, size: int) -> keras.Variable | None:
        """The first weight of a unit whose outputs are not a batch of `size` examples, or `None`."""
        for call in itertools.chain(*self.calls.values()):
            if any(not output.shape.rank or output.shape[0] != size for output in call.outputs):
                return call.layer.trainable_variables[0]
        return None

    @property
    def layer_without_rows(self) -> keras.layers.Layer | None:
        """The first unit with an output whose number of rows is unknown, or `None`."""
        for call in itertools.chain(*self.calls.values()):
            if any(output.shape.rank is None or output.shape[:1] == [None] for output in call.outputs):
                return call.layer
        return None

    def batched(self, unit: Unit, size: int) -> list[list[bool]]:
        """For each call of a unit, which of the flattened arguments have `size` rows."""
        calls = self.calls[id(unit.layer)]
        flat = [keras.tree.flatten((call.arguments, call.keywords)) for call in calls]
        return [[has_axes(value) and value.shape[0] == size for value in values] for values in flat]

    @property
    def recorded(self) -> Iterator[tuple[Unit, list[Call]]]:
        """The units that received a gradient, with their calls."""
        for unit in self.units:
            calls = [call for call in self.calls[id(unit.layer)] if call.cotangents is not None]
            if calls:
                yield unit, calls

    def _record_calls(self, unit: Unit) -> Callable[..., Structure]:
        """The function that replaces a unit's `call`: records it, and taps its outputs or its activation's input."""
        layer, rule, batched = unit
        original = getattr(layer, call_method(layer))

        @functools.wraps(original)
        def record_call(*arguments: Any, **keywords: Any):
            # The rule of the unit that makes this call covers it.
            if self.reads.is_within_a_unit:
                return original(*arguments, **keywords)
            training = called_for_training()
            calls = self.calls[id(layer)]
            rerun = functools.partial(_rerun, layer, original, training)
            call = Call(layer, arguments, keywords, training, rerun, by_xla=self.by_xla)
            # Which arguments have rows is only known of as many calls as were seen when the model was probed.
            call.batched = batched[len(calls)] if len(calls) < len(batched) else None
            calls.append(call)
            with self.reads.by(layer):
                activation = layer.activation if rule.before_activation else None
                if activation is None:
                    return self._tap(call, rule.run(call, original, self.reads))
                with override_attributes(layer, activation=lambda outputs: activation(self._tap(call, outputs))):
                    return rule.run(call, original, self.reads)

        return record_call

    def _tap(self, call: Call, outputs: Structure) -> Structure:
        """Passes outputs through the identity that records their cotangents."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self.graph:
            self._used_in_other_graph = call.layer.trainable_variables[0]
            raise ValueError(
                f"{call.layer.name!r} is called inside a loop, a branch or a tf.function, and its per-example "
                "gradients can't be taken out of it. Wrap the layer that makes the call as a whole, or register a rule "
                "for that layer with keras_paragrad.per_example.register_rule."
            )
        flat = keras.tree.flatten(outputs)
        indices = [index for index, output in enumerate(flat) if tf.is_tensor(output) and output.dtype.is_floating]
        call.outputs = [flat[index] for index in indices]
        # TensorFlow never frees the gradient functions of graphs; a weak reference keeps them from holding the model.
        reference = weakref.ref(call)

        @tf.custom_gradient
        def identity(anchor: tf.Tensor, *tensors: tf.Tensor):
            def backward(*cotangents: tf.Tensor):
                call = reference()
                if call is not None:
                    call.cotangents = list(cotangents)
                return tf.zeros_like(anchor), *cotangents

            return [tf.identity(tensor) for tensor in tensors], backward

        for index, tapped in zip(indices, identity(self.anchor, *call.outputs), strict=True):
            flat[index] = with_mask(tapped, mask_of(flat[index]))
        return keras.tree.pack_sequence_as(outputs, flat)


def _rerun(
    layer: keras.layers.Layer,
    original: Callable[..., Structure],
    training: bool,
    arguments: tuple[Structure, ...],
    keywords: dict[str, Any],
) -> Structure:
    """Calls a unit with its original method, so that the call isn't recorded."""
    with override_attributes(layer, **{call_method(layer): original}), without_remat_scope(layer):
        return layer(*arguments, **{**keywords, "training": training})


def has_axes(value: Any) -> bool:
    return bool(tf.is_tensor(value) and value.shape.rank)
