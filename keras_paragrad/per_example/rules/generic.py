"""The generic rule: any layer's gradients, example by example."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import full_precision, mask_of, with_mask
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.types import Structure
from keras_paragrad.per_example.calls import Call, FixedWeights, WeightReads, widened, widened_dtype
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase, register_rule
from keras_paragrad.per_example.rules.normalization import batch_statistics_refusal


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

    A loop, as `tf.vectorized_map` corrupts memory on gradients of einsums outside XLA.
    """

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

    def run(self, call: Call, function: Callable[..., Structure], reads: WeightReads) -> Structure:
        if getattr(call.layer, "stateful", False):
            raise ValueError(
                f"{call.layer.name!r} is stateful: its output for an example depends on the previous batch, so an "
                "example has no gradient of its own. Write stateful=False."
            )
        for layer in all_layers(call.layer) if call.training else []:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
                raise batch_statistics_refusal(layer)
        with reads.recording_assignments() as previous_values:
            outputs = super().run(call, function, reads)
        # A call that assigns variables, as dropout does its seed, is repeated from the values before it.
        call.recorded = previous_values
        return outputs

    def gradients(self, call: Call) -> list[tf.Tensor]:
        # Cached, as neither TensorFlow nor XLA deduplicates equal loops.
        if call.gradients is None:
            assert call.cotangents is not None
            compute = _by_repeated_batches if call.recorded else _by_single_examples
            call.gradients = compute(call, call.cotangents)
        return call.gradients


class _Batch(NamedTuple):
    """The arguments of a call.

    Attributes:
        flat: The flattened arguments and keywords.
        rows: By index, the arguments with a row for each example.
        masks: Their masks.
    """

    flat: list[Any]
    rows: dict[int, tf.Tensor]
    masks: dict[int, tf.Tensor]

    @classmethod
    def of(cls, call: Call) -> "_Batch":
        flat = keras.tree.flatten((call.arguments, call.keywords))
        # Without probing, arguments with several rows count as batches.
        batched = call.batched or [tf.is_tensor(v) and v.shape.rank != 0 and v.shape[0] != 1 for v in flat]
        rows = {index: value for index, (value, has_rows) in enumerate(zip(flat, batched, strict=True)) if has_rows}
        masks = {index: mask for index, value in rows.items() if (mask := mask_of(value)) is not None}
        return cls(flat, rows, masks)

    def rerun(
        self,
        call: Call,
        rows: dict[int, tf.Tensor],
        masks: dict[int, tf.Tensor],
        values: Iterable[tuple[keras.Variable, tf.Tensor]],
    ) -> list[tf.Tensor]:
        """The floating-point outputs of the call on other rows, with the given values of variables."""
        flat = list(self.flat)
        for index, value in rows.items():
            flat[index] = with_mask(value, masks.get(index))
        arguments, keywords = keras.tree.pack_sequence_as((call.arguments, call.keywords), flat)
        with FixedWeights(values):
            outputs = keras.tree.flatten(call.rerun(arguments, keywords))
        return [output for output in outputs if tf.is_tensor(output) and output.dtype.is_floating]


def _by_single_examples(call: Call, cotangents: list[tf.Tensor]) -> list[tf.Tensor]:
    """Each weight's gradients for all examples: reruns the layer on one example at a time."""
    variables = call.layer.trainable_variables
    weights = [tf.convert_to_tensor(variable.value) for variable in variables]
    batch = _Batch.of(call)

    def gradients_of_example(example: Any):
        # As a batch of one.
        rows, masks, cotangents_of_example = keras.tree.map_structure(lambda row: row[tf.newaxis], example)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            outputs = batch.rerun(call, rows, masks, zip(variables, weights, strict=True))
        return _gradients(tape, outputs, weights, cotangents_of_example)

    return tf.map_fn(
        gradients_of_example, (batch.rows, batch.masks, cotangents), fn_output_signature=_signature(weights)
    )


def _by_repeated_batches(call: Call, cotangents: list[tf.Tensor]) -> list[tf.Tensor]:
    """Each weight's gradients for all examples: reruns the batch, and takes a backward pass for each example."""
    variables = call.layer.trainable_variables
    before = {id(variable): value for variable, value in call.recorded}
    with full_precision():
        # Weights that the call has assigned start from their values before it.
        weights = [tf.identity(before.get(id(variable), variable.value)) for variable in variables]
    batch = _Batch.of(call)
    tensors = [*(value for value in batch.rows.values() if value.dtype.is_floating), *call.outputs]
    flags = [tf.reduce_all(tf.math.is_finite(tensor), list(range(1, tensor.shape.rank))) for tensor in tensors]
    # Whether each example is finite.
    finite = tf.reduce_all(tf.stack(flags), 0)
    # Non-finite examples are replaced by the first finite one.
    first = tf.argmax(tf.cast(finite, tf.int32))
    rows = {
        index: tf.where(_broadcast(finite, value), value, value[first][tf.newaxis])
        for index, value in batch.rows.items()
    }
    with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
        tape.watch(weights)
        outputs = batch.rerun(call, rows, batch.masks, [*call.recorded, *zip(variables, weights, strict=True)])

    def gradients_of_example(index: tf.Tensor):
        is_example = tf.range(tf.shape(finite)[0]) == index
        masked = [
            tf.where(_broadcast(is_example, cotangent), cotangent, tf.zeros_like(cotangent)) for cotangent in cotangents
        ]
        gradients = _gradients(tape, outputs, weights, masked)
        return [tf.where(finite[index], gradient, float("nan")) for gradient in gradients]

    return tf.map_fn(gradients_of_example, tf.range(tf.shape(finite)[0]), fn_output_signature=_signature(weights))


def _broadcast(flags: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Flags `(batch,)`, with the rank of a `(batch, ...)` tensor."""
    return tf.reshape(flags, [-1] + [1] * (tensor.shape.rank - 1))


def _gradients(
    tape: tf.GradientTape, outputs: list[tf.Tensor], weights: list[tf.Tensor], cotangents: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The weights' gradients in at least float32, from the outputs' cotangents; zeros where there are none."""
    cast = [tf.cast(cotangent, output.dtype) for cotangent, output in zip(cotangents, outputs, strict=True)]
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(outputs, weights, output_gradients=cast, unconnected_gradients=zero)
    return [widened(tf.convert_to_tensor(gradient)) for gradient in gradients]


def _signature(weights: list[tf.Tensor]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(weight.shape, widened_dtype(weight.dtype)) for weight in weights]
