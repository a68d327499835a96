"""Finds, by a trial on synthetic rows, which layer calls in a custom `train_step` can be divided."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.model import train_step_of
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.engine.custom_step.analysis import ApplyCall
from keras_paragrad.engine.custom_step.divided_calls import has_rows, intercepting, rows_of_leaf
from keras_paragrad.engine.custom_step.versions import gather_remote_values
from keras_paragrad.engine.custom_step.weighting import TrialStep
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.probes.pure_function import is_seed
from keras_paragrad.engine.probes.trial import SIZES, Inconclusive, gradients_match, run_trial
from keras_paragrad.engine.probes.weighting_trial import ROWS, over_draws
from keras_paragrad.engine.tracing.random_rows import random_numbers_of_part

# The most synthetic rows for a batch of static size.
_MOST_ROWS = 256


def find_divided_calls(model: keras.Model, calls: Sequence[ApplyCall], data: Batch) -> list[bool]:
    """Tries each layer call on synthetic rows; returns whether it can be divided.

    Raises:
        IndivisibleError: Dividing the calls changes the step's results, or the step can't be tried.
    """
    static = {leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None}
    known = static.pop() if len(static) == 1 else None
    # A step may draw noise for the static number of rows.
    rows = known if known and known <= _MOST_ROWS else ROWS

    remote = gather_remote_values(model)

    def find(size: int) -> list[bool]:
        whole = _CallTrial(model, calls, remote, rows, None)
        parts: list[_CallTrial] = []

        def compare(batch: Any) -> bool:
            expected = whole.effects(batch)
            # Made after the first run of `whole`, which finds the calls to divide.
            parts[:] = parts or [_CallTrial(model, calls, remote, rows, whole.divides)]
            found = parts[0].effects(batch)
            if not any(np.any(gradient) for gradients in expected[: len(calls)] for gradient in gradients):
                # The parts' gradients may differ from 0 by rounding.
                raise Inconclusive("the step has no gradient on synthetic rows")
            pairs = zip(expected, found, strict=True)
            return all(gradients_match(*pair, half_precision=whole.half_precision) for pair in pairs)

        if not all(over_draws(model, data, size, compare, rows)):
            return []
        return whole.divides

    found = run_trial(find, *SIZES, otherwise=[], question="whether calls of layers in train_step can be divided")
    if not found:
        raise IndivisibleError("Its calls of layers can't be divided between replicas.")
    return found


class _CallTrial(TrialStep):
    """Runs a step on synthetic rows with its layer calls in parts, or whole, to find the calls that work row by row.

    `divides` tells for each layer call whether it runs in parts; `None` runs them whole and finds which may.
    """

    def __init__(
        self,
        model: keras.Model,
        calls: Sequence[ApplyCall],
        remote: Mapping[int, tf.Tensor],
        rows: int,
        divides: list[bool] | None,
    ):
        super().__init__(model, calls, remote, rows)
        self.divides, self._finds = divides or [], divides is None
        self._index = 0

    def run_step(self, data: Batch) -> list[list[tf.Tensor]]:
        self._index = 0
        if self._finds:
            self.divides = []
        with intercepting(self):
            logs = train_step_of(self.model)(data)
        return [[tf.cast(log, "float32") for log in keras.tree.flatten(logs) if log is not None]]

    def effects(self, data: Batch) -> list[list[tf.Tensor]]:
        """The step's gradients, logs and assigned values."""
        results, after = self(data)
        states = zip(self.variables, after, strict=True)
        return [*results, [tf.cast(value, "float32") for variable, value in states if not is_seed(variable)]]

    def call(self, call: Callable[..., Structure], arguments: Any, keywords: Any) -> Any:
        """Runs a layer call whole, and notes whether its outputs have its rows; or runs it in two unequal parts."""
        sizes = {int(leaf.shape[0]) for leaf in keras.tree.flatten((arguments, keywords)) if has_rows(leaf)}
        total = max(sizes, default=0)
        if self._finds:
            with random_numbers_of_part(0, total, total):
                outputs = call(*arguments, **keywords)
            by_row = all(has_rows(leaf) and leaf.shape[0] == total for leaf in keras.tree.flatten(outputs))
            self.divides.append(by_row and len(sizes) == 1 and total > 1)
            return outputs
        self._index += 1
        if self._index > len(self.divides):
            raise Inconclusive("the step calls layers differently in parts")
        if not self.divides[self._index - 1]:
            with random_numbers_of_part(0, total, total):
                return call(*arguments, **keywords)
        first = max(1, 3 * total // 8)
        parts = [self._part(call, arguments, keywords, *bounds, total) for bounds in ((0, first), (first, total))]
        return keras.tree.map_structure(_concatenate, *parts)

    def gradient(self, compute: Callable[[], Any]) -> Any:
        return compute()

    @staticmethod
    def _part(call: Callable[..., Structure], arguments: Any, keywords: Any, begin: int, end: int, total: int) -> Any:
        """Runs a layer call on the rows from `begin` to `end`, of `total`."""
        positional, named = keras.tree.map_structure(lambda leaf: rows_of_leaf(leaf, begin, end), (arguments, keywords))
        with random_numbers_of_part(begin, end - begin, total):
            return call(*positional, **named)


def _concatenate(*parts: Any) -> Any:
    masks = [mask for part in parts if (mask := mask_of(part)) is not None]
    return with_mask(tf.concat(parts, 0), tf.concat(masks, 0) if masks else None)
