"""Finds, by a trial on synthetic rows, whether a model's output for one example depends on other examples."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.layers import call_model, override_attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.types import Array, Batch, Structure
from keras_paragrad.engine.losses.known_classes import computes_rows_independently
from keras_paragrad.engine.proof.pure_function import PureFunction, uses_half_precision, watch_weights
from keras_paragrad.engine.trials.trial import (
    OUTPUT,
    OUTPUT_OF_PART,
    SIZES,
    Inconclusive,
    gradients_match,
    row_count,
    run_trial,
    synthetic_rows,
    take_rows,
)

# Rows before and after the compared ones change, to find sums along the batch in either direction, and pairs.
_ROWS, _CHANGED, _COMPARED = 4, [0, 3], slice(1, 3)
# The seed and the largest value of each pair of batches.
_DRAWS = ((0, 0.9), (1, 3.0))
# The weight of each row's outputs in the scalar that is differentiated: the compared rows, and the changed ones.
_INNER, _OUTER = np.array([[0, 1, 1, 0], [1, 0, 0, 1]], "float32")


def find_mixing_layer(model: keras.layers.Layer, *arguments: Any, training: bool = True) -> str | None:
    """Finds the first layer or operation that makes an example's output depend on other examples, or `None`.

    Calls the model on four synthetic rows, on these with two of them changed, and on three of them; batch normalization
    uses its moving statistics. Compares the outputs, and the gradients if the model has custom ones. If outputs are
    random in training, compares them in inference. Also `None` if the model can't be called on synthetic rows.
    """

    check_internals("models")

    def find(size: int) -> str | None:
        if computes_rows_independently(model):
            return None
        first, second = (synthetic_rows(arguments, _ROWS, seed=seed, size=size, high=high) for seed, high in _DRAWS)
        return _find_mixing(model, *change_rows(first, second, _CHANGED), training)

    # If another axis counts rows too, as in an adjacency matrix of all nodes, only the number of rows fits it.
    return run_trial(
        find, *SIZES, _ROWS, otherwise=None, question=f"whether the outputs of {model.name!r} depend on other examples"
    )


class RowPair(NamedTuple):
    """Two batches, and the rows of each that must have equal outputs, within `tolerance` times the largest output."""

    first: Batch
    second: Batch
    rows_in_first: slice
    rows_in_second: slice
    tolerance: float

    def outputs_match(self, first: tf.Tensor, second: tf.Tensor) -> bool:
        """Whether the two batches' outputs are equal in these rows; true for outputs without rows."""
        sizes = [row_count(batch) for batch in (self.first, self.second)]
        if [tensor.shape[0] if tensor.shape.rank else None for tensor in (first, second)] != sizes:
            return True
        one, other = np.asarray(first[self.rows_in_first]), np.asarray(second[self.rows_in_second])
        # NumPy's kind "V" is bfloat16 and float8.
        if one.shape != other.shape or one.dtype.kind not in "fV":
            return np.array_equal(one, other)
        one, other = one.astype("float64"), other.astype("float64")
        scale = np.abs(one[np.isfinite(one)]).max(initial=0)
        return np.allclose(one, other, rtol=0, atol=self.tolerance * scale, equal_nan=True)


def _find_mixing(model: keras.layers.Layer, first: Batch, second: Batch, may_train: bool) -> str | None:
    """The first layer or operation whose outputs, or gradients, for equal rows differ in the two batches; or `None`.

    Compares them in training if `may_train`, and in inference if they are random in training.
    """
    half_precision = uses_half_precision(model)
    changed = RowPair(first, second, _COMPARED, _COMPARED, OUTPUT.of(half_precision))
    tolerance = OUTPUT_OF_PART.of(half_precision)
    part = RowPair(first, take_rows(first, 1, _ROWS), slice(1, _ROWS), slice(None), tolerance)
    for training in (True, False) if may_train else (False,):
        compute = PureFunction(
            model, lambda rows, training=training: _tensors(call_model(model, *rows, training=training)), any_rows=True
        )
        # Keep the seeds, so that dropout drops the same elements.
        (before, state), (after, _) = compute(first), compute(second)
        check_finite(before, "the outputs")
        if not all(map(changed.outputs_match, before, after)):
            # Random outputs differ from run to run, so they say nothing.
            if all(map(changed.outputs_match, before, compute(first)[0])):
                return _first_mixing(model, changed, training)
            continue
        custom = training and _has_custom_gradients(compute.graph(first))
        if custom and _mixes_gradients(model, first, second, half_precision):
            return model.name
        # The same seed draws different numbers for a different number of rows.
        if not compute.has_drawn(state):
            matches = all(map(part.outputs_match, before, compute(part.second)[0]))
            return None if matches else _first_mixing(model, part, training)
    return None


