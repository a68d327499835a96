"""Writes step markers into a trace, in xprof's format."""

from typing import Any

import tensorflow as tf

from keras_paragrad.profiling.updates import UpdateCount


class StepMarkers:
    """Marks each call from its start to the start of the next, so that the time of other callbacks is included.

    A step marker is a step for TensorBoard. If an update takes several batches, the update is the step, with its
    batches nested inside. The markers carry all metadata that the analysis needs.

    Args:
        updates: Counts batches into updates; positioned before the first call.
        per_call: How many batches a call runs.
        pulls: Batches taken from iterators per training batch: one for each replica.
    """

    def __init__(self, updates: UpdateCount, per_call: int, pulls: int):
        self._updates = updates
        self._per_call = per_call
        self._pulls = pulls
        self._nested = updates.each > 1 and per_call == 1
        self._update: Any = None
        self._call: Any = None
        self._batch = 0

    def open(self, batch: int) -> None:
        """Marks the start of a call, and the end of the previous one.

        Args:
            batch: How many batches of the training have run.
        """
        self.close(batch, for_good=False)
        updates = self._updates
        stats = {"batch": batch, "update": updates.update, "pulls": self._pulls}
        if self._nested:
            if self._update is None:
                self._update = tf.profiler.experimental.Trace("update", step_num=updates.update, _r=1)
            self._call = tf.profiler.experimental.Trace("batch", **stats)
        else:
            stats |= {"count": self._per_call, "left": updates.left, "each": updates.each}
            self._call = tf.profiler.experimental.Trace("train", step_num=batch, _r=1, **stats)
        self._batch = batch

    def close(self, batch: int, *, for_good: bool = True) -> None:
        """Marks the end of the last call, if open, and of its update, if complete.

        Args:
            batch: How many batches of the training have run. If unchanged by the call, the data had ended.
            for_good: Whether something other than training comes next.
        """
        update = self._updates.update
        if self._call is not None:
            if batch > self._batch:
                self._call.set_metadata(ran=1)
                self._updates.advance(batch - self._batch)
            self._call.__exit__(None, None, None)
            self._call = None
        if self._update is not None and (for_good or self._updates.update != update):
            self._update.__exit__(None, None, None)
            self._update = None

    def read(self) -> None:
        """Rereads the optimizer's position: the end of an epoch may have completed an update."""
        self._updates.read()
