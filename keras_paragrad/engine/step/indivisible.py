"""Batches whose rows aren't examples, or that fit in one slice and are trained whole where larger ones are refused."""

import contextlib
import functools
import re
from collections.abc import Callable, Generator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.types import Batch, Step, StepLogs
from keras_paragrad.engine.batches.replica_batch import no_examples, rows_of, static_row_count
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.tracing.untouched import trace_rows

# Matches shape-mismatch errors from TensorFlow and Keras, never our own.
_OF_SHAPES = re.compile(
    r"Dimensions? (\d+ in both shapes )?must|[Ii]ncompatible|Shapes? \S+ must|[Cc]annot reshape|equal rank"
)
# TensorFlow quotes an assertion's message, but cuts long ones.
_TOO_LARGE = "keras_paragrad: a batch is larger than a slice"


@contextlib.contextmanager
def explaining_rows(model: keras.Model, data: Batch, parts: int, trace: Callable[[Any], object]) -> Generator[None]:
    """Context in which a part of a batch is traced; explains a shape error that the whole batch doesn't raise.

    `data` is one of `parts` equal parts of the batch. `trace` gets the whole batch, and traces the same computation.

    Raises:
        IndivisibleError: The rows of a batch aren't examples.
    """
    try:
        yield
    except IndivisibleError:
        raise
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if not _OF_SHAPES.search(str(error)):
            raise
        rows = static_row_count(data)
        try:
            trace_rows(model, trace, data, rows and rows * parts)
        except Exception:
            # The model's own error.
            raise error from None
        raise IndivisibleError(
            no_examples(f"{type(model).__name__} takes a whole batch, and fails on a part of its rows.")
        ) from error


class IndivisibleBatchGuard:
    """Limits batches to one slice where slices can't be combined; `refusal` returns the reason."""

    def __init__(self, model: keras.Model, split: Any, refusal: Callable[[], str | None]):
        self.model: keras.Model = model
        self.split, self._refusal = split, refusal

    def watch(self, step: Step) -> Callable[[Any], Any]:
        """Wraps a compiled step: checks before it that a batch fits in a slice, as XLA drops a step's assertions."""

        def check(data: Batch) -> None:
            rows = rows_of(data)
            tf.debugging.Assert(rows <= self.split.size, [_TOO_LARGE])

        @functools.partial(tf.function, reduce_retracing=True, autograph=False)
        def check_all(data: Batch) -> None:
            self.model.distribute_strategy.run(check, args=(data,))

        def watched(data: Batch) -> StepLogs:
            if self._refusal():
                check_all(data)
            return step(data)

        return watched if self.split else step

    def explain(self, error: tf.errors.InvalidArgumentError) -> None:
        """Raises `IndivisibleError` in place of the error of a failed check; ignores other errors."""
        refusal = self._refusal()
        if refusal and _TOO_LARGE in error.message:
            raise IndivisibleError(f"{self.split.refusal_prefix} {refusal}") from None
