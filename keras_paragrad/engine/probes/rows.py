"""Whether a model's output for one example depends on the others in its batch, found by calling it on made-up rows."""

import contextlib
import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.check import check_objects
from keras_paragrad.compat.layers import attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.probes.built_in import computes_rows_apart
from keras_paragrad.engine.probes.gradients import alike, watched
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Pure,
    attempt,
    called,
    is_coarse,
    made_up,
    some_rows,
    with_changed_rows,
)

# Rows are changed before and after those that are compared, so that sums along the batch are found in either direction,
# and in pairs with them.
ROWS, CHANGED, COMPARED = 4, [0, 3], slice(1, 3)
_DRAWS = ((0, 0.9), (1, 3.0))
# What the outputs of each row count for, in the number of which a gradient is taken.
_INNER, _OUTER = np.array([[0, 1, 1, 0], [1, 0, 0, 1]], "float32")


def mixing_layer(model: Any, *arguments: Any, training: bool = True) -> str | None:
    """What gives an example another output when the other examples in its batch change, or `None`.

    The model is called on four made-up rows, on those with other rows around two of them, and on three of them, with
    batch normalization as it predicts. Where outputs are random in training, it is called to predict instead. Outputs
    are compared, and gradients where a model has some of its own.

    Args:
        model: A built layer or model.
        *arguments: What it is called with, tensors, placeholders or `tf.TensorSpec` of `(batch, ...)`, nested.
        training: Whether it is called to train.

    Returns:
        The name of the innermost layer or operation that does it first; `None` also where the model could not be
        called on made-up rows.
    """

    check_objects()

    def find(size: int) -> str | None:
        if computes_rows_apart(model):
            return None
        first, second = (made_up(arguments, ROWS, seed=seed, size=size, high=high) for seed, high in _DRAWS)
        return _mixing(model, *with_changed_rows(first, second, CHANGED), training)

    return attempt(
        find, *SIZES, otherwise=None, question=f"whether the outputs of {model.name!r} depend on other examples"
    )


class _Pair(NamedTuple):
    """Two batches, and the rows of each that have to have the same outputs."""

    one: Any
    other: Any
    of_one: slice
    of_other: slice
    atol: float

    def are_alike(self, first: tf.Tensor, second: tf.Tensor) -> bool:
        """Whether outputs for the two batches are, in these rows; those without rows that can be told apart always."""
        sizes = [_rows_of(batch) for batch in (self.one, self.other)]
        if [tensor.shape[0] if tensor.shape.rank else None for tensor in (first, second)] != sizes:
            return True
        one, other = np.asarray(first[self.of_one]), np.asarray(second[self.of_other])
        if one.shape != other.shape or one.dtype.kind not in "fV":
            return np.array_equal(one, other)
        one, other = one.astype("float64"), other.astype("float64")
        scale = np.abs(one[np.isfinite(one)]).max(initial=0)
        return np.allclose(one, other, rtol=0, atol=self.atol * scale, equal_nan=True)


def _mixing(model: Any, first: Any, second: Any, may_train: bool) -> str | None:
    coarse = is_coarse(model)
    changed = _Pair(first, second, COMPARED, COMPARED, 0.05 if coarse else 1e-5)
    # A batch of another size is multiplied with other rounding.
    part = _Pair(first, some_rows(first, 1, ROWS), slice(1, ROWS), slice(None), 0.05 if coarse else 1e-3)
    for training in (True, False) if may_train else (False,):
        compute = Pure(model, lambda rows, training=training: _tensors(called(model, rows, training)))
        # Of the same seeds, so that a dropout drops the same.
        (before, state), (after, _) = compute(first), compute(second)
        if not all(map(changed.are_alike, before, after)):
            # A random output differs from itself, and says nothing.
            if all(map(changed.are_alike, before, compute(first)[0])):
                return _first_mixing(model, changed, training)
            continue
        suspect = training and _has_gradients_of_its_own(compute.graph(first))
        if suspect and _mixes_gradients(model, first, second, coarse):
            return model.name
        # For another number of rows, seeds give other random numbers.
        if not compute.draws_numbers(state):
            is_alike = all(map(part.are_alike, before, compute(part.other)[0]))
            return None if is_alike else _first_mixing(model, part, training)
    return None