def _has_custom_gradients(graph: tf.Graph) -> bool:
    """Whether a model has custom gradients, which comparing the outputs doesn't cover."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(_has_custom_gradient(node) for node in nodes)


def _has_custom_gradient(node: Any) -> bool:
    # `tf.nn.moments`, used by layer normalization, subtracts a mean whose gradient it stops.
    stops = node.op in ("StopGradient", "PreventGradient") and not node.name.endswith("moments/StopGradient")
    return stops or any(attribute.endswith("gradient_op_type") for attribute in node.attr)


def _mixes_gradients(model: keras.layers.Layer, first: Batch, second: Batch, half_precision: bool) -> bool:
    """Whether the weights' gradients by some rows depend on other rows, or on the cotangents of other rows' outputs."""

    def gradient(data: Any) -> list[tf.Tensor]:
        arguments, weights = data
        with watch_weights(model) as gradients_of:
            target = _weighted_sum(_tensors(call_model(model, *arguments, training=True)), weights)
        return gradients_of(target)

    compute = PureFunction(model, gradient)
    inner, inner_after = (compute((rows, _INNER))[0] for rows in (first, second))
    check_finite(inner, "the gradients")
    outer, whole = (compute((first, weights))[0] for weights in (_OUTER, _INNER + _OUTER))
    added = [one + other for one, other in zip(inner, outer, strict=True)]
    match = functools.partial(gradients_match, half_precision=half_precision)
    return not (match(inner, inner_after) and match(whole, added))


def _weighted_sum(outputs: list[tf.Tensor], weights: tf.Tensor) -> tf.Tensor:
    """Sums the outputs with a weight for each row, and different weights for the elements of a row."""
    total = tf.zeros([])
    for output in outputs:
        if output.dtype.is_floating and output.shape.rank and output.shape[0] == weights.shape[0]:
            flat = tf.cast(tf.reshape(output, [_ROWS, -1]), "float32")
            total += tf.reduce_sum(flat * tf.cos(tf.range(tf.shape(flat)[1], dtype="float32")) * weights[:, None])
    return total


def _first_mixing(model: keras.layers.Layer, pair: RowPair, training: bool) -> str:
    """Finds the name of the first layer or operation whose outputs differ; the model's, if only its own do."""
    # Of the operations, in the order of their calls; filled in by the trace.
    names: list[str] = []
    recorded: list[tuple[str, list[tf.Tensor]]] = []

    def recording(operation: keras.Operation, call: Callable[..., Structure]) -> Callable[..., Structure]:
        @functools.wraps(call)
        def record(*arguments: Any, **keywords: Any) -> Structure:
            outputs = call(*arguments, **keywords)
            graph = tf.compat.v1.get_default_graph()
            recorded.append((operation.name, [tensor for tensor in _tensors(outputs) if tensor.graph is graph]))
            return outputs

        return record

    def outputs(arguments: tuple[Structure, ...]) -> list[list[tf.Tensor]]:
        operations = {id(layer): layer for layer in all_layers(model)}
        for layer in (model, *all_layers(model)):
            operations.update({id(operation): operation for operation in getattr(layer, "operations", ())})
        graph = tf.compat.v1.get_default_graph()
        recorded.clear()
        with contextlib.ExitStack() as stack:
            for operation in operations.values():
                stack.enter_context(override_attributes(operation, call=recording(operation, operation.call)))
            call_model(model, *arguments, training=training)
        names[:] = [name for name, _ in recorded]
        # Tensors within a loop can't be returned from it.
        return [[tensor for tensor in tensors if tensor.graph is graph] for _, tensors in recorded]

    compute = PureFunction(model, outputs)
    before, after = compute(pair.first)[0], compute(pair.second)[0]
    for name, *tensors in zip(names, before, after, strict=True):
        if not all(map(pair.outputs_match, *tensors)):
            return name
    return model.name


def _tensors(outputs: Structure) -> list[tf.Tensor]:
    return [output for output in keras.tree.flatten(outputs) if tf.is_tensor(output)]


def change_rows(batch: Batch, other: Batch, changed: list[int]) -> tuple[Any, Any]:
    """Makes two batches that differ only in the rows `changed`, where integers are 0 in one batch, 1 in the other."""

    def put(tensor: tf.Tensor, value: Array) -> tf.Tensor:
        chosen = np.isin(np.arange(len(tensor)), changed).reshape([-1, *[1] * (tensor.shape.rank - 1)])
        return tf.where(chosen, tf.cast(value, tensor.dtype), tensor)

    def before(tensor: tf.Tensor | None) -> tf.Tensor | None:
        return tensor if tensor is None or tensor.dtype.is_floating else put(tensor, 0)

    def after(tensor: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor | None:
        return None if tensor is None else put(tensor, value if tensor.dtype.is_floating else 1)

    return keras.tree.map_structure(before, batch), keras.tree.map_structure(after, batch, other)


def check_finite(results: Sequence[Array], what: str) -> None:
    """Refuses to compare numbers if none is finite: any two would match.

    Args:
        results: The tensors to compare; integers are left out.
        what: What they are, in the plural, for the message.

    Raises:
        Inconclusive: There are numbers, and none is finite.
    """
    floats = [tf.cast(tensor, "float64") for tensor in map(tf.convert_to_tensor, results) if tensor.dtype.is_floating]
    if floats and not any(np.isfinite(values).any() for values in floats):
        raise Inconclusive(f"{what} are not finite on synthetic rows")
