"""`fit` of a model on several workers: compared before the first step, on batches sharded as one device's."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad.compat.data import reread
from keras_paragrad.compat.workers import barrier
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.consistency.compare import check_same_training
from keras_paragrad.distribution.consistency.describe import arguments_of, describe_training
from keras_paragrad.distribution.consistency.epochs import AgreeEachEpoch
from keras_paragrad.distribution.consistency.weights import check_same_weights
from keras_paragrad.distribution.data import DistributedData, distributed_dataset
from keras_paragrad.distribution.workers import all_or_none


class ComparedFit:
    """A model's `fit` on several workers, which all of them call.

    Args:
        model: The model.
        shard_policy: How workers share data that is not sharded yet; see `distributed_dataset`.
    """

    def __init__(self, model: Any, shard_policy: str = "auto"):
        self._model = model
        self.shard_policy = shard_policy
        self._agreement: AgreeEachEpoch | None = None

    @classmethod
    def of(cls, model: Any, shard_policy: str = "auto") -> "ComparedFit":
        """The one that a model already has, or a new one."""
        installed = model.__dict__.get("fit")
        if not isinstance(installed, cls):
            return cls(model, shard_policy)
        installed.shard_policy = shard_policy
        return installed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the `fit` of the model's class, after checking that all workers are about to do the same."""
        history = self._compared(*args, **kwargs)
        barrier()
        return history

    def _compared(self, *args: Any, **kwargs: Any) -> Any:
        fit = functools.partial(type(self._model).fit, self._model)
        arguments = arguments_of(fit, args, kwargs)
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
        _put(bound, "callbacks", with_agreement(callbacks, self._agreement))
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            self._agreement = None

    def sharded(self, adapter: Any, steps: int | None) -> DistributedData | None:
        """Data sharded so that each batch is that of one device; `None` if it is sharded already."""
        reread_data = reread(adapter)
        if reread_data is None:
            return None
        x, options = reread_data
        data = distributed_dataset(
            self._model.distribute_strategy, x, steps_per_epoch=steps, shard_policy=self.shard_policy, **options
        )
        if self._agreement is not None and self._agreement.data is None:
            # Keras reads the training data first.
            self._agreement.data = data
        return data


def given_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks given to `fit`, as a list."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return keras.tree.flatten(callbacks) if callbacks else []


def with_agreement(
    callbacks: Sequence[keras.callbacks.Callback], agreement: AgreeEachEpoch
) -> list[keras.callbacks.Callback]:
    """Inserts `agreement` after the callbacks that may stop `fit`, and before the backups, which record that."""
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    return [*(callback for callback in callbacks if not isinstance(callback, Backup)), agreement, *backups]


def _put(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Replaces an argument of a call; an overridden `fit` may take it among its keywords."""
    if name in bound.signature.parameters:
        bound.arguments[name] = value
        return
    rest = [each for each in bound.signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    if rest:
        bound.arguments[rest[0].name] = {**bound.arguments.get(rest[0].name, {}), name: value}
