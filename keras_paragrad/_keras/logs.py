"""What `fit` shows of a step that several replicas took."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.replicas import replica_count, sum_over_replicas


class SharedResults:
    """The model's metrics over the examples of all replicas, the same on each.

    Keras averages the replicas' metrics, which is right if all had as many examples. This adds up what the metrics are
    made of.

    Args:
        model: The model, once its metrics have seen the batch.

    Attributes:
        parts: What has to be added up over the replicas, a vector for each dtype.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.variables = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
        dtypes = dict.fromkeys(variable.dtype for variable in self.variables)
        self._groups = [[variable for variable in self.variables if variable.dtype == dtype] for dtype in dtypes]
        self.parts = [tf.concat([tf.reshape(each.value, [-1]) for each in group], 0) for group in self._groups]

    def results(self, sums: Sequence[tf.Tensor]) -> dict[str, Any]:
        """What `get_metrics_result` returns of the replicas' `parts`, added up."""
        state = []
        for group, total in zip(self._groups, sums, strict=True):
            pieces = tf.split(total, [variable.shape.num_elements() for variable in group])
            state += [(each, tf.reshape(piece, each.shape)) for each, piece in zip(group, pieces, strict=True)]
        with keras.StatelessScope(state_mapping=state):
            return self.model.get_metrics_result()


def results_of_all(model: keras.Model) -> dict[str, Any]:
    """The model's metrics over the examples of all replicas, by one collective; called on every replica."""
    if replica_count() == 1:
        return model.get_metrics_result()
    shared = SharedResults(model)
    return shared.results(sum_over_replicas(shared.parts))


def means_of_all(logs: Any) -> Any:
    """The mean over the replicas of what a step of the model's own returns; called on every replica."""
    if replica_count() == 1:
        return logs
    share = 1 / replica_count()
    scaled = [tf.cast(value, "float32") * share for value in keras.tree.flatten(logs)]
    return keras.tree.pack_sequence_as(logs, sum_over_replicas(scaled))