def _has_gradients_of_its_own(graph: tf.Graph) -> bool:
    """Whether gradients in a graph may be others than those of its operations, which outputs tell enough about."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    # Operations of a `tf.custom_gradient` have an attribute that names it.
    return any(any(map(_names_a_gradient, node.attr)) or _stops_a_gradient(node) for node in nodes)


def _names_a_gradient(attribute: str) -> bool:
    return attribute.endswith("gradient_op_type")


def _stops_a_gradient(node: Any) -> bool:
    # `tf.nn.moments`, of which layer normalization is made, shifts by a mean that it stops the gradient of.
    return node.op in ("StopGradient", "PreventGradient") and not node.name.endswith("moments/StopGradient")


def _mixes_gradients(model: Any, first: Any, second: Any, coarse: bool) -> bool:
    """Whether the gradient of some rows' outputs depends on the other rows, or on the gradients of theirs."""

    def passed(data):
        arguments, shares = data
        with watched(model) as gradients_of:
            target = _weighted(_tensors(called(model, arguments, training=True)), shares)
        return gradients_of(target)

    compute = Pure(model, passed)
    inner, inner_after = (compute((rows, _INNER))[0] for rows in (first, second))
    outer, whole = (compute((first, shares))[0] for shares in (_OUTER, _INNER + _OUTER))
    added = [one + other for one, other in zip(inner, outer, strict=True)]
    return not (alike(inner, inner_after, coarse=coarse) and alike(whole, added, coarse=coarse))


def _weighted(outputs: list[tf.Tensor], shares: tf.Tensor) -> tf.Tensor:
    """A number that outputs of rows are in as their shares say, each element of an example with another weight."""
    total = tf.zeros([])
    for output in outputs:
        if output.dtype.is_floating and output.shape.rank and output.shape[0] == shares.shape[0]:
            flat = tf.cast(tf.reshape(output, [ROWS, -1]), "float32")
            total += tf.reduce_sum(flat * tf.cos(tf.range(tf.shape(flat)[1], dtype="float32")) * shares[:, None])
    return total


def _first_mixing(model: Any, pair: _Pair, training: bool) -> str:
    names: list[str] = []

    def recording(operation, call):
        @functools.wraps(call)
        def record(*arguments, **keywords):
            outputs = call(*arguments, **keywords)
            here = [each for each in _tensors(outputs) if each.graph is tf.compat.v1.get_default_graph()]
            recorded.append((operation.name, here))
            return outputs

        return record

    def outputs(arguments):
        operations = {id(each): each for each in all_layers(model)}
        for layer in (model, *all_layers(model)):
            operations.update({id(each): each for each in getattr(layer, "operations", ())})
        graph = tf.compat.v1.get_default_graph()
        recorded.clear()
        with contextlib.ExitStack() as stack:
            for operation in operations.values():
                stack.enter_context(attributes(operation, call=recording(operation, operation.call)))
            called(model, arguments, training)
        names[:] = [name for name, _ in recorded]
        # What is within a loop can't be had outside of it.
        return [[each for each in tensors if each.graph is graph] for _, tensors in recorded]

    recorded: list[tuple[str, list[tf.Tensor]]] = []
    compute = Pure(model, outputs)
    before, after = compute(pair.one)[0], compute(pair.other)[0]
    for name, *tensors in zip(names, before, after, strict=True):
        if not all(map(pair.are_alike, *tensors)):
            return name
    return model.name


def _rows_of(batch: Any) -> int:
    return next(len(tensor) for tensor in keras.tree.flatten(batch) if tensor is not None)


def _tensors(outputs: Any) -> list[tf.Tensor]:
    return [output for output in keras.tree.flatten(outputs) if tf.is_tensor(output)]
