"""Holds the weighting that is stated for a `train_step` in windows to the micro-batches of the first one."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import percent, train_step_of
from keras_paragrad.compat.types import Batch, Gradients
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.losses.weightings import Weighting
from keras_paragrad.engine.proof.call_trials import StepTrial
from keras_paragrad.engine.proof.loss_proof import perturb
from keras_paragrad.engine.proof.rows import even_parts, gather_rows
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.trials.trial import row_count, take_rows, unexplained_error


class WindowProof:
    """Compares the weighted gradients that a step gives to its optimizer, on parts of `size` rows, with the whole's."""

    def __init__(self, model: keras.Model, data: Batch, size: int, weighting: Weighting):
        self.model, self._rows, self._size, self._weighting = model, data, size, weighting
        self._function = StepTrial(model, self._compute, row_count(data))

    def ask(self) -> str | None:
        """Why the parts don't weigh what is stated, with the weights of now, or `None`."""
        self._function.renew()
        whole = self._gradients(self._rows)
        parts, divisors = [], []
        for start, stop in even_parts(row_count(self._rows), self._size):
            rows = take_rows(self._rows, start, stop)
            weight = self._weighting.normalizer(arguments_of(rows))
            divisors.append(0.0 if weight.summed else float(weight.never_zero.value))
            parts.append([(divisors[-1] or 1.0) * gradient for gradient in self._gradients(rows, start)])
        total = [np.sum(pieces, 0) / (sum(divisors) or 1.0) for pieces in zip(*parts, strict=True)]
        half = self._function.half_precision
        error = unexplained_error(whole, total, self._changed, half_precision=half)
        if not error:
            return None
        return (
            f"On {row_count(self._rows)} rows of the first batch, the weighted gradients of {len(parts)} parts are "
            f"{percent(error)} off the gradient of the whole"
        )

    def find_metric_differences(self) -> list[str]:
        """None: the step updates the metrics of a micro-batch."""
        return []

    def _changed(self) -> Iterator[list[np.ndarray]]:
        """The whole's gradient after changes that affect only rounding and random numbers."""
        rows = self._rows
        yield self._gradients((perturb(rows[0]), *rows[1:]) if isinstance(rows, tuple) else perturb(rows))
        if not self._function.draws:
            yield self._gradients(gather_rows(rows, range(row_count(rows))[::-1]))

    def _gradients(self, rows: Batch, first: int = 0) -> list[np.ndarray]:
        return [np.asarray(each, "float64") for each in self._function(rows, None, first)[0]]

    def _compute(self, data: Batch) -> list[tf.Tensor]:
        captured: list[Gradients] = []
        with capturing_applies(lambda optimizer, gradients, variables: captured.append(gradients)):
            train_step_of(self.model)(data)
        (gradients,) = captured
        dense: list[Any] = [each for each in gradients if each is not None]
        return [tf.cast(tf.convert_to_tensor(each), "float32") for each in dense]
