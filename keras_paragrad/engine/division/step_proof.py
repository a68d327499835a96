"""The proof on the first batch, for a custom `train_step`."""

import keras
import numpy as np

from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.custom_step.step import CustomStep
from keras_paragrad.engine.custom_step.weighting import TrialStep
from keras_paragrad.engine.division.comparison import Difference, PartComparison, WeightedGradient, perturb
from keras_paragrad.engine.division.cut import RowCut
from keras_paragrad.engine.division.proof import MOST_BYTES, bytes_of
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.probes.trial import row_count, run_trial, take_rows
from keras_paragrad.storage.storage import any_divided


def find_difference_of_step(
    model: keras.Model, step: CustomStep, data: Batch, size: int, parts: int
) -> Difference | None:
    """Finds the first optimizer call for which parts of `size` rows don't sum to the gradient of the whole update."""
    if any_divided(model.trainable_variables):
        # Other workers hold some of the weights, and don't take part in this proof.
        return None

    def find(cut: RowCut) -> Difference | None:
        division = _DividedStep(step, len(cut.rows))
        # If the whole takes too much memory, compare half of a part in two parts.
        if bytes_of(division.function.graph(take_rows(data, 0, size))) * len(cut.bounds) > MOST_BYTES:
            if size == 1:
                return None
            cut = RowCut.of_part(size)
            division = _DividedStep(step, len(cut.rows))
        return division.compare(data, cut)

    cut = RowCut.of_parts(row_count(data), size, parts)
    return run_trial(find, cut, otherwise=None, question="whether parts of the first batch give its gradients")


class _DividedStep(PartComparison):
    """Computes the gradients of a step's calls of optimizers, on `total` rows and on parts of them."""

    def __init__(self, step: CustomStep, total: int):
        self.weightings = step.weightings
        self.function = TrialStep(step.model, step.calls, {}, total)

    def run(self, rows: Batch, first: int, *, changed: bool = False) -> list[WeightedGradient]:
        rows = _change_inputs(rows) if changed else rows
        arguments = arguments_of(rows)
        divisors = [float(weighting.value(arguments)) for weighting in self.weightings]
        calls, _ = self.function(rows, None, first)
        gradients = [[np.asarray(array, "float64") for array in gradient] for gradient in calls]
        return list(map(WeightedGradient, gradients, divisors))


def _change_inputs(rows: Batch) -> Batch:
    """Perturbs the inputs `x` of a batch, and not its targets or weights."""
    return (perturb(rows[0]), *rows[1:]) if isinstance(rows, tuple) else perturb(rows)
