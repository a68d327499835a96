"""Any layer: its gradients, example by example."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad._keras.layers import full_precision, mask_of, with_mask
from keras_paragrad._keras.model import all_layers
from keras_paragrad.per_example.reads import Weights
from keras_paragrad.per_example.registry import Call, Rule, register_rule, wide, widened
from keras_paragrad.per_example.rules.normalization import needs_its_batch


class _Recording(NamedTuple):
    """A call as a tape saw it."""

    tape: tf.GradientTape
    weights: list[tf.Tensor]
    outputs: list[tf.Tensor]


@register_rule(
    keras.layers.RNN,
    keras.layers.SimpleRNN,
    keras.layers.LSTM,
    keras.layers.GRU,
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
    keras.layers.TimeDistributed,
)
class Generic(Rule):
    """Runs the layer's own call and its gradient on one example after the other, in a compiled loop.

    Where the call drew random numbers, as dropout does, it can't be done again on an example alone; then the gradient
    of the call as it was is taken once for each example, with the cotangents of the others set to zero.
    """

    # A loop and never a vectorized map, which corrupts memory on the gradients of einsums outside of XLA.

    serves_overrides = True

    def run(self, call: Call, function: Any, reads: Any) -> Any:
        if getattr(call.layer, "stateful", False):
            raise ValueError(
                f"{call.layer.name!r} is stateful: what it does with an example depends on the batch before. Write "
                "stateful=False."
            )
        for layer in all_layers(call.layer) if call.training else []:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                raise ValueError(needs_its_batch(layer))
        variables = call.layer.trainable_variables
        with full_precision():
            weights = [tf.identity(variable.value) for variable in variables]
        assignments = reads.assignments
        with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
            tape.watch(weights)
            with reads.replaced(zip(variables, weights, strict=True)):
                outputs = super().run(call, function, reads)
        if reads.assignments > assignments:
            call.recorded = _Recording(tape, weights, _floating(outputs))
        return outputs

    def gradients(self, call: Call) -> list[tf.Tensor]:
        # Neither TensorFlow nor XLA sees that two loops compute the same.
        if call.gradients is None:
            assert call.cotangents is not None
            found = _from_tape(call.recorded, call.cotangents) if call.recorded else _one_by_one(call, call.cotangents)
            call.gradients = found
        return call.gradients


def _one_by_one(call: Call, cotangents: list[tf.Tensor]) -> list[tf.Tensor]:
    variables = call.layer.trainable_variables
    weights = [tf.convert_to_tensor(variable.value) for variable in variables]
    flat = keras.tree.flatten((call.arguments, call.keywords))
    known = call.batched or [_has_rows(value) for value in flat]
    batches = {place: value for place, (value, rows) in enumerate(zip(flat, known, strict=True)) if rows}
    masks = {place: mask_of(value) for place, value in batches.items() if mask_of(value) is not None}

    def of_one(rows):
        inputs, masks, cotangents = rows
        one = list(flat)
        for place, row in inputs.items():
            one[place] = with_mask(row[tf.newaxis], masks[place][tf.newaxis] if place in masks else None)
        arguments, keywords = keras.tree.pack_sequence_as((call.arguments, call.keywords), one)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            with Weights(zip(variables, weights, strict=True)):
                outputs = _floating(call.rerun(arguments, keywords))
        return _gradients(tape, outputs, weights, [cotangent[tf.newaxis] for cotangent in cotangents])

    return tf.map_fn(of_one, (batches, masks, cotangents), fn_output_signature=_signature(weights))


def _from_tape(recording: _Recording, cotangents: list[tf.Tensor]) -> list[tf.Tensor]:
    tape, weights, outputs = recording
    batch = tf.shape(cotangents[0])[0]

    def of_one(index):
        chosen = tf.range(batch) == index
        alone = [
            tf.where(tf.reshape(chosen, [-1] + [1] * (cotangent.shape.rank - 1)), cotangent, tf.zeros_like(cotangent))
            for cotangent in cotangents
        ]
        return _gradients(tape, outputs, weights, alone)

    return tf.map_fn(of_one, tf.range(batch), fn_output_signature=_signature(weights))


def _gradients(tape: tf.GradientTape, outputs: Any, weights: Any, cotangents: Any) -> list[tf.Tensor]:
    cast = [tf.cast(cotangent, output.dtype) for cotangent, output in zip(cotangents, outputs, strict=True)]
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(outputs, weights, output_gradients=cast, unconnected_gradients=zero)
    return [widened(tf.convert_to_tensor(gradient)) for gradient in gradients]


def _signature(weights: list[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(weight.shape, wide(weight.dtype)) for weight in weights]


def _floating(outputs: Any) -> list[tf.Tensor]:
    return [output for output in keras.tree.flatten(outputs) if tf.is_tensor(output) and output.dtype.is_floating]


def _has_rows(value: Any) -> bool:
    """Whether an argument of which nothing is known looks like a batch."""
    return tf.is_tensor(value) and value.shape.rank != 0 and value.shape[0] != 1
