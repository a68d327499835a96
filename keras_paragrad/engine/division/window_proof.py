"""Holds the weighting that is stated for a `train_step` in windows to the micro-batches of the first one."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import train_step_of
from keras_paragrad.compat.types import Batch, Gradients
from keras_paragrad.engine.calls.divisible import StepTrial
from keras_paragrad.engine.division.comparison import Difference, PartComparison, WeightedGradient, perturb
from keras_paragrad.engine.division.cut import RowCut
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.losses.weightings import Weighting
from keras_paragrad.engine.probes.trial import row_count, run_trial
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.storage.storage import any_divided


def find_difference_in_window(
    model: keras.Model, weighting: Weighting, data: Batch, size: int, parts: int
) -> Difference | None:
    """How far the weighted gradients of `parts` parts of `size` rows are off the gradient of the whole window."""
    if any_divided(model.trainable_variables):
        # Other workers hold some of the weights, and don't take part in this proof.
        return None
    cut = RowCut.of_parts(row_count(data), size, parts)
    question = "whether micro-batches of train_step weigh what is stated"
    return run_trial(
        lambda cut: _DividedWindow(model, weighting, len(cut.rows)).compare(data, cut),
        cut,
        otherwise=None,
        question=question,
    )


class _DividedWindow(PartComparison):
    """The gradient that a step gives to its optimizer, on `total` rows and on parts of them."""

    def __init__(self, model: keras.Model, weighting: Weighting, total: int):
        self.model, self.weighting = model, weighting
        self.function = StepTrial(model, self._compute, total)

    def _compute(self, data: Batch) -> list[tf.Tensor]:
        captured: list[Gradients] = []
        with capturing_applies(lambda optimizer, gradients, variables: captured.append(gradients)):
            train_step_of(self.model)(data)
        (gradients,) = captured
        dense: list[Any] = [each for each in gradients if each is not None]
        return [tf.cast(tf.convert_to_tensor(each), "float32") for each in dense]

    def run(self, rows: Batch, first: int, *, changed: bool = False) -> list[WeightedGradient]:
        if changed:
            rows = (perturb(rows[0]), *rows[1:]) if isinstance(rows, tuple) else perturb(rows)
        gradients, _ = self.function(rows, None, first)
        weight = self.weighting.normalizer(arguments_of(rows))
        divisor = 0.0 if weight.summed else float(weight.never_zero.value)
        return [WeightedGradient([np.asarray(each, "float64") for each in gradients], divisor)]
