"""The `fit` of `DistributedFit`: checks its arguments, and calls the model's `fit` with the callbacks replicas need."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike, fspath
from typing import Any

import keras

from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation, with_those_of_updates
from keras_paragrad.arguments import check_each, check_flag, check_instance, check_integer, check_number
from keras_paragrad.compat.data import is_batched, split_for_validation
from keras_paragrad.compat.model import has_evaluated
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.types import FitData, Logs
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.interruptions import explained_failures
from keras_paragrad.distribution.checkpoint.writers import check_callbacks, with_one_writer
from keras_paragrad.distribution.consistency.fitting import with_agreement
from keras_paragrad.distribution.data import DistributedData, FollowEpochs
from keras_paragrad.distribution.decisions.batch import scaling_factor
from keras_paragrad.distribution.parallelism import PlannedRun
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.engine.step.execution import without_batches

# The arguments of Keras's `fit` besides `x`, `verbose` and `callbacks`.
ABOUT_DATA = (
    *("y", "batch_size", "validation_split", "validation_data", "shuffle", "class_weight", "sample_weight"),
    "validation_batch_size",
)
ABOUT_EPOCHS = ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "validation_freq")


@dataclass(frozen=True)
class FitArguments:
    """The checked arguments of `DistributedFit.fit`, which documents them.

    Raises:
        ValueError: An argument other than data is invalid. It is raised before any worker waits for another.
    """

    model: keras.Model
    x: FitData = None
    y: FitData = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: str | int = "auto"
    callbacks: Sequence[keras.callbacks.Callback] | None = None
    validation_split: float = 0.0
    validation_data: FitData = None
    shuffle: bool | str = True
    class_weight: dict[int, float] | None = None
    sample_weight: FitData = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Sequence[int] = 1
    _: KW_ONLY
    normalize: bool = False
    cache: bool | str | PathLike[str] = False
    prefetch: bool | int = True
    seed: int | None = None

    def __post_init__(self):
        check_instance("model", self.model, keras.Model, "a Keras model")
        check_integer("epochs", self.epochs, least=0, example=10)
        check_integer("initial_epoch", self.initial_epoch, least=0, example=0)
        check_number("validation_split", self.validation_split, least=0, below=1, example=0.2)
        check_integer("validation_steps", self.validation_steps, optional=True)
        check_integer("validation_batch_size", self.validation_batch_size, optional=True)
        if isinstance(self.validation_freq, (list, tuple, set)):
            check_each("validation_freq", self.validation_freq, check_integer, "epochs")
        else:
            check_integer("validation_freq", self.validation_freq, example=1)
        check_flag("normalize", self.normalize)
        one = isinstance(self.callbacks, keras.callbacks.Callback)
        callbacks = [self.callbacks] if one else [] if self.callbacks is None else check_callbacks(self.callbacks)
        object.__setattr__(self, "callbacks", callbacks)

    def compared(self) -> dict[str, Any]:
        """The arguments, and whether data is sharded already, for workers to compare."""
        data = {"x sharded": self.x, "validation_data sharded": self.validation_data}
        return {**vars(self), **{name: isinstance(value, DistributedData) for name, value in data.items()}}

    def split(self) -> tuple[tuple[FitData, FitData, FitData], Any]:
        """`(x, y, sample_weight)` for training, and the validation data or `None`."""
        rows = self.x, self.y, self.sample_weight
        if self.validation_split and self.validation_data is None:
            return split_for_validation(*rows, self.validation_split)
        return rows, self.validation_data

    def data_options(self) -> dict[str, Any]:
        """The options of `DistributedFit.dataset` for the training data."""
        names = ("batch_size", "steps_per_epoch", "shuffle", "class_weight", "cache", "prefetch", "seed")
        return {name: getattr(self, name) for name in names}

    def validation_options(self, x: FitData, *, divided: bool) -> dict[str, Any]:
        """The options of `DistributedFit.dataset` for validation data, whose batches are `divided` among replicas."""
        cache = f"{fspath(self.cache)}.validation" if isinstance(self.cache, (str, PathLike)) else self.cache
        # Data that is batched already does not take the batch size of the training data.
        default = None if is_batched(x) and divided else self.batch_size
        sizes = {"batch_size": self.validation_batch_size or default, "steps_per_epoch": self.validation_steps}
        return {**sizes, "cache": cache, "prefetch": self.prefetch, "seed": self.seed}

    def non_default(self, names: Iterable[str]) -> dict[str, Any]:
        """The named arguments that aren't their default objects; data may be arrays, which `!=` compares by element."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not getattr(FitArguments, name)}


