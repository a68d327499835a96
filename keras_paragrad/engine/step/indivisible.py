"""Batches that fit in one slice: trained whole where larger ones would be refused.

A refusal is the message of the `IndivisibleError` for batches that can't be divided into parts: why, and what to do.
"""

import contextlib
import dataclasses
import functools
import logging
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.private import FuncGraph
from keras_paragrad.compat.state import LOGGED, Slot, record_first
from keras_paragrad.compat.types import Batch, LossArguments, Step, StepLogs
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.replicas.replica_batch import no_examples, rows_of, static_row_count
from keras_paragrad.engine.tracing.untouched import trace_rows

_log = logging.getLogger("keras_paragrad")
# By `DeferredRefusal.where`, the model's `compile` configuration when `look` last checked it.
_LOOKED = Slot[Mapping[str, Any]]("deferred_refusals", {})
# Matches shape-mismatch errors from TensorFlow and Keras, never our own.
_OF_SHAPES = re.compile(
    r"Dimensions? (\d+ in both shapes )?must|[Ii]ncompatible|Shapes? \S+ must|[Cc]annot reshape|equal rank"
)
# TensorFlow quotes an assertion's message, but cuts long ones.
_TOO_LARGE = "keras_paragrad: a batch is larger than a slice"


@dataclasses.dataclass(frozen=True)
class DeferredRefusal:
    """Warns, once for each model, of what a `LossNormalization` would refuse if batches were divided.

    Equal instances share compiled steps.

    Attributes:
        normalize: The normalization that a divided batch would need.
        where: The warning's words between the model's name and "would be refused".
    """

    normalize: LossNormalization
    where: str

    def check(self, model: keras.Model) -> None:
        """Warns about problems detectable before the first batch."""
        if refusal := self.normalize.find_refusal(model):
            self.say(model, refusal)

    def look(self, model: keras.Model, arguments: LossArguments, terms: list[LossTerm]) -> None:
        """Warns about problems that only a batch shows; checks the first batch after each `compile`."""
        looked = _LOOKED.of(model)
        if self.normalize.divider.divides_calls and self.normalize.weighting == "auto":
            # Calls of layers are divided where the loss isn't.
            return
        if self.where in LOGGED.of(model) or looked.get(self.where) is model._compile_config:
            return
        _LOOKED.attach(model, {**looked, self.where: model._compile_config})
        # A separate graph, which never runs.
        with FuncGraph("deferred_refusal").as_default(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.normalize.check(model)
                self.normalize(model, arguments, terms)
            except IndivisibleError as refusal:
                self.say(model, str(refusal))
            except Exception:
                # A loss that only runs eagerly, for one: a warning must not end the training.
                return

    def say(self, model: keras.Model, refusal: str) -> None:
        """Logs the refusal, unless it was logged for this model before."""
        if record_first(model, self.where):
            _log.warning("%s %s would be refused: %s", type(model).__name__, self.where, refusal)


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
            raise IndivisibleError(f"{self.split.undivided} {refusal}") from None
