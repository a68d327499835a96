"""The proof on the first batch, for compiled metrics: parts of its rows give the same results as the whole."""

from typing import Any

import keras
import numpy as np

from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.proof.loss_proof import LossProof, mark_outputs
from keras_paragrad.engine.proof.model_proof import aggregate
from keras_paragrad.engine.proof.pure_function import PureFunction
from keras_paragrad.engine.proof.rows import even_parts, gather_rows
from keras_paragrad.engine.trials.tolerances import METRIC, TINY
from keras_paragrad.engine.trials.trial import row_count, take_rows

USE_SUMS = (
    "Let each metric accumulate sums over examples, with add_variable(..., aggregation='sum') and assign_add, or use a "
    "function that returns one value per example"
)


class MetricProof:
    """Compares the results of compiled metrics on parts of `size` rows with those on the whole.

    `summed` says whether the states of parts are aggregated as those of replicas; otherwise parts run in sequence.
    """

    def __init__(self, outputs: LossProof, size: int, summed: bool):
        self.model, self._outputs, self._size, self._summed = outputs.model, outputs, size, summed

    def ask(self) -> str | None:
        """Which metrics differ, and what to write, or `None`."""
        batch = self._outputs.with_outputs()
        compute = PureFunction(self.model, self._results)
        start = PureFunction(self.model, lambda _: self.model.reset_metrics())(None)[1]
        count = row_count(batch)
        reverse = gather_rows(batch, range(count)[::-1])
        whole, reordered = (compute(ordered, start)[0] for ordered in (batch, reverse))
        parts, state = [take_rows(batch, *each) for each in even_parts(count, self._size)], start
        if self._summed:
            states = [compute(part, start)[1] for part in parts]
            state = [aggregate(*values) for values in zip(compute.variables, *states, strict=True)]
        else:
            for part in parts:
                state = compute(part, state)[1]
        split, tolerance = compute(None, state)[0], METRIC.of(compute.half_precision)
        # A metric that depends on the order of rows is random or numerically unstable.
        differences = [
            f"{name} is {_largest(split[name]):.4g} on {len(parts)} parts of the first batch, and "
            f"{_largest(whole[name]):.4g} on it"
            for name in whole
            if _close(whole[name], reordered[name], tolerance) and not _close(whole[name], split[name], tolerance)
        ]
        return f"{'; '.join(differences)}. {USE_SUMS}" if differences else None

    def find_metric_differences(self) -> list[str]:
        """None: `ask` has compared the compiled metrics."""
        return []

    def _results(self, batch: Any) -> dict[str, Any]:
        """The metrics' results after an update with a batch and its outputs; without one, if `None`."""
        if batch is not None:
            data, outputs = batch
            self.model.compute_metrics(**arguments_of(data, mark_outputs(outputs)))
        return dict(self.model.get_metrics_result())


def _close(one: Any, other: Any, tolerance: float) -> bool:
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(np.allclose(*pair, rtol=tolerance, atol=TINY, equal_nan=True) for pair in pairs)


def _largest(result: Any) -> float:
    return max(float(np.max(np.asarray(leaf))) for leaf in keras.tree.flatten(result))
