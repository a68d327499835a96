"""Whether a model's output for one example depends on the others in its batch, found by calling it on made-up rows."""

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.layers import attributes
from keras_paragrad._keras.made_up import SIZES, attempt, called, is_coarse, made_up, with_changed_rows, without_trace
from keras_paragrad._keras.model import all_layers

# Rows are changed before and after those that are compared, so that sums along the batch are found in either direction,
# and in pairs with them.
ROWS, CHANGED, COMPARED = 4, [0, 3], slice(1, 3)
_DRAWS = ((0, 0.9), (1, 3.0))
Recorded = list[tuple[str, list[tf.Tensor]]]


def mixing_layer(model: Any, *arguments: Any, training: bool = True) -> str | None:
    """What gives an example another output when the other examples in its batch change, or `None`.

    The model is called eagerly, twice, on four made-up rows, with batch normalization as it predicts. Nothing of the
    model changes. Where outputs are random in training, it is called to predict instead.

    Args:
        model: A built layer or model.
        *arguments: What it is called with, tensors, placeholders or `tf.TensorSpec` of `(batch, ...)`, nested.
        training: Whether it is called to train.

    Returns:
        The name of the innermost layer or operation that does it first; `None` also where the model could not be
        called on made-up rows.
    """
    with tf.init_scope():
        for size in SIZES:
            with attempt("a layer"):
                first, second = (made_up(arguments, ROWS, seed=seed, size=size, high=high) for seed, high in _DRAWS)
                return _mixing(model, *with_changed_rows(first, second, CHANGED), training)
    return None


def _mixing(model: Any, first: Any, second: Any, may_train: bool) -> str | None:
    for training in (True, False) if may_train else (False,):
        call = functools.partial(_outputs, model, training=training)
        before = call(first)
        if _alike(before, call(second), model):
            return None
        # A random output differs from itself, and says nothing.
        if _alike(before, call(first), model):
            recorded = [_recorded(model, rows, training) for rows in (first, second)]
            found = (name for (name, one), (_, other) in zip(*recorded, strict=False) if not _alike(one, other, model))
            return next(found, model.name)
    return None


def _outputs(model: Any, arguments: tuple, training: bool) -> list[tf.Tensor]:
    with without_trace(model):
        return [output for output in keras.tree.flatten(called(model, arguments, training)) if tf.is_tensor(output)]


def _alike(first: list[tf.Tensor], second: list[tf.Tensor], model: Any) -> bool:
    """Whether the rows that were not changed have the outputs that they had."""
    return all(_rows_alike(*pair, model) for pair in zip(first, second, strict=True))


def _rows_alike(first: Any, second: Any, model: Any) -> bool:
    if first.shape.rank == 0 or first.shape != second.shape or first.shape[0] != ROWS:
        # No rows that could be told apart.
        return True
    one, other = (np.asarray(tensor[COMPARED]) for tensor in (first, second))
    if one.dtype.kind not in "fV":
        return bool((one == other).all())
    one, other = one.astype("float64"), other.astype("float64")
    scale = np.abs(one[np.isfinite(one)]).max(initial=0)
    return np.allclose(one, other, rtol=0, atol=(0.05 if is_coarse(model) else 1e-5) * scale, equal_nan=True)


def _recorded(model: Any, arguments: tuple, training: bool) -> Recorded:
    """The outputs of all that is called within the model, the innermost first."""
    recorded: Recorded = []
    operations = {id(each): each for each in all_layers(model)}
    for layer in (model, *all_layers(model)):
        operations.update({id(each): each for each in getattr(layer, "operations", ())})

    def recording(operation, call):
        @functools.wraps(call)
        def record(*arguments, **keywords):
            outputs = call(*arguments, **keywords)
            tensors = [output for output in keras.tree.flatten(outputs) if tf.is_tensor(output)]
            recorded.append((operation.name, tensors))
            return outputs

        return record

    with without_trace(model), contextlib.ExitStack() as stack:
        for operation in operations.values():
            stack.enter_context(attributes(operation, call=recording(operation, operation.call)))
        called(model, arguments, training)
    return recorded
