"""What a worker runs of a model whose weights lie on parameter servers."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import parts
from keras_paragrad.engine.servers.metric_states import MetricStates
from keras_paragrad.engine.step.gradient_functions import releasing


def step_on_worker(model: Any, tally: MetricStates, take: Callable[[Any], Any]) -> Callable[[Any], tf.Tensor]:
    """A compiled step that returns what it adds to the metrics.

    Args:
        model: A compiled and built model.
        tally: Its metrics.
        take: The model's `train_step` or `test_step`.
    """

    def step(data: Any) -> tf.Tensor:
        with _counting_at_once(model.optimizer):
            return tally.added_by(lambda: take(data))

    return _compiled(model, step)


def prediction_step(model: Any) -> Callable[[Any], Any]:
    """A compiled `predict_step`."""
    return _compiled(model, model.predict_step)


def _compiled(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    strategy = model.distribute_strategy
    run = releasing(lambda data: strategy.run(step, args=(_of_any_size(data),)))
    return tf.function(run, reduce_retracing=True, autograph=False)


def _of_any_size(data: Any) -> Any:
    """A batch whose shapes leave the number of its rows open, as those do that `fit` reads on one device.

    Where Keras knows the number, its trackers of outputs' losses count rows; else they count batches.
    """

    def of_any_size(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rows, *sizes = tf.unstack(leaf.dense_shape)
            rest = [size if known is None else known for size, known in zip(sizes, leaf.shape[1:], strict=True)]
            return tf.SparseTensor(leaf.indices, leaf.values, tf.stack([_open(rows), *rest]))
        if isinstance(leaf, tf.RaggedTensor):
            splits = [_open(each) for each in leaf.nested_row_splits]
            return tf.RaggedTensor.from_nested_row_splits(leaf.flat_values, splits, validate=False)  # pyright: ignore
        return _open(leaf)

    return keras.tree.map_structure(lambda leaf: None if leaf is None else of_any_size(leaf), data)


def _open(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]] if tensor.shape.rank else [])


@contextlib.contextmanager
def _counting_at_once(optimizer: keras.optimizers.Optimizer | None) -> Iterator[None]:
    """Context in which an optimizer's counter is incremented on its server; Keras's own way would lose updates."""
    counters = [] if optimizer is None else [part.iterations for part in parts(optimizer)]
    for counter in counters:
        counter.__dict__["assign_add"] = _adder(counter)
    try:
        yield
    finally:
        for counter in counters:
            del counter.__dict__["assign_add"]


def _adder(counter: Any) -> Callable[[Any], Any]:
    return lambda value: counter.value.assign_add(tf.cast(value, counter.dtype))
