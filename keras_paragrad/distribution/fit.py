"""`DistributedFit`: `fit` on the available hardware, with the result of one device."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator
from os import PathLike
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.exact_accumulation import wrapping
from keras_paragrad.arguments import check_integer
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import check_is_batched
from keras_paragrad.compat.model import overrides_fit
from keras_paragrad.compat.types import FitData, Specs
from keras_paragrad.compat.variables import number_replicated_variables
from keras_paragrad.compat.workers import all_or_none, gather, replica_placement
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.interruptions import explained_failures
from keras_paragrad.distribution.consistency.compare import check_same, check_same_weights
from keras_paragrad.distribution.consistency.describe import describe_kernels, describe_training
from keras_paragrad.distribution.data import DistributedData, distributed_dataset
from keras_paragrad.distribution.fitted_memory import (
    FittedMemory,
    PlannedFor,
    note_fitted_memory,
    undo_fitted_memory,
)
from keras_paragrad.distribution.hardware import Hardware, detect
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.parallelism import (
    PlannedRun,
    Preparation,
    build_scope,
    parallelism_of,
)
from keras_paragrad.distribution.plan import MAY_DIFFER, Explanation, Plan, make_plan, summary_lines
from keras_paragrad.distribution.training import ABOUT_DATA, ABOUT_EPOCHS, FitArguments, check_overridden_fit, train
from keras_paragrad.engine.replicas.prepared import warn_if_unprepared
from keras_paragrad.engine.tracing.announcing import announcing
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.exports import passing_options_to, with_arguments_of
from keras_paragrad.memory.batch_size import TrialLog
from keras_paragrad.memory.estimate import Estimate
from keras_paragrad.plain_text import InNotebooks
from keras_paragrad.storage.creation import create_in_shards, create_whole


class DistributedFit(InNotebooks):
    """Detects the hardware, plans how to train on it, and makes `fit` take the same steps as on one device.

    Build and compile the model within `scope()`, then call `fit` here, or `prepare` the model and call its own. Each
    batch is divided among the replicas, and each replica's part is weighted by its loss divisor; gradients are
    all-reduced once per update, and then clipped; metrics cover all examples. Weights, history and the order of the
    examples are the same on one device, on several, and on several machines.

    Args:
        strategy: `"auto"`; or `"none"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"parameter_server"`,
            a `tf.distribute.Strategy`, a `keras_paragrad.distribution.Pipeline`, Keras's own
            `keras.distribution.DataParallel` or `ModelParallel`, or a custom
            `keras_paragrad.distribution.parallelism.Parallelism`.
        devices: Names of this process's devices, such as `["GPU:0", "GPU:1"]`; by default, all available ones. For a
            pipeline, the devices of its stages, in order; with data parallelism a list of devices for each stage.
        jit: Whether to compile with XLA: on several replicas the forward and backward pass of each, in a pipeline each
            stage. `"auto"` follows the model's `compile`.
        exact: Whether the result must be the same as on one device. If not, updates take the mean of the
            replicas' gradients (the sum, if Keras's losses are sums), and no model is refused for being inexact.
        weighting: What the loss of a replica's part of a batch is divided by. `"auto"` reads it off Keras's losses, and
            computes others on whole batches; `"examples"`, `"sample_weight"`, `"mask"`, `"sum"` or a function of `(x,
            y, y_pred, sample_weight)` states it, which is faster. Pipelines and `deterministic` need it for others.
        prove: Whether the first batch proves, before its update and before each epoch, that the parts of replicas, or
            the micro-batches of a pipeline, give the gradient of the whole; and the first evaluated batch its loss.
            What Keras itself defines, and is known to divide, isn't computed again.
        deterministic: The number of parts, 8 for `True`, that every batch is computed in, wherever they are computed.
            Their gradients, losses and metrics are added in a fixed order, so that weights are the same to the last bit
            on any number of devices and workers of one kind.
        shard_policy: How workers share the data: `"data"` or `"already_sharded"`.
        shard: What each replica holds a shard of: nothing (`None`); the `"optimizer"`'s state, with whole weights; or
            all `"parameters"`, with their gradients and the optimizer's state; layers gather their weights when they
            are called.
        min_shard_bytes: Trainable variables of at least this size, in bytes, are cut into shards.
        fit_memory: Whether `fit` and `prepare` find out how to train in the memory of the devices: what is recomputed,
            the slices of each batch, and on several devices what is in shards, if `shard` is `None`. The fastest way
            by the estimate is tried for two steps in a separate process; if it takes too much, so is the next. A
            model that fits as it is stays so; `explain()` shows the ways and what they take.
        device_bytes: For `fit_memory`, what training may take of a device's memory, in bytes; by default 80% of what
            the machine has left, or 90% of a GPU.
        mesh: Instead of a strategy, a mesh of devices: the sizes of its axes `"batch"`, which divides batches, and
            `"model"`, which divides weights.
        layout: `"auto"`, with `mesh`: the layout of the weights follows from the model's structure; `explain()` shows
            it.
        startup_timeout: Seconds to wait for the other workers at startup.

    Raises:
        ValueError: The hardware doesn't allow what was requested. The message says what to write.
        RuntimeError: There are several workers, and this process has already joined its cluster or created tensors.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import DistributedFit
    >>> dist = DistributedFit()
    >>> with dist.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    ...     model.compile("adam", loss="mse")
    >>> history = dist.fit(model, np.ones((80, 8)), np.ones((80, 1)), epochs=2, verbose=0)
    >>> int(model.optimizer.iterations.numpy())
    6
    """

    @with_arguments_of(Options)
    def __init__(self, *arguments: Any, **options: Any):
        self.options = Options(*arguments, **options)
        self.hardware: Hardware = detect()
        self.plan: Plan = make_plan(self.hardware, self.options)
        self._parallelism = parallelism_of(self.options, self.hardware)
        launched = self._parallelism.parts_if_launched if self.plan.launched else ()
        check_internals("models", "steps", "data", *self._parallelism.parts, *launched)
        if self.options.deterministic:
            # The same bits in each run of this process.
            tf.config.experimental.enable_op_determinism()
        if self.plan.shard.value != "none":
            check_internals("shards", "memory")
        self._strategies = self._parallelism.strategy(self.plan, self.hardware, self.options)
        # Shown by `explain` below the plan.
        self._table: Any = None
        self._memory: FittedMemory | None = None
        self._model: Callable[[], keras.Model | None] = lambda: None
        self._create_as_planned()
        warn_if_unprepared(self.strategy)
        number_replicated_variables()

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that models are built under."""
        return self._strategies.models

    @property
    def _run(self) -> PlannedRun:
        return PlannedRun(self.hardware, self.options, self.plan, self._strategies)

    def __repr__(self) -> str:
        return "\n".join(["DistributedFit", *summary_lines(self.plan, self.hardware)])

    def _create_as_planned(self) -> None:
        """Makes the strategy create variables whole or in shards."""
        if self.plan.shard.value == "none":
            # Another `DistributedFit` may have changed the strategy.
            create_whole(self.strategy)
        else:
            copies = self.plan.shard.value == "optimizer"
            create_in_shards(self.strategy, copies=copies, min_bytes=self.options.min_shard_bytes)

    @contextlib.contextmanager
    def scope(self) -> Generator[None]:
        """Context in which to build and compile a model."""
        if self._memory is not None:
            # What was decided for an earlier model is decided anew for the model that is built here.
            self._memory = None
            self.plan = self.plan.with_decision(make_plan(self.hardware, self.options).shard)
            self._create_as_planned()
        with build_scope(self.strategy), self._parallelism.placement():
            yield

    def explain(self) -> Explanation:
        """The plan as a table, for `print` and rich: each decision, its reason, and how to override it.

        After `fit` or `prepare`, also the stages of a pipeline and the layout on a mesh; after `fit`, also how a batch
        was divided, what a part of it weighs, and how that was found.
        """
        model = self._model()
        division = StepBuilder.of(model).describe_division() if model is not None else None
        memory = self._memory and self._memory.plan
        return Explanation(self.plan, self.hardware, memory or self._table, division)

    def estimate(self, model: keras.Model, batch_size: int = 32, *, length: int | None = None) -> Estimate:
        """The memory that `fit` takes on each device, from the traced step; for `print`.

        Args:
            model: A compiled and built model. It isn't changed, and nothing is run.
            batch_size: As in `fit`.
            length: The size of the inputs' axes of unknown size, such as the number of tokens.

        Returns:
            Bytes of parameters, gradients, optimizer state and activations, for each way to shard the model.

        Raises:
            ValueError: The step can't be traced, or its weights are on parameter servers.
        """
        return self._parallelism.estimate(model, self._run, batch_size, length)

    def prepare(self, model: keras.Model, *, batch_size: int = 32) -> Preparation:
        """Makes the model's own `fit`, `evaluate` and `predict` exact on the replicas.

        Args:
            model: A compiled model, built within `scope()`. Only this instance is changed.
            batch_size: The batch size of `fit`, for `fit_memory`.

        Returns:
            A handle; `undo()` restores the methods of the model's class.

        Raises:
            ValueError: The model was built elsewhere, or can't be trained exactly. The message says what to write.
        """
        self._parallelism.check(model, self._run)
        batch_size = check_integer("batch_size", batch_size, example=64)
        with explained_failures(self.hardware.cluster):
            self._check_consistent(model)
            return self._prepare_checked(model, batch_size)

    def _prepare_checked(
        self, model: keras.Model, batch_size: int, batch_spec: Specs = None, verbose: str | int = "auto"
    ) -> Preparation:
        """Applies `fit_memory`, and prepares the model."""
        if self.options.fit_memory:
            self._fit_memory(model, batch_size, batch_spec, verbose)
        else:
            undo_fitted_memory(model)
        try:
            preparation = self._parallelism.prepare(model, self._run)
        except BaseException:
            undo_fitted_memory(model)
            raise
        preparation.undo_with(lambda: undo_fitted_memory(model))
        self._table, self._model = preparation.table, weakref.ref(model)
        exact = make_plan(self.hardware, self.options).exact
        if exact.value and preparation.not_exact:
            exact = dataclasses.replace(exact, value=f"but for {preparation.not_exact}")
        self.plan = self.plan.with_decision(exact)
        return preparation

    def _fit_memory(self, model: keras.Model, batch_size: int, batch_spec: Specs, verbose: str | int) -> None:
        """Applies a way to train in the devices' memory, unless one planned for the same is still in effect."""
        planned_for = PlannedFor.of(self, model, batch_size, batch_spec)
        fitted = planned_for.find_applied(model)
        # If it decided on shards, variables may by now be created as decided for another model.
        if fitted is not None and (fitted.shard is None or fitted is self._memory):
            self._memory = fitted
            return
        # Another `DistributedFit` may have applied what there is.
        undo_fitted_memory(model)
        log = TrialLog("fit_memory", int(self.is_chief and verbose != 0))
        fitted = self._parallelism.fit_memory(model, self._run, batch_size, batch_spec, log)
        if fitted.shard is not None:
            self.plan = self.plan.with_decision(fitted.shard)
        self._memory = fitted
        note_fitted_memory(model, planned_for, fitted)

    def _check_consistent(self, model: keras.Model, arguments: dict[str, Any] | None = None) -> None:
        """Raises on every worker if their training differs, before mismatched collectives can hang."""
        workers = self._strategies.workers
        if replica_placement(workers).workers == 1:
            return
        decisions = {decision.name: decision.value for decision in self.plan if decision.name not in MAY_DIFFER}
        options = {"weighting": self.options.weighting, **decisions}
        if self.options.deterministic:
            options |= {"deterministic": self.options.deterministic, "computed with": describe_kernels()}
        check_same(workers, all_or_none(workers, lambda: describe_training(model, options, arguments)))
        check_same_weights(workers, model)

    @passing_options_to(distributed_dataset, without=["strategy", "shard_policy", "parts"])
    def dataset(self, x: FitData, y: FitData = None, sample_weight: FitData = None, **options: Any) -> DistributedData:
        """Data for `fit`, `evaluate` or `predict` of a prepared model, each batch divided among the replicas.

        Args:
            x: As in `fit`: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator.
            y, sample_weight: Targets and sample weights, if `x` is arrays.
            **options: `batch_size`, `shuffle`, `class_weight`, `steps_per_epoch`, `prefetch` and `seed`; see
                `keras_paragrad.distribution.distributed_dataset`.
        """
        options = {"shard_policy": self.options.shard_policy, **options}
        with explained_failures(self.hardware.cluster):
            return self._parallelism.data(self._run, x, y, sample_weight, **options)

    def callbacks(
        self,
        directory: str | PathLike[str],
        *,
        every: str | int = "epoch",
        keep: int = 2,
        on_sigterm: bool = True,
        delete_when_done: bool = True,
    ) -> list[keras.callbacks.Callback]:
        """Callbacks that let a restarted `fit` resume where it was interrupted.

        Args:
            directory: The directory of the backups; a separate one for each `fit`.
            every: `"epoch"`, or the number of batches between backups.
            keep: How many of the newest backups to keep.
            on_sigterm: Whether SIGTERM to any worker makes all of them back up and leave `fit`, with exit status 143.
            delete_when_done: Whether to remove the backups when `fit` completes.

        Returns:
            A list for `fit`'s `callbacks`. See `keras_paragrad.distribution.Backup`.
        """
        return [Backup(directory, every, keep, on_sigterm, delete_when_done=delete_when_done)]

    @with_arguments_of(FitArguments)
    def fit(self, *arguments: Any, **options: Any) -> keras.callbacks.History:
        """Trains a model as its own `fit` would on one device. Call it on every worker with the same arguments.

        Those that aren't listed are as in `keras.Model.fit`. Only the first of several workers shows progress.

        Args:
            model: A compiled model, built within `scope()`.
            prefetch, seed: As in `dataset`.

        Returns:
            The model's `History`.
        """
        request = FitArguments(*arguments, **options)
        with wrapping(request.model, request.callbacks or ()):
            return self._fit(request)

    def _fit(self, request: FitArguments) -> keras.callbacks.History:
        model = request.model
        self._parallelism.check(model, self._run)
        if overrides_fit(model):
            return self._fit_overridden(request)
        busy = announcing("preparing the training", request.verbose if self.is_chief else 0)
        with busy, explained_failures(self.hardware.cluster):
            self._check_consistent(model, request.compared())
            rows, validation = request.split()
            data = self._distribute(model, rows, request.data_options())
            if validation is not None:
                rows = keras.utils.unpack_x_y_sample_weight(validation)
                validation = self._distribute(model, rows, request.validation_options(rows[0]))
                # Data that the caller distributed may have been read already.
                if validation is not rows[0]:
                    validation.for_validation(request.validation_steps)
            self._prepare_checked(model, self._batch_size(data), data.batch_spec, request.verbose)
        return train(self._run, request, data, {**request.non_default(ABOUT_EPOCHS), "validation_data": validation})

    def _batch_size(self, data: DistributedData) -> int:
        """The largest batch size of the data on any worker, as in `prepare`; 32, unread, if nothing depends on it."""
        if not self.options.fit_memory:
            return 32
        return int(gather(self._strategies.workers, np.array([data.count_batch_rows() or 32], np.int64)).max())

    def _fit_overridden(self, request: FitArguments) -> keras.callbacks.History:
        """Trains a model whose class overrides `fit`, and passes it the data unchanged."""
        self._parallelism.check_own_fit(request.model)
        check_overridden_fit(request)
        self.prepare(request.model, batch_size=request.batch_size or 32)
        # Such a `fit` need not accept all arguments of Keras's.
        return train(self._run, request, request.x, request.non_default((*ABOUT_DATA, *ABOUT_EPOCHS)))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and reports for all."""
        return self.hardware.is_chief

    def _distribute(
        self, model: keras.Model, rows: tuple[FitData, FitData, FitData], options: dict[str, Any]
    ) -> DistributedData:
        """The data divided among the replicas, unless it is a `DistributedData` already."""
        data = rows[0] if isinstance(rows[0], DistributedData) else self.dataset(*rows, **options)
        check_is_batched(model, data.batch_spec)
        return data
