"""`fit` on several workers: compared before the first step, and once per epoch; all stop after the same step."""

import functools
import inspect
import math
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.exact_accumulation import with_those_of_updates
from keras_paragrad.compat.data import Adapter, source_with_options
from keras_paragrad.compat.types import Logs
from keras_paragrad.compat.workers import all_or_none, barrier, gather
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.consistency.compare import (
    check_same_training,
    check_same_weights,
    refuse_if_differing,
    sketches,
    variables_to_compare,
)
from keras_paragrad.distribution.consistency.describe import bind_arguments, describe_training, is_of_a_library
from keras_paragrad.distribution.data import DistributedData, distributed_dataset

# A 64-bit checksum is gathered as two numbers that float64 holds exactly.
_HALF = 1 << 32
# For each flag of the model that stops a loop, the batch hooks that may set it.
_BATCH_HOOKS = {
    "stop_training": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "stop_evaluating": ("on_test_batch_begin", "on_test_batch_end"),
}


class AgreeEachEpoch(keras.callbacks.Callback):
    """Makes all workers stop after the same step, and compares their data and weights at the end of each epoch.

    Has to come after the callbacks that may set `model.stop_training`. If one worker stops, all do: at the end of an
    epoch, or after the same batch if a callback's batch hooks mention `stop_training`; workers then ask each other
    after each batch. Any other stop within an epoch is postponed to its end.

    Args:
        strategy: The strategy, of several workers.
        callbacks: The other callbacks of this `fit`.
        data: The training data, if known.

    Raises:
        ValueError: When an epoch ends, on every worker: their data, weights or learning rates differ. The message gives
            both values.
    """

    changes_training = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        callbacks: Sequence[keras.callbacks.Callback],
        data: DistributedData | None = None,
    ):
        super().__init__()
        self._strategy = strategy
        self._callbacks = with_those_of_updates(callbacks)
        self.data = data
        # Whether workers ask each other after each batch, by the flag that a worker may have set.
        self._asks = {"stop_training": False, "stop_evaluating": False}
        # Whether this worker stops when the epoch ends.
        self._stops_later = False
        # The number of the iterator that the data are read by, and the batches taken from it before and in this epoch.
        self._iterator: int | None = None
        self._taken_before = self._taken = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Determines whether a worker may stop between batches."""
        self._iterator, self._taken_before, self._taken = None, 0, 0
        mine = [stops_within(self._callbacks, flag) for flag in self._asks]
        counts = gather(self._strategy, np.array(mine, np.int64)).sum(axis=0)
        self._asks = dict(zip(self._asks, map(bool, counts.tolist()), strict=True))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts counting the epoch's batches."""
        self._taken_before, self._taken, self._stops_later = self._taken_before + self._taken, 0, False

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Agrees on whether to stop, if a worker may."""
        self._count(batch + 1)
        if self._asks["stop_training"]:
            self.model.stop_training = self._any(self.model.stop_training)
        elif self.model.stop_training and not self._is_seen_by_all(logs):
            # The others would wait for this worker's gradients forever.
            self._stops_later, self.model.stop_training = True, False

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Agrees on whether to stop an evaluation."""
        model: keras.Model = self.model
        model.stop_evaluating = self._asks["stop_evaluating"] and self._any(model.stop_evaluating)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compares the epoch, and agrees on whether it is the last."""
        variables = variables_to_compare(self.model)
        batches, layout = self._tally()
        stop = self._stops_later or self.model.stop_training
        facts = [stop, self._taken, batches, layout // _HALF, layout % _HALF, self._rate(), len(variables)]
        # First the number of variables: vectors of different lengths can't be gathered.
        of_workers = gather(self._strategy, np.array(facts, np.float64))
        self._refuse_differing(epoch, of_workers)
        # Two numbers per variable, which stand for its values.
        mine = sketches(self._strategy, variables)
        all_sketches = gather(self._strategy, mine.reshape(-1)).reshape(len(of_workers), -1, 2)
        refuse_if_differing(all_sketches, variables, f"after epoch {epoch}, counted from 0")
        self.model.stop_training = bool(of_workers[:, 0].any())

    def _count(self, taken: int) -> None:
        """Records how many batches of the epoch were taken."""
        if self.data is None or self.data.tally is None:
            self._taken = taken
            return
        # The epoch's first batch may come from a new iterator.
        if self._iterator != self.data.tally.reading and not self._taken:
            self._iterator, self._taken_before = self.data.tally.reading, 0
        self._taken = taken

    def _tally(self) -> tuple[int, int]:
        """The number of batches that the iterator has read for this worker's steps, and a checksum of their shapes."""
        if self.data is None or self.data.tally is None or self._iterator is None:
            return 0, 0
        return self.data.tally.up_to(self._iterator, self._taken_before + self._taken)

    def _rate(self) -> float:
        """The learning rate, or NaN if there is none."""
        rate = getattr(getattr(self.model, "optimizer", None), "learning_rate", math.nan)
        return float(keras.ops.convert_to_numpy(rate))

    def _any(self, mine: bool) -> bool:
        """Whether it is true on any worker; all workers call this."""
        return bool(gather(self._strategy, np.array([mine], np.int64)).any())

    def _is_seen_by_all(self, logs: Logs | None) -> bool:
        """Whether `TerminateOnNaN` stopped, which goes by the loss of all workers."""
        ends = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in self._callbacks)
        return ends and not math.isfinite(float((logs or {}).get("loss", 0.0)))

    def _refuse_differing(self, epoch: int, of_workers: np.ndarray) -> None:
        """Raises if workers differ in what `on_epoch_end` gathers, `(workers, facts)`, beside the flag to stop."""
        # By the index of a fact: the key of its advice, and its name.
        names = {
            1: ("steps", "steps taken"),
            2: ("batches", "batches of data"),
            5: ("learning rate", "learning rate"),
            6: ("weights", "weights to compare"),
        }
        for index, (advice, name) in names.items():
            values = of_workers[:, index]
            others = np.flatnonzero(~((values == values[0]) | (np.isnan(values) & np.isnan(values[0]))))
            if len(others):
                raise ValueError(
                    f"The workers differ after epoch {epoch}, counted from 0: {name}: {values[0]:.9g} on worker 0, "
                    f"{values[others[0]]:.9g} on worker {others[0]}. {_ADVICE[advice]}"
                )
        others = np.flatnonzero((of_workers[:, 3:5] != of_workers[0, 3:5]).any(axis=1))
        if len(others):
            raise ValueError(
                f"The workers differ after epoch {epoch}, counted from 0: the {of_workers[0, 2]:.0f} batches that "
                f"worker 0 read have other shapes than the batches of worker {others[0]}. {_ADVICE['batches']}"
            )


