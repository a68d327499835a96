"""Batches of `train_on_batch`, `test_on_batch` and `predict_on_batch`, which reach every worker whole."""

from typing import Any

import keras
import tensorflow as tf


def divide_batch(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Divides a batch among the replicas, in their order.

    Args:
        strategy: The strategy of the replicas.
        batch: Nested arrays or tensors; some may be `None`.

    Returns:
        The nested `PerReplica` values. Sizes differ by at most one row, and a replica may get none.
    """
    replicas = strategy.num_replicas_in_sync

    def divide(leaf: Any) -> Any:
        if leaf is None:
            return None
        whole = leaf if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) else tf.convert_to_tensor(leaf)

        def part(context: tf.distribute.experimental.ValueContext) -> Any:
            return _part(whole, int(context.replica_id_in_sync_group), replicas)

        return strategy.experimental_distribute_values_from_function(part)

    return keras.tree.map_structure(divide, batch)


def predict_on_batch(model: Any, x: Any) -> Any:
    """The model's `predict_on_batch` on replicas: each row once, in order."""
    model.make_predict_function()
    outputs = model.predict_function([divide_batch(model.distribute_strategy, (x,))])
    return keras.tree.map_structure(
        lambda output: output if isinstance(output, (tf.SparseTensor, tf.RaggedTensor)) else output.numpy(), outputs
    )


def _part(whole: Any, number: int, parts: int) -> Any:
    rows = int(whole.nrows() if isinstance(whole, tf.RaggedTensor) else whole.shape[0])
    start, stop = (index * (rows // parts) + min(index, rows % parts) for index in (number, number + 1))
    if isinstance(whole, tf.SparseTensor):
        rest = list(whole.shape[1:])
        return tf.sparse.slice(whole, [start, *(0 for _ in rest)], [stop - start, *rest])
    return whole[start:stop]
