"""The scope in which models are built, and the check that they were."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.replicas.unprepared import check_compiled_in_scope
from keras_paragrad.distribution.alike import SAME_CODE


@contextlib.contextmanager
def building_together(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """The strategy's scope; explains the error if workers with different models fail to build them.

    Raises:
        RuntimeError: TensorFlow failed while several workers created variables, which is a collective operation.
    """
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        # TensorFlow's default strategy can't be entered within the scope of another.
        yield
        return
    try:
        with strategy.scope():
            yield
    except tf.errors.OpError as error:
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise
        raise RuntimeError(
            "This worker could not create the model's variables. The workers create each of them together, so either "
            f"one of them has died, or their models differ.{SAME_CODE} TensorFlow says: {error.message[:500]}"
        ) from error


def check_scope(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses a model that is not compiled, or was built under another strategy.

    Raises:
        ValueError: The model is refused. The message says what to write.
    """
    if not model.compiled:
        raise ValueError("The model has not been compiled. Write model.compile(...) before dist.prepare(model).")
    found = model.distribute_strategy
    if found is not strategy and (found.num_replicas_in_sync, strategy.num_replicas_in_sync) != (1, 1):
        raise ValueError(
            f"The model was built under {type(found).__name__}, but is to be trained under {type(strategy).__name__}. "
            "Build and compile it within `with dist.scope():`."
        )
    check_compiled_in_scope(model)
