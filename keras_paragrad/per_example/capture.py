"""Captures each layer's inputs and output cotangents in one ordinary backward pass."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import attributes, called_for_training, compiled_by_xla, mask_of, with_mask
from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.reads import WeightReads
from keras_paragrad.per_example.units import Unit, check_training


class Capture:
    """Calls a layer and records every call of its units, with the cotangents of the backward pass.

    Each unit's output passes through an identity that also takes a scalar, the `anchor`. The identity's gradient
    records the cotangent and returns zero for the anchor. The gradient of the anchor is therefore complete only once
    all cotangents are recorded.

    Args:
        layer: A built layer or model.
        units: Its units; see `keras_paragrad.per_example.probing.units_for`.
        anchor: A float32 scalar watched by a tape.
        detached: Whether the backward pass skips the gradients of the layer's weights.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        units: Sequence[Unit],
        anchor: tf.Tensor,
        detached: bool = False,
    ):
        self.layer, self.units, self.anchor, self.by_xla = layer, units, anchor, compiled_by_xla()
        self.beside_plain = not detached and not tf.executing_eagerly()
        self.graph = tf.compat.v1.get_default_graph()
        self.calls: dict[int, list[Call]] = {id(unit.layer): [] for unit in units}
        self.reads = WeightReads(layer.trainable_variables, detached)
        self.used_elsewhere: keras.Variable | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the layer and returns its outputs."""
        if called_for_training():
            check_training(self.layer)
        with contextlib.ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(attributes(unit.layer, **{_called(unit.layer): self._recording(unit)}))
            stack.enter_context(self.reads)
            return self.layer(*arguments, **keywords)

    @property
    def obstacle(self) -> keras.Variable | None:
        """The weight that made the call fail: read outside its owner's call, or used in another graph; or `None`."""
        return self.used_elsewhere if self.reads.read_outside is None else self.reads.read_outside

    def weight_without_batch(self, size: int) -> keras.Variable | None:
        """A weight of a unit whose outputs are not a batch of `size` examples, or `None`."""
        for calls in self.calls.values():
            for call in calls:
                if any(output.shape[0] != size for output in call.outputs):
                    return call.layer.trainable_variables[0]
        return None

    def batched(self, unit: Unit, size: int) -> list[list[bool]]:
        """For each call of a unit, which of the flattened arguments have `size` rows."""

        def has_rows(value):
            return bool(tf.is_tensor(value) and value.shape.rank and value.shape[0] == size)

        calls = self.calls[id(unit.layer)]
        return [[has_rows(value) for value in keras.tree.flatten((call.arguments, call.keywords))] for call in calls]

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

    def _recording(self, unit: Unit) -> Callable[..., Any]:
        """The function that replaces a unit's `call`."""
        layer, rule, batched = unit
        original = getattr(layer, _called(layer))

        @functools.wraps(original)
        def call(*arguments, **keywords):
            if self.reads.is_within_a_unit:
                return original(*arguments, **keywords)
            training = called_for_training()
            calls = self.calls[id(layer)]
            rerun = functools.partial(_rerun, layer, original, training)
            made = Call(layer, arguments, keywords, training, rerun, by_xla=self.by_xla, beside_plain=self.beside_plain)
            made.batched = batched[len(calls)] if len(calls) < len(batched) else None
            calls.append(made)
            with self.reads.by(layer):
                activation = layer.activation if rule.before_activation else None
                if activation is None:
                    return self._tap(made, rule.run(made, original, self.reads))
                with attributes(layer, activation=lambda outputs: activation(self._tap(made, outputs))):
                    return rule.run(made, original, self.reads)

        return call

    def _tap(self, made: Call, outputs: Any) -> Any:
        """Passes outputs through the identity that records their cotangents."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self.graph:
            self.used_elsewhere = made.layer.trainable_variables[0]
            raise ValueError(
                f"{made.layer.name!r} is called inside a loop, a branch or a tf.function, and its per-example "
                "gradients can't be taken out of it. Wrap the layer that makes the call as a whole, or register a rule "
                "for that layer with keras_paragrad.per_example.register_rule."
            )
        flat = keras.tree.flatten(outputs)
        places = [place for place, output in enumerate(flat) if tf.is_tensor(output) and output.dtype.is_floating]
        made.outputs = [flat[place] for place in places]
        # TensorFlow never frees the gradient functions of graphs; a weak reference keeps them from holding the model.
        reference = weakref.ref(made)

        @tf.custom_gradient
        def identity(anchor, *tensors):
            def backward(*cotangents):
                made = reference()
                if made is not None:
                    made.cotangents = list(cotangents)
                return tf.zeros_like(anchor), *cotangents

            return [tf.identity(tensor) for tensor in tensors], backward

        for place, tapped in zip(places, identity(self.anchor, *made.outputs), strict=True):
            flat[place] = with_mask(tapped, mask_of(flat[place]))
        return keras.tree.pack_sequence_as(outputs, flat)


def _called(layer: keras.layers.Layer) -> str:
    """The method that Keras calls for a layer's outputs."""
    return "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"


def _rerun(layer: keras.layers.Layer, original: Callable, training: bool, arguments: tuple, keywords: dict) -> Any:
    with attributes(layer, **{_called(layer): original}):
        return layer(*arguments, **{**keywords, "training": training})
