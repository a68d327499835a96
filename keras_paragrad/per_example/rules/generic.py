"""The generic rule: any layer's gradients, example by example."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import full_precision, mask_of, with_mask
from keras_paragrad.compat.model import all_layers
from keras_paragrad.per_example.calls import Call, wide, widened
from keras_paragrad.per_example.reads import Weights
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase
from keras_paragrad.per_example.rules.normalization import needs_its_batch


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
    """Runs the layer's own call and its gradient on one example at a time, in a compiled loop.

    A call that draws random numbers, as dropout does, can't be repeated on a single example. It is repeated on the
    batch with the same numbers, and its gradient is taken once per example, with the others' cotangents zeroed.
    Non-finite examples are excluded from this, as zero times NaN is NaN.
    """

    # A loop rather than `tf.vectorized_map`, which corrupts memory on gradients of einsums outside XLA.

    serves_overrides = True
    formula = "a loop over the examples"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        units = pick([2, 1, 3, 4])
        if layer is keras.layers.TimeDistributed:
            return RuleCase(lambda: layer(keras.layers.Dense(units)), (4, 2))
        options = {"return_sequences": pick([False, True]), "go_backwards": pick([False, True])}
        sizes = pick([2, 3]), pick([2, 3])
        if layer is keras.layers.RNN:
            return RuleCase(lambda: layer(keras.layers.SimpleRNNCell(units), **options), sizes)
        if layer.__name__.startswith("ConvLSTM"):
            axes = int(layer.__name__.removeprefix("ConvLSTM").removesuffix("D"))
            return RuleCase(functools.partial(layer, units, 2, **options), (2, *[2] * axes, 2))
        return RuleCase(functools.partial(layer, units=units, **options), sizes)

    def run(self, call: Call, function: Any, reads: Any) -> Any:
        if getattr(call.layer, "stateful", False):
            raise ValueError(
                f"{call.layer.name!r} is stateful: its output for an example depends on the previous batch, so an "
                "example has no gradient of its own. Write stateful=False."
            )
        for layer in all_layers(call.layer) if call.training else []:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                raise ValueError(needs_its_batch(layer))
        with reads.recording_assignments() as before:
            outputs = super().run(call, function, reads)
        call.recorded = before
        return outputs

    def gradients(self, call: Call) -> list[tf.Tensor]:
        # Neither TensorFlow nor XLA deduplicates equal loops.
        if call.gradients is None:
            assert call.cotangents is not None
            found = (_of_whole_batch if call.recorded else _one_by_one)(call, call.cotangents)
            call.gradients = found
        return call.gradients


class _Batch(NamedTuple):
    """The arguments of a call.

    Attributes:
        flat: Its flattened arguments and keywords.
        rows: Those with a row for each example, by index.
        masks: Their masks.
    """

    flat: list[Any]
    rows: dict[int, tf.Tensor]
    masks: dict[int, tf.Tensor]

    @classmethod
    def of(cls, call: Call) -> "_Batch":
        flat = keras.tree.flatten((call.arguments, call.keywords))
        known = call.batched or [_has_rows(value) for value in flat]
        rows = {place: value for place, (value, has_rows) in enumerate(zip(flat, known, strict=True)) if has_rows}
        return cls(flat, rows, {place: mask_of(value) for place, value in rows.items() if mask_of(value) is not None})

    def called(
        self, call: Call, rows: dict[int, tf.Tensor], masks: dict[int, tf.Tensor], state: Any
    ) -> list[tf.Tensor]:
        """The outputs of the call on other rows, with the given values of variables."""
        flat = list(self.flat)
        for place, value in rows.items():
            flat[place] = with_mask(value, masks.get(place))
        arguments, keywords = keras.tree.pack_sequence_as((call.arguments, call.keywords), flat)
        with Weights(state):
            return _floating(call.rerun(arguments, keywords))


def _one_by_one(call: Call, cotangents: list[tf.Tensor]) -> list[tf.Tensor]:
    variables = call.layer.trainable_variables
    weights = [tf.convert_to_tensor(variable.value) for variable in variables]
    batch = _Batch.of(call)

    def of_one(rows):
        alone, masks, cotangents = keras.tree.map_structure(lambda row: row[tf.newaxis], rows)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            outputs = batch.called(call, alone, masks, zip(variables, weights, strict=True))
        return _gradients(tape, outputs, weights, cotangents)

    return tf.map_fn(of_one, (batch.rows, batch.masks, cotangents), fn_output_signature=_signature(weights))


def _of_whole_batch(call: Call, cotangents: list[tf.Tensor]) -> list[tf.Tensor]:
    variables = call.layer.trainable_variables
    with full_precision():
        weights = [tf.identity(variable.value) for variable in variables]
    batch = _Batch.of(call)
    floating = [value for value in batch.rows.values() if value.dtype.is_floating]
    finite = _are_finite([*floating, *call.outputs])
    rows = {place: _with_finite_rows(value, finite) for place, value in batch.rows.items()}
    with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
        tape.watch(weights)
        outputs = batch.called(call, rows, batch.masks, [*zip(variables, weights, strict=True), *call.recorded])

    def of_one(index):
        chosen = tf.range(tf.shape(finite)[0]) == index
        alone = [tf.where(_beside(chosen, each), each, tf.zeros_like(each)) for each in cotangents]
        found = _gradients(tape, outputs, weights, alone)
        return [tf.where(finite[index], gradient, float("nan")) for gradient in found]

    return tf.map_fn(of_one, tf.range(tf.shape(finite)[0]), fn_output_signature=_signature(weights))


def _are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all of several `(batch, ...)` tensors are finite, for each example."""
    rows = [tf.reduce_all(tf.math.is_finite(each), list(range(1, each.shape.rank))) for each in tensors]
    return tf.reduce_all(tf.stack(rows), 0)


def _with_finite_rows(rows: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
    """A batch in which non-finite examples are replaced by the first finite one."""
    return tf.where(_beside(finite, rows), rows, rows[tf.argmax(tf.cast(finite, tf.int32))][tf.newaxis])


def _beside(chosen: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(chosen, [-1] + [1] * (tensor.shape.rank - 1))


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
    """Whether an argument looks like a batch, if probing didn't tell."""
    return tf.is_tensor(value) and value.shape.rank != 0 and value.shape[0] != 1