def check_overridden_fit(request: FitArguments, plan: Plan) -> None:
    """Refuses arguments that have no effect because the model's class overrides `fit` and reads its data itself."""
    prepared = f"{type(request.model).__name__} overrides `fit`. Write dist.prepare(model) and then"
    if isinstance(request.x, DistributedData):
        raise ValueError(
            f"{prepared} keras.Model.fit(model, data), which takes data that is already sharded; or pass the original "
            "data to dist.fit."
        )
    if plan.batch.value == "per_replica":
        raise ValueError(
            f'{prepared} model.fit(...) with the batch of all replicas: batch="per_replica" has no effect on data that '
            "the model reads itself. Leave it out."
        )
    if options := request.non_default(("cache", "prefetch", "seed")):
        listed = ", ".join(f"{option}=" for option in options)
        raise ValueError(
            f"{prepared} model.fit(...) without {listed}, which has no effect on data that the model reads itself. "
            "Configure that in a tf.data.Dataset; or preprocess the data, and write "
            "keras.Model.fit(model, dist.dataset(x, y))."
        )


def train(run: PlannedRun, request: FitArguments, data: FitData, arguments: dict[str, Any]) -> keras.callbacks.History:
    """Calls the `fit` of a prepared model; of several workers, only the chief shows progress and writes files."""
    hardware, plan, strategy = run.hardware, run.plan, run.strategies.workers
    model, callbacks, verbose = request.model, request.callbacks or [], request.verbose
    distributed = data if isinstance(data, DistributedData) else None
    one_worker = hardware.worker_count == 1 and replica_placement(strategy).workers == 1
    # Not the plan's factor, which is `None` if it was made before the number of a TPU's replicas was known.
    factor = scaling_factor(run.options.lr_scaling, strategy.num_replicas_in_sync) or 1.0
    # A `Backup` comes last, as it saves the state of all others.
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    others = [callback for callback in callbacks if not isinstance(callback, Backup)]
    added: list[keras.callbacks.Callback] = [FollowEpochs(distributed)] if distributed is not None else []
    if find_accumulator(model.optimizer) and not any(isinstance(callback, ExactAccumulation) for callback in others):
        added.append(ExactAccumulation())
    # The functions that preparations make in place of Keras's refuse empty data themselves.
    if arguments.get("validation_data") is not None and "make_test_function" not in vars(model):
        added.append(_RefuseEmptyValidation())
    if factor != 1:
        added.append(ScaledLearningRate(factor, plan.warmup_steps.value))
    others = [*added, *others]
    others = others if one_worker else with_one_writer(others, hardware.is_chief)
    for backup in backups:
        backup.callbacks = [*backup.callbacks, *with_those_of_updates(others)]
    callbacks = [*others, *backups]
    if distributed is not None and replica_placement(strategy).workers > 1:
        callbacks = with_agreement(strategy, callbacks, distributed)
    try:
        with explained_failures(hardware.cluster):
            verbose = verbose if hardware.is_chief or verbose != "auto" else 0
            return model.fit(data, verbose=verbose, callbacks=callbacks, **arguments)
    finally:
        # Keras does not notify callbacks of a `fit` that failed.
        for callback in callbacks:
            if isinstance(callback, (Backup, ScaledLearningRate)):
                callback.leave()


class _RefuseEmptyValidation(keras.callbacks.Callback):
    """Raises if validation by Keras's own test function ran without a single batch."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        if not has_evaluated(self.model):
            raise without_batches(self.model)


class ScaledLearningRate(keras.callbacks.Callback):
    """Scales the learning rate while `fit` runs, after a warm-up that starts at the unscaled rate.

    Args:
        factor: The factor of the rate.
        warmup_steps: Number of updates over which the rate grows by the factor, in equal steps.

    Raises:
        ValueError: When `fit` begins: the optimizer has a schedule, which has to be scaled in its definition.

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD (2017), https://arxiv.org/abs/1706.02677: gradual warmup.
    """

    def __init__(self, factor: float, warmup_steps: int = 0):
        super().__init__()
        self.factor = factor
        self.warmup_steps = warmup_steps
        self._rate: float | None = None
        self._warming_up = False
        self._first_update = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Records the rate, and refuses one that follows a schedule."""
        optimizer = self._optimizer
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        try:
            # Keras raises a TypeError if it is a schedule.
            optimizer.learning_rate = rate
        except TypeError as error:
            raise ValueError(
                f"The learning rate of {optimizer.name} follows a schedule, which lr_scaling= can't scale. "
                f"Leave lr_scaling out, and multiply the schedule's rates by {self.factor:g}."
            ) from error
        self._rate, self._warming_up = rate, True
        self._first_update = int(optimizer.iterations.numpy())

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Sets the rate of the next update during warm-up; afterwards other callbacks may change it."""
        if not self._warming_up or self._rate is None:
            return
        updates = int(self._optimizer.iterations.numpy()) - self._first_update
        self._warming_up = updates < self.warmup_steps
        progress = updates / self.warmup_steps if self._warming_up else 1.0
        self._optimizer.learning_rate = self._rate * (1 + (self.factor - 1) * progress)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Divides the rate by the factor, so that the next `fit` starts unscaled."""
        self.leave()

    def leave(self) -> None:
        """Divides the rate by the factor, once, or resets a warm-up; also called after a `fit` that failed."""
        if self._rate is not None:
            rate = float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))
            self._optimizer.learning_rate = self._rate if self._warming_up else rate / self.factor
            self._rate = None

    @property
    def _optimizer(self) -> keras.optimizers.Optimizer:
        model: keras.Model = self.model
        return model.optimizer
