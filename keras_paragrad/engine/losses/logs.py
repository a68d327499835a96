"""The logs of a step over several replicas."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import sum_over_replicas
from keras_paragrad.engine.losses.tracking import TrackedLosses


def has_metrics(model: keras.Model) -> bool:
    """Whether a compiled model shows more of a batch than its losses."""
    return model._compile_metrics is not None or _has_own_metrics(model)


def _has_own_metrics(model: keras.Model) -> bool:
    return type(model).compute_metrics is not keras.Model.compute_metrics or "compute_metrics" in vars(model)


def update_metrics(model: keras.Model, batch: dict[str, Any]) -> None:
    """Updates a model's metrics with a part of a batch; `get_metrics_result` later gives the result of all parts.

    Args:
        model: A compiled model.
        batch: The arguments of its `compute_metrics`.

    Raises:
        ValueError: A custom `compute_metrics` returns something else.
    """
    found = model.compute_metrics(**batch)
    if not _has_own_metrics(model):
        return
    shown = model.get_metrics_result()
    if set(found) != set(shown):
        raise ValueError(
            f"compute_metrics of {type(model).__name__} returns {sorted(found)}, and get_metrics_result "
            f"{sorted(shown)}. Batches are computed in parts, and the logs of all parts are those of "
            "get_metrics_result. Override that too, so that it returns the same logs, computed from the states of "
            "metrics."
        )


class SharedResults:
    """The model's metrics over the examples of all replicas, the same on each.

    Keras averages the replicas' metrics, which is right only if all had equally many examples. This all-reduces the
    metrics' states instead.

    Args:
        model: The model, once its metrics have seen the batch.
        losses: The batch's losses, which have not been tracked yet, or `None` if they have.

    Attributes:
        parts: The tensors to all-reduce: a vector for each dtype, and the losses.
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
        """The result of `get_metrics_result` for the all-reduced `parts`."""
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
