"""`estimate_memory`: the bytes that a training step takes on each device, before anything is trained."""

from typing import Any

import keras

from keras_paragrad.arguments import check_flag, check_instance, check_integer
from keras_paragrad.engine.step.tracing import traced_step
from keras_paragrad.memory.breakdown import breakdowns_of
from keras_paragrad.memory.estimated import Estimate
from keras_paragrad.memory.repeated import recomputation_of
from keras_paragrad.storage.partition import MIN_SHARD_BYTES


def estimate_memory(
    model: keras.Model,
    batch_size: int,
    replicas: int = 1,
    *,
    per_replica: bool = False,
    length: int | None = None,
    optimizer: Any = None,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    batch_spec: Any = None,
) -> Estimate:
    """Estimates the memory of each device in `fit`, for every way to shard the model.

    The training step is traced and followed, but not run; the model is left as it is, and no weights are made.

    Args:
        model: A compiled and built model.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        per_replica: Whether each replica takes a batch, rather than a part of one.
        length: The size of axes that the model's inputs leave open, such as the number of tokens.
        optimizer: The optimizer, if not the model's.
        min_shard_bytes: The size of a trainable variable, in bytes, from which it is cut into shards.
        batch_spec: The nested `tf.TypeSpec` of batches of data; by default it is derived from the model and its loss.

    Returns:
        An `Estimate`, for `print`.

    Raises:
        ValueError: An argument is invalid, or the step can't be traced. The message says what to write.

    Example:

    >>> import keras
    >>> from keras_paragrad.memory import estimate_memory
    >>> model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(1)])
    >>> model.compile("adam", loss="mse")
    >>> column = estimate_memory(model, batch_size=64, replicas=4)["optimizer"]
    >>> column.parameters, column.slots < 2 * column.parameters / 3
    (1056772, True)
    """
    check_instance("model", model, keras.Model, "a compiled keras.Model")
    batch_size = check_integer("batch_size", batch_size, example=64)
    replicas = check_integer("replicas", replicas, example=8)
    min_shard_bytes = check_integer("min_shard_bytes", min_shard_bytes)
    per_replica = check_flag("per_replica", per_replica)
    length = check_integer("length", length, example=128, optional=True)
    if optimizer is None and (not model.compiled or model.optimizer is None):
        raise ValueError(f"{model.name!r} has no optimizer. Call model.compile(optimizer, loss) first.")
    rows = batch_size if per_replica else -(-batch_size // replicas)
    columns = breakdowns_of(
        model, traced_step(model, rows, length, optimizer, batch_spec), replicas, least=min_shard_bytes
    )
    recomputation = recomputation_of(model)
    if recomputation.names:
        with recomputation.in_effect():
            step = traced_step(model, rows, length, optimizer, batch_spec)
        columns += breakdowns_of(model, step, replicas, recompute=True, least=min_shard_bytes)
    return Estimate(model.name, batch_size, replicas, rows, columns, recomputation.names)
