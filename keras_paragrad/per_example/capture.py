"""Captures the inputs and output cotangents of a model's units in one ordinary backward pass.

A unit is a layer with weights, whose per-example gradients one rule computes. A cotangent is the loss's gradient with
respect to a tensor.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import (
    attributes,
    call_method,
    called_for_training,
    compiled_by_xla,
    mask_of,
    with_mask,
)
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.per_example.calls import Call, WeightReads
from keras_paragrad.per_example.units import (
    Unit,
    call_signature,
    check_training,
    layer_and_sublayers,
    layers_with_variable,
    units_of,
)

# A batch size that no other axis is likely to have: an output with another first axis is not a batch of examples.
_PROBE_BATCH = 1009

# The results of `units_for`, for each layer by its key.
_UNITS: "weakref.WeakKeyDictionary[keras.layers.Layer, dict[Any, Any]]" = weakref.WeakKeyDictionary()


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
        detached: Whether the backward pass skips the gradients of the layer's weights.
    """

    def __init__(self, layer: keras.layers.Layer, units: Sequence[Unit], anchor: tf.Tensor, detached: bool = False):
        self.layer, self.units, self.anchor, self.by_xla = layer, units, anchor, compiled_by_xla()
        # Whether the same graph computes the weights' plain gradients too.
        self.beside_plain = not detached and not tf.executing_eagerly()
        self.graph = tf.compat.v1.get_default_graph()
        self.calls: dict[int, list[Call]] = {id(unit.layer): [] for unit in units}
        self.reads = WeightReads(layer.trainable_variables, detached)
        self._used_in_other_graph: keras.Variable | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Structure:
        """Calls the layer and returns its outputs."""
        if called_for_training():
            check_training(self.layer)
        with contextlib.ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(attributes(unit.layer, **{call_method(unit.layer): self._record_calls(unit)}))
            stack.enter_context(self.reads)
            return self.layer(*arguments, **keywords)

    @property
    def offending_weight(self) -> keras.Variable | None:
        """The weight that made the call fail: read outside its owner's call, or used in another graph; or `None`."""
        return self._used_in_other_graph if self.reads.read_outside is None else self.reads.read_outside

    def weight_without_batch(self, size: int) -> keras.Variable | None:
        """The first weight of a unit whose outputs are not a batch of `size` examples, or `None`."""
        for calls in self.calls.values():
            for call in calls:
                if any(_rows(output) != size for output in call.outputs):
                    return call.layer.trainable_variables[0]
        return None

    @property
    def has_unknown_rows(self) -> bool:
        """Whether an output of a unit has an unknown number of rows."""
        return any(
            output.shape.rank is None or output.shape[:1] == [None]
            for calls in self.calls.values()
            for call in calls
            for output in call.outputs
        )

    def batched(self, unit: Unit, size: int) -> list[list[bool]]:
        """For each call of a unit, which of the flattened arguments have `size` rows."""
        calls = self.calls[id(unit.layer)]
        flat = [keras.tree.flatten((call.arguments, call.keywords)) for call in calls]
        return [[_has_axes(value) and value.shape[0] == size for value in values] for values in flat]

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses that layers added in the call."""
        return self.reads.losses

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
            call = Call(layer, arguments, keywords, training, rerun, by_xla=self.by_xla, beside_plain=self.beside_plain)
            # Which arguments have rows is only known of as many calls as were seen when the model was probed.
            call.batched = batched[len(calls)] if len(calls) < len(batched) else None
            calls.append(call)
            with self.reads.by(layer):
                activation = layer.activation if rule.before_activation else None
                if activation is None:
                    return self._tap(call, rule.run(call, original, self.reads))
                with attributes(layer, activation=lambda outputs: activation(self._tap(call, outputs))):
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
    with attributes(layer, **{call_method(layer): original}):
        return layer(*arguments, **{**keywords, "training": training})


def units_for(layer: keras.layers.Layer, arguments: tuple[Structure, ...], keywords: dict[str, Any]) -> list[Unit]:
    """The units of a built layer that is to be called with the given arguments, found by calls on placeholders.

    A layer that reads the weights of its sublayers, or calls them in a loop or on something other than a batch of
    examples, is a single unit.
    """
    known = _UNITS.setdefault(layer, {})
    weights = tuple(id(variable) for variable in layer.trainable_variables)
    key = (weights, called_for_training(), *call_signature((arguments, keywords)))
    if key not in known:
        units, succeeded = _probe_units(layer, arguments, keywords)
        if not succeeded:
            return units
        known[key] = units
    return known[key]


def _probe_units(
    layer: keras.layers.Layer, arguments: tuple[Structure, ...], keywords: dict[str, Any]
) -> tuple[list[Unit], bool]:
    """The units found by calls on placeholders, and whether the last such call succeeded."""
    indivisible: set[int] = set()
    size = _PROBE_BATCH
    # Each turn makes another layer a single unit, or is the last one with its size; at most two sizes are tried.
    while True:
        units = units_of(layer, indivisible)
        capture, succeeded = _call_on_placeholders(layer, units, arguments, keywords, size)
        variable = capture.weight_without_batch(size) if succeeded else capture.offending_weight
        holders = [] if variable is None else layers_with_variable(layer, variable)
        single = indivisible.union(id(unit.layer) for unit in units)
        holders = [holder for holder in holders if id(holder) not in single]
        if holders:
            indivisible.add(id(holders[0]))
        elif succeeded:
            if capture.has_unknown_rows:
                raise _unknown_rows_refusal(layer, arguments, keywords, size)
            return [Unit(unit.layer, unit.rule, capture.batched(unit, size)) for unit in units], True
        elif variable is None and size == _PROBE_BATCH and _batch_size(arguments, keywords):
            # The model may only accept one batch size.
            size = _batch_size(arguments, keywords) or _PROBE_BATCH
        else:
            # The real call will raise a meaningful error.
            return units, False


def _call_on_placeholders(
    layer: keras.layers.Layer, units: list[Unit], arguments: tuple[Structure, ...], keywords: dict[str, Any], size: int
) -> tuple[Capture, bool]:
    """Calls a layer with placeholders of `size` rows; returns the capture, and whether the call succeeded."""
    flat = keras.tree.flatten((arguments, keywords))
    batch_size = _batch_size(arguments, keywords)
    indices = [index for index, value in enumerate(flat) if _has_axes(value) and value.shape[0] == batch_size]
    captures: list[Capture] = []

    def call(*placeholders: tf.Tensor):
        probe = list(flat)
        for index, placeholder in zip(indices, placeholders, strict=True):
            probe[index] = placeholder
        captures.append(Capture(layer, units, tf.zeros([])))
        probe_arguments, probe_keywords = keras.tree.pack_sequence_as((arguments, keywords), probe)
        captures[0](*probe_arguments, **probe_keywords)
        return tf.zeros([])

    specs = [tf.TensorSpec([size, *flat[index].shape[1:]], flat[index].dtype) for index in indices]
    try:
        trace_untouched(layer, call, *specs)
    except Exception:
        # The real call will raise the same error, unless the batch size caused it.
        return captures[0], False
    return captures[0], True


def _unknown_rows_refusal(
    layer: keras.layers.Layer, arguments: tuple[Structure, ...], keywords: dict[str, Any], size: int
) -> ValueError:
    """The error for a layer whose outputs have an unknown number of rows; names the first sublayer that loses it."""
    causes: list[str] = []
    callers: list[str] = []

    def recording(inner: keras.layers.Layer, call: Callable[..., Structure]) -> Callable[..., Structure]:
        @functools.wraps(call)
        def record(*values: Any, **options: Any) -> Structure:
            if unknown_inputs := _unknown_rows((values, options)):
                place = f"Within {callers[-1]!r}" if callers else "Before a layer"
                causes.append(f"{place}, the input of {inner.name!r} has shape {unknown_inputs[0].shape}")
            callers.append(inner.name)
            try:
                outputs = call(*values, **options)
            finally:
                callers.pop()
            if unknown_outputs := _unknown_rows(outputs):
                causes.append(f"The output of {inner.name!r} has shape {unknown_outputs[0].shape}")
            return outputs

        return record

    with contextlib.ExitStack() as stack:
        for inner in {id(inner): inner for inner in layer_and_sublayers(layer)}.values():
            method = call_method(inner)
            stack.enter_context(attributes(inner, **{method: recording(inner, getattr(inner, method))}))
        _call_on_placeholders(layer, units_of(layer), arguments, keywords, size)
    cause = causes[0] if causes else f"The output of {layer.name!r} has an unknown shape"
    return ValueError(
        f"{cause} for {size} examples, so which rows belong to which example isn't known. State it where it is lost: "
        "outputs = tf.ensure_shape(outputs, [inputs.shape[0], ...]), if there is one row for each example. What "
        "prepares data, such as TextVectorization, can go into the dataset: dataset.map(lambda x, y: (layer(x), y))."
    )


def _unknown_rows(nested: Structure) -> list[Any]:
    """The tensors whose number of rows is unknown."""
    tensors = [leaf for leaf in keras.tree.flatten(nested) if tf.is_tensor(leaf)]
    return [
        tensor for tensor in tensors if tensor.shape.rank is None or (tensor.shape.rank and tensor.shape[0] is None)
    ]


def _rows(tensor: tf.Tensor) -> int | None:
    return tensor.shape[0] if tensor.shape.rank else None


def _batch_size(arguments: tuple[Structure, ...], keywords: dict[str, Any]) -> int | None:
    """The size of the first axis of the first tensor; `None` if there is none, or its size is unknown."""
    return next((value.shape[0] for value in keras.tree.flatten((arguments, keywords)) if _has_axes(value)), None)


def _has_axes(value: Any) -> bool:
    return bool(tf.is_tensor(value) and value.shape.rank)
