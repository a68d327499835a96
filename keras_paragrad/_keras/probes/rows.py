"""Whether a model's output for one example depends on the others in its batch, found by calling it on made-up rows."""

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.hooks.check import check_objects
from keras_paragrad._keras.objects.layers import attributes
from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad._keras.probes.built_in import computes_rows_apart
from keras_paragrad._keras.probes.trial import SIZES, Pure, attempt, called, is_coarse, made_up, with_changed_rows

# Rows are changed before and after those that are compared, so that sums along the batch are found in either direction,
# and in pairs with them.
ROWS, CHANGED, COMPARED = 4, [0, 3], slice(1, 3)
_DRAWS = ((0, 0.9), (1, 3.0))


def mixing_layer(model: Any, *arguments: Any, training: bool = True) -> str | None:
    """What gives an example another output when the other examples in its batch change, or `None`.

    The model is called twice on four made-up rows, with batch normalization as it predicts. Where outputs are random in
    training, it is called to predict instead.

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

    return attempt(find, *SIZES, otherwise=None)


def _mixing(model: Any, first: Any, second: Any, may_train: bool) -> str | None:
    atol = 0.05 if is_coarse(model) else 1e-5
    for training in (True, False) if may_train else (False,):

        def outputs(arguments, training=training):
            return _tensors(called(model, arguments, training))

        compute = Pure(model, outputs)
        before, after = (compute(rows)[0] for rows in (first, second))
        if all(_rows_alike(*pair, atol) for pair in zip(before, after, strict=True)):
            return None
        # A random output differs from itself, and says nothing.
        if all(_rows_alike(*pair, atol) for pair in zip(before, compute(first)[0], strict=True)):
            return _first_mixing(model, first, second, training, atol)
    return None


def _first_mixing(model: Any, first: Any, second: Any, training: bool, atol: float) -> str:
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
    before, after = (compute(rows)[0] for rows in (first, second))
    for name, *pair in zip(names, before, after, strict=True):
        if not all(_rows_alike(one, other, atol) for one, other in zip(*pair, strict=True)):
            return name
    return model.name


def _tensors(outputs: Any) -> list[tf.Tensor]:
    return [output for output in keras.tree.flatten(outputs) if tf.is_tensor(output)]


def _rows_alike(first: Any, second: Any, atol: float) -> bool:
    """Whether the rows that were not changed have the outputs that they had."""
    if first.shape.rank == 0 or first.shape != second.shape or first.shape[0] != ROWS:
        # No rows that could be told apart.
        return True
    one, other = (np.asarray(tensor[COMPARED]) for tensor in (first, second))
    if one.dtype.kind not in "fV":
        return bool((one == other).all())
    one, other = one.astype("float64"), other.astype("float64")
    scale = np.abs(one[np.isfinite(one)]).max(initial=0)
    return np.allclose(one, other, rtol=0, atol=atol * scale, equal_nan=True)
