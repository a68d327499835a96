"""`fit` on several workers: compared before the first step, and once per epoch; all stop after the same step."""

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.exact_accumulation import with_those_of_updates
from keras_paragrad.compat.data import Adapter, source_with_options
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Logs
from keras_paragrad.compat.workers import all_or_none, barrier, gather
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.consistency.compare import check_same, check_same_weights, variables_to_compare
from keras_paragrad.distribution.consistency.describe import describe_training, is_of_a_library
from keras_paragrad.distribution.data import DistributedData, distributed_dataset
from keras_paragrad.distribution.data.agreement import Tally

_TRAIN_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
_ADVICE = (
    " Give every worker the same data and steps_per_epoch, and the same learning rate, from the logs, the epoch or the "
    "batch; don't change `trainable` or the optimizer on one worker only. Every worker has to read the same batches, "
    'and trains on its shard of each: seed any random order, or write shard_policy="already_sharded" if every worker '
    "reads its own shard."
)


# The tally of the data that was sharded last for a model; Keras reads the training data first.
_TALLY = Slot[Tally | None]("tally", None)


class AgreeEachEpoch(keras.callbacks.Callback):
    """Makes all workers stop after the same step, and compares their data and weights at the end of each epoch.

    If one worker stops, all do: after the same batch if a custom callback has batch hooks, as workers then ask each
    other after each batch, or else at the end of the epoch.
    """

    changes_training = False

    def __init__(
        self, strategy: tf.distribute.Strategy, callbacks: Sequence[keras.callbacks.Callback], tally: Tally | None
    ):
        super().__init__()
        self._strategy, self._callbacks, self._tally = strategy, with_those_of_updates(callbacks), tally
        # Whether workers ask each other after each batch, and whether this worker stops when the epoch ends.
        self._asks_in_training = self._asks_in_evaluation = self._stops_later = False
        # The number of the iterator that the data are read by, and the batches taken from it before and in this epoch.
        self._iterator = self._taken_before = self._taken = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._tally = self._tally or _TALLY.of(self.model)
        mine = [may_stop_within(self._callbacks, hooks) for hooks in (_TRAIN_HOOKS, _TEST_HOOKS)]
        self._asks_in_training, self._asks_in_evaluation = self._any(*mine)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._taken_before, self._taken, self._stops_later = self._taken_before + self._taken, 0, False

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        # The epoch's first batch may come from a new iterator.
        if self._tally and not self._taken and self._iterator != self._tally.reading:
            self._iterator, self._taken_before = self._tally.reading, 0
        self._taken = batch + 1
        if self._asks_in_training:
            self.model.stop_training = self._any(self.model.stop_training)[0]
        elif self.model.stop_training:
            # The others would wait for this worker's gradients forever.
            self._stops_later, self.model.stop_training = True, False

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        model: keras.Model = self.model
        model.stop_evaluating = self._asks_in_evaluation and self._any(model.stop_evaluating)[0]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        after, taken = f"after epoch {epoch}, counted from 0", self._taken_before + self._taken
        batches, checksum = self._tally.up_to(self._iterator, taken) if self._tally else (0, 0)
        rate = keras.ops.convert_to_numpy(getattr(self.model.optimizer, "learning_rate", math.nan))
        facts = {
            "steps taken": self._taken,
            "batches of data": batches,
            "checksum of the batches' shapes": checksum,
            "learning rate": float(f"{float(rate):.9g}"),
            # Weights of different numbers can't be gathered.
            "weights to compare": len(variables_to_compare(self.model)),
        }
        check_same(self._strategy, facts, f"The workers differ {after}", _ADVICE)
        check_same_weights(self._strategy, self.model, after)
        self.model.stop_training = self._any(self._stops_later or self.model.stop_training)[0]

    def _any(self, *mine: bool) -> list[bool]:
        """For each flag, whether it is true on any worker; all workers call this."""
        counts = gather(self._strategy, np.array(mine, np.int64)).sum(axis=0)
        return [bool(count) for count in counts]


def may_stop_within(callbacks: Sequence[keras.callbacks.Callback], hooks: Sequence[str]) -> bool:
    """Whether a callback may stop in an epoch: it has one of these hooks from no library, or is `TerminateOnNaN`.

    `changes_training = False` says of a custom callback that it doesn't stop.
    """
    return any(
        isinstance(callback, keras.callbacks.TerminateOnNaN) or not is_of_a_library(getattr(callback, hook))
        for callback in callbacks
        for hook in hooks
        if getattr(callback, "changes_training", True)
    )


def compared_fit(model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    """Calls the `fit` of the model's class with `AgreeEachEpoch`, if all workers are about to do the same."""
    fit, strategy = functools.partial(type(model).fit, model), model.distribute_strategy
    signature = inspect.signature(fit)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    # An overridden `fit` may take the callbacks among its keywords.
    keywords = [each.name for each in signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    rest = bound.arguments[keywords[0]] if keywords else {}
    arguments = {**{name: value for name, value in bound.arguments.items() if name not in keywords}, **rest}
    callbacks: Any = arguments.get("callbacks") or []
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    callbacks = list(callbacks.callbacks) if is_list else keras.tree.flatten(callbacks)
    if not any(isinstance(callback, AgreeEachEpoch) for callback in callbacks):
        described = all_or_none(strategy, lambda: describe_training(model, None, {**arguments, "callbacks": callbacks}))
        check_same(strategy, described)
        check_same_weights(strategy, model)
        _TALLY.attach(model, None)
        place = bound.arguments if "callbacks" in bound.arguments else rest
        place["callbacks"] = with_agreement(strategy, callbacks, arguments.get("x"))
    history = fit(*bound.args, **bound.kwargs)
    # Other workers may still read the last collective's result from this process, which may end next.
    barrier()
    return history


def shard_again(
    model: keras.Model, shard_policy: str, parts: int, adapter: Adapter, steps: int | None
) -> DistributedData | None:
    """The data that Keras reads through an adapter as `distributed_dataset`; `None` if it is that already."""
    reread_data = source_with_options(adapter)
    if reread_data is None:
        return None
    x, options = reread_data
    options.update(steps_per_epoch=steps, shard_policy=shard_policy, parts=parts or None)
    data = distributed_dataset(model.distribute_strategy, x, **options)
    _TALLY.attach(model, data.tally)
    return data


def with_agreement(
    strategy: tf.distribute.Strategy, callbacks: Sequence[keras.callbacks.Callback], x: object
) -> list[keras.callbacks.Callback]:
    """Adds `AgreeEachEpoch` after the callbacks that may stop `fit`, and before the backups, which record the stop."""
    agreement = AgreeEachEpoch(strategy, callbacks, x.tally if isinstance(x, DistributedData) else None)
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    return [*(callback for callback in callbacks if not isinstance(callback, Backup)), agreement, *backups]
