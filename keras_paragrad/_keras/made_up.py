"""Made-up rows in the shapes of a batch, and calls of a model on them that leave no trace."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.layers import attributes, outside_of_calls
from keras_paragrad._keras.model import all_layers

# For axes of unknown size: a short sequence; else an image that can be halved often.
SIZES = (8, 64)
# Variables up to this size are looked at for values so small that they would hide what lies before them.
_SMALL_VARIABLE = 2**20
_HIDES = 1e-3

_log = logging.getLogger("keras_paragrad")


class Unknown(Exception):  # noqa: N818  (an answer, not a failure)
    """What was asked for can't be found out with made-up rows."""


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """Within it anything may fail: a model need not like made-up rows, and trains all the same."""
    try:
        yield
    except Exception:
        _log.debug("%s can't be tried on made-up rows", what, exc_info=True)


def made_up(
    nested: Any, rows: int, *, seed: int, size: int = 8, low: float = 0.1, high: float = 0.9, labels: bool = False
) -> Any:
    """Eager tensors of so many rows, in the shapes and dtypes of the tensors of a batch.

    Integers are 0 and 1, so that they are classes and tokens of every vocabulary.

    Args:
        nested: Tensors, placeholders or `tf.TensorSpec` of `(batch, ...)`, or `None` among them.
        rows: How many rows.
        seed: Another seed gives other rows.
        size: What to take for axes of unknown size.
        low, high: Between which real numbers are drawn.
        labels: Whether real numbers are 0 and 1 as well, as Keras makes real numbers of classes.

    Raises:
        Unknown: There are strings, or sparse or ragged tensors.
    """
    generator = np.random.default_rng(seed)

    def drawn(tensor):
        if tensor is None:
            return None
        if not isinstance(tensor, (tf.Tensor, tf.TensorSpec)) or not tensor.shape.rank:
            raise Unknown(f"{tensor!r} can't be made up")
        shape = [rows, *(size if length is None else length for length in tensor.shape[1:])]
        if tensor.dtype.is_floating and not labels:
            return tf.cast(generator.uniform(low, high, shape), tensor.dtype)
        if tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool:
            return tf.cast(generator.integers(0, 2, shape), tensor.dtype)
        raise Unknown(f"{tensor.dtype.name} can't be made up")

    return keras.tree.map_structure(drawn, nested)


def with_changed_rows(rows: Any, others: Any, places: list[int]) -> tuple[Any, Any]:
    """Two batches that differ in the given rows and in no others.

    Real numbers there are those of `rows` and those of `others`; integers are 0 and 1, so that not even their sum over
    the batch is the same.
    """

    def chosen(tensor):
        is_chosen = np.isin(np.arange(len(tensor)), places)
        return is_chosen.reshape([-1, *[1] * (tensor.shape.rank - 1)])

    def before(tensor):
        return None if tensor is None else tensor if tensor.dtype.is_floating else _put(tensor, chosen(tensor), 0)

    def after(tensor, other):
        return None if tensor is None else _put(tensor, chosen(tensor), other if tensor.dtype.is_floating else 1)

    return keras.tree.map_structure(before, rows), keras.tree.map_structure(after, rows, others)


def _put(tensor: tf.Tensor, chosen: np.ndarray, value: Any) -> tf.Tensor:
    return tf.where(chosen, tf.cast(value, tensor.dtype), tensor)


def some_rows(nested: Any, start: int, stop: int) -> Any:
    """The rows of nested tensors from `start` to `stop`."""
    return keras.tree.map_structure(lambda tensor: None if tensor is None else tensor[start:stop], nested)


@contextlib.contextmanager
def without_trace(model: keras.Model, state: Any = ()) -> Iterator[keras.StatelessScope]:
    """Within it the model may be called eagerly; what it assigns, adds and draws is forgotten.

    Batch normalization goes by its moving statistics: that it mixes examples is known. Weights that are all but zero,
    as the last ones of a residual branch often are, are replaced, as they would hide what comes before them.

    Args:
        model: A built model.
        state: Pairs of a variable and its value, for the time within.
    """
    if not model.built:
        raise Unknown("made-up rows are not to build a model")
    layers = [model, *all_layers(model)]
    losses = [(layer._losses, list(layer._losses), layer._loss_ids, set(layer._loss_ids)) for layer in layers]
    others = [(variable, variable.numpy()) for layer in layers for variable in _plain_variables(layer)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silence())
        stack.enter_context(outside_of_calls())
        for layer in layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(attributes(layer, call=_to_predict(layer.call)))
        mapping = [*_visible_weights(model), *state]
        try:
            yield stack.enter_context(keras.StatelessScope(mapping, collect_losses=True))
        finally:
            for kept, before, ids, ids_before in losses:
                kept[:] = before
                ids.clear()
                ids.update(ids_before)
            for variable, value in others:
                variable.assign(value)


def value_of(variable: Any) -> np.ndarray:
    """The value of a variable, also of one on several replicas: that of this one."""
    return tf.convert_to_tensor(variable.value).numpy()


def called(model: Any, arguments: tuple, training: bool) -> Any:
    """What a model or layer returns, called as `fit` calls it."""
    return model(*arguments, training=training) if model._call_has_training_arg else model(*arguments)


def is_coarse(model: Any) -> bool:
    """Whether a model computes in half precision."""
    return any(layer.compute_dtype not in ("float32", "float64") for layer in (model, *all_layers(model)))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Within it nobody is told what made-up rows give rise to."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _to_predict(call: Any) -> Any:
    return lambda *arguments, **keywords: call(*arguments, **{**keywords, "training": False})


def _plain_variables(layer: keras.layers.Layer) -> list[tf.Variable]:
    """TensorFlow's own variables among a layer's attributes, of which Keras does not know."""
    values = keras.tree.flatten([value for value in vars(layer).values() if isinstance(value, (tf.Variable, list))])
    return [value for value in values if isinstance(value, tf.Variable)]


def _visible_weights(model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
    generator = np.random.default_rng(0)
    visible = []
    for variable in model.trainable_variables:
        count = int(np.prod(variable.shape))
        if (
            count <= _SMALL_VARIABLE
            and "float" in variable.dtype
            and np.abs(value_of(variable)).max(initial=0) < _HIDES
        ):
            visible.append((variable, generator.uniform(0.05, 0.15, variable.shape).astype("float32")))
    return visible
