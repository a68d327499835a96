"""The `fit` of `DistributedFit`: checks its arguments, and calls the model's `fit` with the callbacks replicas need."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import keras

from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation, with_those_of_updates
from keras_paragrad.arguments import check_each, check_instance, check_integer, check_number
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
from keras_paragrad.distribution.parallelism import PlannedRun
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
        names = ("batch_size", "steps_per_epoch", "shuffle", "class_weight", "prefetch", "seed")
        return {name: getattr(self, name) for name in names}

    def validation_options(self, x: FitData) -> dict[str, Any]:
        """The options of `DistributedFit.dataset` for validation data."""
        # Data that is batched already does not take the batch size of the training data.
        default = None if is_batched(x) else self.batch_size
        sizes = {"batch_size": self.validation_batch_size or default, "steps_per_epoch": self.validation_steps}
        return {**sizes, "prefetch": self.prefetch, "seed": self.seed}

    def non_default(self, names: Iterable[str]) -> dict[str, Any]:
        """The named arguments that aren't their default objects; data may be arrays, which `!=` compares by element."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not getattr(FitArguments, name)}


def check_overridden_fit(request: FitArguments) -> None:
    """Refuses arguments that have no effect because the model's class overrides `fit` and reads its data itself."""
    prepared = f"{type(request.model).__name__} overrides `fit`. Write dist.prepare(model) and then"
    if isinstance(request.x, DistributedData):
        raise ValueError(
            f"{prepared} keras.Model.fit(model, data), which takes data that is already sharded; or pass the original "
            "data to dist.fit."
        )
    if options := request.non_default(("prefetch", "seed")):
        listed = ", ".join(f"{option}=" for option in options)
        raise ValueError(
            f"{prepared} model.fit(...) without {listed}, which has no effect on data that the model reads itself. "
            "Configure that in a tf.data.Dataset; or preprocess the data, and write "
            "keras.Model.fit(model, dist.dataset(x, y))."
        )


def train(run: PlannedRun, request: FitArguments, data: FitData, arguments: dict[str, Any]) -> keras.callbacks.History:
    """Calls the `fit` of a prepared model; of several workers, only the chief shows progress and writes files."""
    hardware, strategy = run.hardware, run.strategies.workers
    model, callbacks, verbose = request.model, request.callbacks or [], request.verbose
    distributed = data if isinstance(data, DistributedData) else None
    one_worker = hardware.worker_count == 1 and replica_placement(strategy).workers == 1
    # A `Backup` comes last, as it saves the state of all others.
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    others = [callback for callback in callbacks if not isinstance(callback, Backup)]
    added: list[keras.callbacks.Callback] = [FollowEpochs(distributed)] if distributed is not None else []
    if find_accumulator(model.optimizer) and not any(isinstance(callback, ExactAccumulation) for callback in others):
        added.append(ExactAccumulation())
    # The functions that preparations make in place of Keras's refuse empty data themselves.
    if arguments.get("validation_data") is not None and "make_test_function" not in vars(model):
        added.append(_RefuseEmptyValidation())
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
        for backup in backups:
            backup.leave()


class _RefuseEmptyValidation(keras.callbacks.Callback):
    """Raises if validation by Keras's own test function ran without a single batch."""

    def on_test_end(self, logs: Logs | None = None) -> None:
        if not has_evaluated(self.model):
            raise without_batches(self.model)
