"""The proof on the first batch, for a `train_step` of the model's own."""

import keras
import numpy as np

from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.custom_step.step import CustomStep
from keras_paragrad.engine.custom_step.weighting import TrialStep
from keras_paragrad.engine.division.cut import RowCut
from keras_paragrad.engine.division.proof import (
    MOST_BYTES,
    Difference,
    bytes_of,
    change_last_digits,
    compare_gradients,
    reverse_rows,
)
from keras_paragrad.engine.losses.weightings import Weighting, step_arguments
from keras_paragrad.engine.probes.trial import row_count, run_trial, take_rows
from keras_paragrad.storage.storage import any_divided


def find_difference_of_step(
    model: keras.Model, step: CustomStep, data: Batch, size: int, parts: int
) -> tuple[int, Difference] | None:
    """Finds the first optimizer call whose parts don't add up to the whole gradient: its index, and the difference.

    Args:
        model: A built model with its own `train_step`.
        step: The analyzed step, which says how its calls are weighted.
        data: The rows of the first update.
        size: The rows that one part holds.
        parts: The number of parts of an update.
    """
    if any_divided(model.trainable_variables):
        # Other workers hold some of the weights, and don't wait for this one.
        return None

    def find(cut: RowCut) -> tuple[int, Difference] | None:
        trial = TrialStep(model, step.calls, step.analysis.states, {}, len(cut.rows))
        if bytes_of(trial.graph(take_rows(data, 0, size), 0)) * len(cut.bounds) > MOST_BYTES:
            if size == 1:
                return None
            cut = RowCut.of_part(size)
            trial = TrialStep(model, step.calls, step.analysis.states, {}, len(cut.rows))
        rows = cut.take(data)
        whole = trial(rows, 0)
        again = [_change_inputs(rows)]
        if not trial.draws:
            # Rows in another order would draw other random numbers.
            again.append(reverse_rows(rows))
        repeated = [trial(each, 0) for each in again]
        of_parts = [(take_rows(rows, *each), trial(take_rows(rows, *each), each[0])) for each in cut.bounds]
        for index, weighting in enumerate(step.weightings):
            shares = [_share(weighting, part, rows) for part, _ in of_parts]
            weighted = [
                [share * each for each in gradients[index]]
                for share, (_, gradients) in zip(shares, of_parts, strict=True)
            ]
            total = [np.sum(each, axis=0) for each in zip(*weighted, strict=True)]
            changed = [each[index] for each in repeated]
            error = compare_gradients(whole[index], total, changed, half_precision=trial.half_precision)
            if error:
                return index, Difference(error, len(cut.rows), len(cut.bounds))
        return None

    cut = RowCut.of_parts(row_count(data), size, parts)
    return run_trial(find, cut, otherwise=None, question="whether parts of the first batch give its gradients")


def _change_inputs(rows: Batch) -> Batch:
    return (change_last_digits(rows[0]), *rows[1:]) if isinstance(rows, tuple) else change_last_digits(rows)


def _share(weighting: Weighting, part: Batch, whole: Batch) -> float:
    if weighting.divisor is None:
        return 1.0
    return float(weighting.divisor(step_arguments(part)) / weighting.divisor(step_arguments(whole)))
