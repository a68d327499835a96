"""The logs of Keras's step: metrics of parts of a batch, and over several replicas."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import LossArguments, StepLogs
from keras_paragrad.engine.losses.sums import TrackedLosses

# The names of the logs that a custom `compute_metrics` returned for the part of a batch that was traced last.
_SHOWN = Slot[tuple[str, ...] | None]("shown_metrics", None)


def has_metrics(model: keras.Model) -> bool:
    """Whether the logs of a compiled model have more than its losses."""
    return model._compile_metrics is not None or overrides_compute_metrics(model)


def overrides_compute_metrics(model: keras.Model) -> bool:
    """Whether a model has a `compute_metrics` of its own."""
    return type(model).compute_metrics is not keras.Model.compute_metrics or "compute_metrics" in vars(model)


def update_metrics(model: keras.Model, batch: LossArguments) -> None:
    """Updates a model's metrics with a part of a batch, for `metrics_result` after the last part.

    Refuses a custom `compute_metrics` that returns names that `get_metrics_result` doesn't.
    """
    # Keras divides a loss that is a metric, or that a metric calls, by the number of replicas.
    with as_one_replica():
        computed = model.compute_metrics(**batch)
    if not overrides_compute_metrics(model):
        return
    logged = model.get_metrics_result()
    if not set(computed) <= set(logged):
        raise ValueError(
            f"compute_metrics of {type(model).__name__} returns {sorted(computed)}, and get_metrics_result "
            f"{sorted(logged)}. Batches are computed in parts, so their logs come from "
            "get_metrics_result. Override that too, so that it returns the same logs, computed from the states of "
            "metrics."
        )
    _SHOWN.attach(model, tuple(computed))


def metrics_result(model: keras.Model) -> StepLogs:
    """The result of `get_metrics_result`, without logs that a custom `compute_metrics` left out for the last part."""
    results, shown = model.get_metrics_result(), _SHOWN.of(model)
    return results if shown is None else {name: results[name] for name in shown}


class AllReducedResults:
    """The model's metrics over the examples of all replicas: all-reduces their states, and the `losses`, if any.

    Keras averages the replicas' results, which is right only if all had the same number of examples. `parts` are the
    tensors to all-reduce: a vector for each dtype, and the losses.
    """

    def __init__(self, model: keras.Model, losses: TrackedLosses | None = None):
        self.model = model
        self.losses = losses
        self.variables = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
        dtypes = dict.fromkeys(variable.dtype for variable in self.variables)
        self._groups = [[variable for variable in self.variables if variable.dtype == dtype] for dtype in dtypes]
        self.parts = [tf.concat([tf.reshape(variable.value, [-1]) for variable in group], 0) for group in self._groups]
        if losses is not None:
            self.parts.append(losses.part)

    def results(self, sums: Sequence[tf.Tensor]) -> StepLogs:
        """The result of `metrics_result` for the all-reduced `parts`."""
        state = {}
        # The last sum is the losses', if any.
        for group, total in zip(self._groups, sums, strict=False):
            pieces = tf.split(total, [variable.shape.num_elements() for variable in group])
            state |= {
                id(variable): tf.reshape(piece, variable.shape) for variable, piece in zip(group, pieces, strict=True)
            }
        for variable, added in self.losses.add(sums[-1]) if self.losses else ():
            state[id(variable)] += added
        with keras.StatelessScope(state_mapping=[(variable, state[id(variable)]) for variable in self.variables]):
            return metrics_result(self.model)