def stops_within(callbacks: Sequence[keras.callbacks.Callback], flag: str) -> bool:
    """Whether a callback with batch hooks mentions `stop_training` or `stop_evaluating`, and so may stop in an epoch.

    `TerminateOnNaN` doesn't count: it goes by the loss, which is the same on all workers.
    """
    return any(flag in _names_in(code) for callback in callbacks for code in _codes(callback, _BATCH_HOOKS[flag]))


def _codes(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> list[CodeType]:
    """The code of a custom callback's methods and functions; none if it has no batch hooks of its own."""
    custom = [base for base in type(callback).__mro__ if not is_of_a_library(base)]
    has_hooks = any(hook in vars(base) for base in custom for hook in hooks)
    if not (has_hooks or isinstance(callback, keras.callbacks.LambdaCallback)):
        return []
    # A hook may call another of the callback's methods, which stops.
    members = [member for owner in (*custom, callback) for member in vars(owner).values()]
    functions = [inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member))) for member in members]
    return [function.__code__ for function in functions if isinstance(function, FunctionType)]


def _names_in(code: CodeType) -> set[str]:
    """The attributes and globals that code and the functions in it refer to."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


_ADVICE = {
    "steps": "Give every worker the same data and the same steps_per_epoch.",
    "batches": (
        "Every worker has to read the same batches, and trains on its shard of each: seed any random order, or write "
        'shard_policy="already_sharded" if every worker reads its own shard.'
    ),
    "learning rate": "Set the same on every worker, from values that all of them have: the logs, the epoch, the batch.",
    "weights": "Don't change `trainable` or replace the optimizer on one worker only.",
}


class ComparedFit:
    """A model's `fit` on several workers, which all of them call.

    Args:
        model: The model.
        shard_policy, parts: How workers share data that is not sharded yet; see `distributed_dataset`.
    """

    def __init__(self, model: keras.Model, shard_policy: str = "auto", parts: int | None = None):
        self._model = model
        self.shard_policy, self.parts = shard_policy, parts
        self._agreement: AgreeEachEpoch | None = None

    @classmethod
    def of(cls, model: keras.Model, shard_policy: str = "auto", parts: int | None = None) -> "ComparedFit":
        """The one that a model's `fit` already is, with these settings, or a new one."""
        installed = model.__dict__.get("fit")
        if not isinstance(installed, cls):
            return cls(model, shard_policy, parts)
        installed.shard_policy, installed.parts = shard_policy, parts
        return installed

    def __call__(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Calls the `fit` of the model's class, after checking that all workers are about to do the same."""
        history = self._compared(*args, **kwargs)
        # Other workers may still read the last collective's result from this process, which may end next.
        barrier()
        return history

    def _compared(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Compares model, arguments and weights between workers, and calls `fit` with `AgreeEachEpoch`."""
        fit = functools.partial(type(self._model).fit, self._model)
        arguments = bind_arguments(fit, args, kwargs)
        callbacks = given_callbacks(arguments.get("callbacks"))
        if any(isinstance(callback, AgreeEachEpoch) for callback in callbacks):
            return fit(*args, **kwargs)
        strategy = self._model.distribute_strategy
        compared = {**arguments, "callbacks": callbacks}
        check_same_training(strategy, all_or_none(strategy, lambda: describe_training(self._model, None, compared)))
        check_same_weights(strategy, self._model)
        x = arguments.get("x")
        self._agreement = AgreeEachEpoch(strategy, callbacks, x if isinstance(x, DistributedData) else None)
        bound = inspect.signature(fit).bind(*args, **kwargs)
        _replace_argument(bound, "callbacks", with_agreement(callbacks, self._agreement))
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            self._agreement = None

    def sharded(self, adapter: Adapter, steps: int | None) -> DistributedData | None:
        """Shards data so that each global batch is the batch of one device; `None` if it is sharded already."""
        data = shard_again(self._model, self.shard_policy, self.parts, adapter, steps)
        if data is not None and self._agreement is not None and self._agreement.data is None:
            # Keras reads the training data first.
            self._agreement.data = data
        return data


def shard_again(
    model: keras.Model, shard_policy: str, parts: int | None, adapter: Adapter, steps: int | None
) -> DistributedData | None:
    """The data that Keras reads through an adapter as `distributed_dataset`; `None` if it is that already."""
    reread_data = source_with_options(adapter)
    if reread_data is None:
        return None
    x, options = reread_data
    strategy = model.distribute_strategy
    return distributed_dataset(
        strategy, x, steps_per_epoch=steps, shard_policy=shard_policy, parts=parts or None, **options
    )


def given_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks given to `fit`, as a list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return keras.tree.flatten(callbacks) if callbacks else []


def with_agreement(
    callbacks: Sequence[keras.callbacks.Callback], agreement: AgreeEachEpoch
) -> list[keras.callbacks.Callback]:
    """Inserts `agreement` after the callbacks that may stop `fit`, and before the backups, which record the stop."""
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    return [*(callback for callback in callbacks if not isinstance(callback, Backup)), agreement, *backups]


def _replace_argument(bound: inspect.BoundArguments, name: str, value: object) -> None:
    """Replaces an argument of a call; an overridden `fit` may take it among its keywords."""
    if name in bound.signature.parameters:
        bound.arguments[name] = value
        return
    rest = [
        parameter
        for parameter in bound.signature.parameters.values()
        if parameter.kind is inspect.Parameter.VAR_KEYWORD
    ]
    if rest:
        bound.arguments[rest[0].name] = {**bound.arguments.get(rest[0].name, {}), name: value}
