"""The proof on the first batch, for compiled metrics: parts of its rows give the same results as the whole."""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.division.comparison import reverse_rows
from keras_paragrad.engine.division.cut import RowCut
from keras_paragrad.engine.division.proof import mark_outputs, outputs_of_parts
from keras_paragrad.engine.losses.logs import has_metrics
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.probes.pure_function import PureFunction
from keras_paragrad.engine.probes.row_independence import is_kerass_own_metric
from keras_paragrad.engine.probes.states import reset_state, results_after_parts
from keras_paragrad.engine.probes.tolerances import METRIC, TINY
from keras_paragrad.engine.probes.trial import row_count, run_trial, take_rows


class MetricDifference(NamedTuple):
    """A metric's largest result on the whole first batch (`whole`), and on its `number` parts (`parts`)."""

    name: str
    whole: float
    parts: float
    number: int

    def __str__(self) -> str:
        return f"{self.name} is {self.parts:.4g} on {self.number} parts of the first batch, and {self.whole:.4g} on it"


def metrics_are_known(model: keras.Model) -> bool:
    """Whether a compiled model's metrics are all Keras's own, which add up over parts of a batch."""
    if not has_metrics(model):
        return True
    compiled = model._compile_config.config
    metrics = keras.tree.flatten([compiled.get(name) for name in ("metrics", "weighted_metrics")])
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return False
    return all(metric is None or is_kerass_own_metric(metric) for metric in metrics)


def find_metric_differences(
    model: keras.Model, data: Batch, size: int, parts: int, *, on_replicas: bool
) -> list[MetricDifference]:
    """Computes the metrics on rows of the first batch, whole and in parts; returns the metrics that differ.

    Args:
        size: The rows that one part holds.
        parts: The number of parts of an update.
        on_replicas: Whether the states of the parts are aggregated; otherwise the parts run in sequence.
    """

    def results(batch: Any) -> dict[str, Any]:
        """The metrics' results after an update with a batch and its outputs; without one, if `None`."""
        if batch is not None:
            data, outputs = batch
            model.compute_metrics(**arguments_of(data, mark_outputs(outputs)))
        return dict(model.get_metrics_result())

    def find(cut: RowCut) -> list[MetricDifference]:
        rows = cut.take(data)
        outputs = outputs_of_parts(model, rows, cut)
        if outputs is None:
            return []
        batch = rows, outputs
        compute, start = PureFunction(model, results), reset_state(model)
        whole, reordered = (compute(ordered, start)[0] for ordered in (batch, reverse_rows(batch)))
        divided = [take_rows(batch, *bounds) for bounds in cut.bounds]
        split = results_after_parts(compute, divided, start, on_replicas=on_replicas)
        tolerance = METRIC.of(compute.half_precision)
        # A metric that depends on the order of rows is random or numerically unstable.
        return [
            MetricDifference(name, _largest(whole[name]), _largest(split[name]), len(cut.bounds))
            for name in whole
            if _close(whole[name], reordered[name], tolerance) and not _close(whole[name], split[name], tolerance)
        ]

    cut = RowCut.of_parts(row_count(data), size, parts)
    return run_trial(find, cut, otherwise=[], question=None)


def _close(one: Any, other: Any, tolerance: float) -> bool:
    return np.allclose(one, other, rtol=tolerance, atol=TINY, equal_nan=True)


def _largest(result: Any) -> float:
    return float(np.max(np.asarray(result)))
