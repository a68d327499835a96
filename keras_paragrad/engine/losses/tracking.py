"""Updates Keras's loss trackers as on one device."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.saved import SavedVariables
from keras_paragrad.engine.losses.sums import LossForm, LossSums, outputs_of, shown


class LossWindow(SavedVariables):
    """The sums of the micro-batches since the last update, which together are one batch.

    Args:
        model: A compiled model whose losses are built. Called in its strategy's scope.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self.outputs = outputs_of(model)
        entries = 1 + self.outputs
        # Besides the sums, what the trackers were given of the window so far: totals and counts.
        shape = (2 * entries + 1 + 2 * entries,)
        self.state = self.add("losses", shape, model._loss_tracker.dtype, aggregation="sum", local=True)


class TrackedLosses:
    """The losses of a batch on their way to Keras's trackers, within a step, on each replica.

    Keras counts a batch's `loss` by its rows. A tracker of one output's loss counts every batch the same, unless the
    model runs eagerly or the loss is not reduced.

    Args:
        model: The model that computed them.
        sums: This replica's.
        window: Where they belong to a window: the micro-batches before.
        ends: Whether they end the window.

    Attributes:
        part: The tensor to all-reduce.
    """

    def __init__(self, model: keras.Model, sums: LossSums, window: LossWindow | None = None, *, ends: bool = False):
        self.model: Any = model
        self.form: LossForm = sums.form
        self.window, self.ends = window, ends
        entries = 1 + len(sums.form.factors)
        self.part = tf.concat([sums.vector, tf.zeros([2 * entries], sums.vector.dtype)], 0)
        if window is not None:
            # A reset of the metrics also discards the window.
            known = self.model._loss_tracker.count.value > 0
            self.part += tf.where(known, window.state.value, 0.0)

    def track(self) -> None:
        """Adds the losses to the trackers."""
        if self._adds_up_by_itself:
            self._add(self.part, 1)
        else:
            self.add(sum_over_replicas([self.part])[0])

    def add(self, total: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Adds the losses to the trackers, given the sum of all replicas' `part`.

        Returns:
            What all replicas together have added, by variable.
        """
        return self._add(total, replica_count())

    @property
    def _adds_up_by_itself(self) -> bool:
        return self.form.proportional and len(self._trackers) == 1

    @property
    def _trackers(self) -> list[Any]:
        return [self.model._loss_tracker, *(self.model._compile_loss.metrics if self.model._compile_loss else ())]

    def _add(self, total: tf.Tensor, replicas: int) -> list[tuple[keras.Variable, tf.Tensor]]:
        entries = 1 + len(self.form.factors)
        sums, before, counted = tf.split(total, [2 * entries + 1, entries, entries])
        values, rows = shown(sums, self.form)
        batches = tf.cast(rows > 0, rows.dtype)
        counts = tf.stack([rows, *(rows if by_rows else batches for by_rows in self.form.by_rows)])
        if self.window is not None:
            kept = tf.concat([sums, values * counts, counts], 0) / replicas
            self.window.state.assign(tf.zeros_like(kept) if self.ends else kept)
        totals, counts = values * counts - before, counts - counted
        added = []
        called = [True, *self.form.called]
        for index, tracker in enumerate(self._trackers):
            if called[index]:
                added += [(tracker.total, totals[index]), (tracker.count, counts[index])]
        for variable, value in added:
            variable.assign_add(value / replicas)
        return added
