"""Batches that are trained on whole, under a component that would divide larger ones or divide them over devices."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from keras_paragrad.compat.state import state_of
from keras_paragrad.engine.losses.normalization import IndivisibleError, LossNormalization
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.replicas.shard import rows_of

_log = logging.getLogger("keras_paragrad")
# TensorFlow quotes what a check fails with, so that this can be found in it and a longer text can't.
_ABOVE = "keras_paragrad: a batch is larger than a slice"


class DeferredRefusal:
    """Says once for each model what a `LossNormalization` would refuse, where no batch is divided and nothing measured.

    Two of the same measure are equal, so that a step compiled for one serves the other.

    Args:
        measure: What would measure the parts of a batch.
        where: What follows the model's name and comes before "would be refused".
    """

    def __init__(self, measure: LossNormalization, where: str):
        self.measure, self.where = measure, where

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeferredRefusal) and (other.measure, other.where) == (self.measure, self.where)

    def __hash__(self) -> int:
        return hash((self.measure, self.where))

    def check(self, model: keras.Model) -> None:
        """Says what can be told without a batch."""
        try:
            self.measure.check(model)
        except IndivisibleError as refusal:
            self.say(model, refusal)

    def look(self, model: Any, arguments: dict[str, Any], terms: list[LossTerm]) -> None:
        """Says what is found in a step; takes what a `LossNormalization` takes. Looks once for each `compile`."""
        state = state_of(model)
        if self.where in state.logged or state.deferred_refusal.get(self.where) is model._compile_config:
            return
        state.deferred_refusal = {**state.deferred_refusal, self.where: model._compile_config}
        # What is computed to find out is in a graph that is never run.
        with FuncGraph("foreseen").as_default(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.measure.check(model)
                self.measure(model, arguments, terms)
            except IndivisibleError as refusal:
                self.say(model, refusal)
            except Exception:
                # Of a loss that runs eagerly alone, for one. What is only foreseen must not end training.
                return

    def say(self, model: keras.Model, refusal: IndivisibleError) -> None:
        """Logs what would be refused, unless that was said of this model before."""
        state = state_of(model)
        if self.where not in state.logged:
            state.logged |= {self.where}
            _log.warning("%s %s would be refused: %s", type(model).__name__, self.where, refusal)


class IndivisibleBatchGuard:
    """The most examples that a batch may have in one train function, once its step has turned out to be indivisible.

    Args:
        model: The model.
        split: What would cut its batches, or `None`.
    """

    def __init__(self, model: keras.Model, split: Any):
        self.model: Any = model
        self.split = split
        self._refusal: str | None = None

    def leave_whole(self, data: Any, refusal: IndivisibleError) -> None:
        """Told, while a step is traced, why its batches can't be cut.

        Raises:
            IndivisibleError: A batch of these shapes has to be cut.
        """
        cuts = self.split.cuts(data)
        message = f"{self.split.undivided} {refusal}"
        if cuts:
            raise IndivisibleError(message) from None
        if cuts is None:
            self._refusal = message
        self.split.deferred_refusal.say(self.model, refusal)

    def watch(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A compiled step that fails on batches above the limit; outside of it, as XLA leaves out what only checks."""

        def check(data: Any) -> None:
            rows = rows_of(data)
            tf.debugging.Assert(rows <= self.split.size, [_ABOVE])

        @functools.partial(tf.function, reduce_retracing=True, autograph=False)
        def check_all(data: Any) -> None:
            self.model.distribute_strategy.run(check, args=(data,))

        def watched(data: Any) -> Any:
            known = self._refusal
            if known:
                check_all(data)
            result = step(data)
            # Only found out while the step was traced just now.
            if self._refusal and not known:
                check_all(data)
            return result

        return watched if self.split else step

    def explain(self, error: tf.errors.InvalidArgumentError) -> None:
        """Raises a failure to check as what it is; does nothing for other errors.

        Raises:
            IndivisibleError: A batch was above the limit.
        """
        if self._refusal and _ABOVE in error.message:
            raise IndivisibleError(self._refusal) from None
