"""What `fit` shows of a step that several replicas took."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.loss_tracking import TrackedLosses
from keras_paragrad._keras.replicas import replica_count, sum_over_replicas


class SharedResults:
    """The model's metrics over the examples of all replicas, the same on each.

    Keras averages the replicas' metrics, which is right if all had as many examples. This adds up what the metrics are
    made of.

    Args:
        model: The model, once its metrics have seen the batch.
        losses: The batch's losses, which have not been tracked yet, or `None` if they have.

    Attributes:
        parts: What has to be added up over the replicas: a vector for each dtype, and the losses.
    """

    def __init__(self, model: keras.Model, losses: TrackedLosses | None = None):
        self.model = model
        self.losses = losses
        self.variables = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
        dtypes = dict.fromkeys(variable.dtype for variable in self.variables)
        self._groups = [[variable for variable in self.variables if variable.dtype == dtype] for dtype in dtypes]
        self.parts = [tf.concat([tf.reshape(each.value, [-1]) for each in group], 0) for group in self._groups]
        if losses is not None:
            self.parts.append(losses.part)

    def results(self, sums: Sequence[tf.Tensor]) -> dict[str, Any]:
        """What `get_metrics_result` returns of the replicas' `parts`, added up."""
        state = {}
        for group, total in zip(self._groups, sums, strict=False):
            pieces = tf.split(total, [variable.shape.num_elements() for variable in group])
            state |= {id(each): tf.reshape(piece, each.shape) for each, piece in zip(group, pieces, strict=True)}
        for variable, added in self.losses.add(sums[-1]) if self.losses else ():
            state[id(variable)] += added
        with keras.StatelessScope(state_mapping=[(each, state[id(each)]) for each in self.variables]):
            return self.model.get_metrics_result()


def results_of_all(model: keras.Model, losses: TrackedLosses | None = None) -> dict[str, Any]:
    """The model's metrics over the examples of all replicas, by one collective; called on every replica."""
    results = SharedResults(model, losses)
    return results.results(sum_over_replicas(results.parts))


def means_of_all(logs: Any) -> Any:
    """The mean over the replicas of what a step of the model's own returns; called on every replica."""
    if replica_count() == 1:
        return logs
    share = 1 / replica_count()
    scaled = [tf.cast(value, "float32") * share for value in keras.tree.flatten(logs)]
    return keras.tree.pack_sequence_as(logs, sum_over_replicas(scaled))
