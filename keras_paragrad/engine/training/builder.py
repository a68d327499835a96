"""`StepBuilder`: the stages that components fill, and the train function that follows from them.

A step *takes* a replica's rows of a batch, *splits* them into slices, computes the *gradient* of each, *weighs* and
adds the gradients, *observes* and *transforms* their sum, *applies* it, and *logs*. Keras does what nothing fills.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.data import EpochIterator
from keras_paragrad.compat.layers import override_attributes
from keras_paragrad.compat.model import Trainable, begins_epoch, fit_frame, overrides_train_step, traced_as
from keras_paragrad.compat.optimizer import build_optimizer, innermost_optimizer
from keras_paragrad.compat.types import Batch, Specs, Step, StepLogs, TrainFunction
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, counting_examples
from keras_paragrad.engine.losses.logs import LossWindow
from keras_paragrad.engine.proof.division import Divisions
from keras_paragrad.engine.proof.first_batch import FirstBatchProof
from keras_paragrad.engine.step.building import (
    build_from_data,
    build_losses,
    build_losses_of,
    check_compiled_in_scope,
    is_fully_built,
    losses_built,
)
from keras_paragrad.engine.step.data_order import follow_data_order
from keras_paragrad.engine.step.execution import SeenBatches, StepExecution
from keras_paragrad.engine.step.interception import install_transform
from keras_paragrad.engine.step.stages import Stages, save_states
from keras_paragrad.engine.telemetry.train_functions import LATEST, compiled_functions
from keras_paragrad.engine.telemetry.watch import (
    Telemetry,
    observing_gradients,
    watched_optimizers,
    watching_updates,
)
from keras_paragrad.engine.tracing.announcing import announcing_part
from keras_paragrad.engine.training.train_step import TrainStep
from keras_paragrad.storage.model_variables import STEP_BUILDER
from keras_paragrad.storage.storage import any_divided
from keras_paragrad.storage.updating import install_storages


class CompiledModel:
    """The train functions of a model since its last `compile`, one for each value of `Stages`.

    Attributes:
        divisions: How batches are divided.
        loss_window: The losses of the micro-batches since the last update, once the *apply* stage has run.
        trainable: The `trainable` flags with which all steps are traced; `None` before the first trace.
    """

    def __init__(self, model: keras.Model):
        self.model, self.divisions = model, Divisions(model)
        self.loss_window: LossWindow | None = None
        self._functions: dict[Stages, TrainFunction] = {}
        functions = compiled_functions(model.train_function)
        traced = any(function.experimental_get_tracing_count() for function in functions)
        known = traced and model.optimizer is not None and model.optimizer.built
        # The flags with which Keras's step was traced; `None` if it wasn't, and our first trace reads them.
        self.trainable = Trainable.by_optimizer(model) if known else None

    def function(self, stages: Stages, seen: SeenBatches) -> TrainFunction:
        """The train function of these stages. Its first call traces steps."""
        self.make_loss_window(stages)
        if stages not in self._functions:
            self._functions[stages] = self._build(stages, seen)
        return self._functions[stages]

    def retrace(self) -> None:
        """Drops the functions and divisions."""
        self._functions.clear()
        self.divisions = Divisions(self.model)

    def _build(self, stages: Stages, seen: SeenBatches) -> TrainFunction:
        model, divisions, telemetry = self.model, self.divisions, stages.telemetry
        proof = FirstBatchProof(model, stages, divisions)

        def steps(telemetry: Telemetry | None) -> list[Step]:
            """One step; with the *apply* stage two, without an update at the end and with one."""
            choices = (False, True) if stages.apply else (False,)
            return [functools.partial(self.step, stages, update=update, telemetry=telemetry) for update in choices]

        def renew() -> TrainFunction | None:
            """Returns a new function, if the proof of another epoch changes how batches are divided."""
            if not proof.asks_again or not begins_epoch(inspect.currentframe(), model):
                return None
            with announcing_part("proving how batches are divided"):
                if not proof.again():
                    return None
            self._functions.clear()
            model.train_function = self.function(stages, seen)
            return model.train_function

        prepare = functools.partial(self._prepare, stages, divisions)
        execution = StepExecution(model, stages, seen, lambda: divisions.why_whole, prepare, proof, renew)
        return execution.function(steps(None), steps(telemetry) if telemetry else ())

    def _prepare(self, stages: Stages, divisions: Divisions, iterator: Any, specs: Specs) -> None:
        """Before a step is traced, creates variables and finds how batches of these specs are divided."""
        model, alone = self.model, self.model.distribute_strategy.num_replicas_in_sync == 1 and not stages.mesh
        # If the first step created variables, TensorFlow would trace it twice.
        lacks_some = model.built and not is_fully_built(model) and not overrides_train_step(model)
        if alone and lacks_some and build_losses_of(model, iterator.element_spec):
            self.make_loss_window(stages)
            if model.optimizer is not None:
                build_optimizer(model.optimizer, model.trainable_variables)
        divisions.find(stages, iterator, specs)

    def make_loss_window(self, stages: Stages, data: Batch = None) -> LossWindow | None:
        """Makes the `loss_window`, if a stage needs one, once losses are built. Builds losses from `data`, if given."""
        if not stages.apply or (data is not None and overrides_train_step(self.model)):
            return None
        if data is not None:
            build_losses(self.model, data)
        # A custom `compute_loss` may leave the compiled losses unbuilt, even with data.
        if self.loss_window is None and (data is not None or losses_built(self.model)):
            strategy = self.model.distribute_strategy
            in_scope = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
            with tf.init_scope(), contextlib.nullcontext() if in_scope else strategy.scope():
                self.loss_window = LossWindow(self.model)
        return self.loss_window

    def step(self, stages: Stages, data: Batch, update: bool, telemetry: Telemetry | None) -> StepLogs:
        """Runs a replica's step on `data`, which may have no rows, with all fillers in effect.

        `update` says whether accumulated gradients are applied at the end. `telemetry`, if any, watches updates.
        """
        model, replica_batch = self.model, ReplicaBatch.of(data)
        self.trainable = self.trainable or Trainable.of(model)
        with (
            traced_as(model, self.trainable),
            stages.place() if stages.place else contextlib.nullcontext(),
            counting_examples(replica_batch.nonempty),
            observing_gradients(model, stages.observe, replica_batch.rows),
            watching_updates(watched_optimizers(model) if stages.telemetry else [], telemetry),
        ):
            division = self.divisions.of(stages, replica_batch.filled(data))
            window = self.make_loss_window(stages, data)
            logs = TrainStep(model, stages, self.divisions, division, replica_batch, window, update).run(data)
        if telemetry and replica_count() == 1:
            logs = {**logs, LATEST: telemetry.latest()}
        return logs


# Returns the stages that a callback fills, by name, for the model as it is compiled now.
Fillers = Callable[[], dict[str, Any]]


class StepBuilder:
    """The stages of a model. While one is filled, this builds the train function in place of Keras."""

    def __init__(self, model: keras.Model):
        check_internals("models", "steps")
        self.model = model
        self.stages = Stages()
        self._compiled = CompiledModel(model)
        # The configuration of the `compile` to which `_compiled` belongs.
        self._compiled_for: object = None
        self._seen = SeenBatches()
        # The optimizer whose `apply` runs the last stages, and others whose updates are watched.
        self._installed: list[keras.optimizers.Optimizer] = []
        # The optimizer that keeps the order of the data.
        self._ordered: keras.optimizers.Optimizer | None = None
        # For callbacks of the running `fit`: the names of the stages they have filled, and what to call at the end.
        self._of_callbacks: dict[Fillers, tuple[tuple[str, ...], Callable[[], object] | None]] = {}
        # Returns the iterator of the running `fit`, if known.
        self._reads: Callable[[], EpochIterator | None] = lambda: None

    @classmethod
    def of(cls, model: keras.Model) -> "StepBuilder":
        """The model's builder. The model keeps it, so the next `fit` reuses compiled functions."""
        builder = STEP_BUILDER.of(model)
        if builder is None:
            builder = cls(model)
            STEP_BUILDER.attach(model, builder)
        return builder

    @property
    def called_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that a custom `train_step` has called."""
        return list(self._compiled.divisions.called.values())

    def describe_division(self) -> str | None:
        """Describes how batches were divided and weighted, and why; `None` before `fit` has seen data."""
        return self._compiled.divisions.describe(self.stages)

    @property
    def loss_window(self) -> LossWindow | None:
        """The losses of the micro-batches since the last update, once the *apply* stage has run."""
        return self._compiled.loss_window

    def make_loss_window(self) -> None:
        """Makes the `loss_window`, if a stage needs it and the model's losses are built."""
        self._compiled.make_loss_window(self.stages)

    # Stages.

    def fill(self, **stages: Any) -> None:
        """Fills stages by name; `None` empties one. With all stages empty, Keras builds the train function again."""
        if self.model.compiled:
            self._by_configuration()
        self.stages = self.stages._replace(**stages)
        self._install_stages()
        self.model.train_function = None
        self._install()

    @property
    def fillers(self) -> dict[str, Any]:
        """The fillers of the filled stages, by name."""
        return {name: getattr(self.stages, name) for name in self.stages.filled}

    def begin_fit(self, fillers: Fillers, end: Callable[[], object] | None = None) -> None:
        """Fills stages until `end_fit`. If a callback calls `compile` in between, `fillers` is called again.

        `end` is called by `end_fit`, or after a `fit` that failed before the next one.
        """
        filled = fillers()
        self.fill(**filled)
        self._of_callbacks[fillers] = tuple(filled), end
        self.build()

    def end_fit(self, fillers: Fillers) -> None:
        """Empties the stages that `begin_fit` filled."""
        names, end = self._of_callbacks.pop(fillers, ((), None))
        if end:
            end()
        self.fill(**dict.fromkeys(names))

    def _install(self) -> None:
        """Replaces the model's `make_train_function` while a stage is filled or batches are to be skipped."""
        if self.stages.filled or self._seen.left:
            self.model.__dict__["make_train_function"] = self.make_train_function
        else:
            self.model.__dict__.pop("make_train_function", None)

    def _install_stages(self) -> None:
        """Installs the last stages in the optimizer that updates the weights. `compile` may have replaced it."""
        while self._installed:
            install_transform(self._installed.pop(), None)
        optimizer = innermost_optimizer(self.model.optimizer) if self.model.compiled else None
        if optimizer is not None:
            install_storages(optimizer, self.model.trainable_variables)
            install_transform(optimizer, self.stages.chain, shown=bool(self.stages.observe or self.stages.telemetry))
            save_states(self.model.optimizer, self.stages.transforms or ())
            self._installed.append(optimizer)
        self._ordered = follow_data_order(self.model, self._ordered, follow=self.stages.ordered is not None)
        # The first watched optimizer is `model.optimizer`, whose innermost one has it already.
        for outer in watched_optimizers(self.model)[1:] if self.stages.telemetry else []:
            install_transform(innermost_optimizer(outer), None, shown=True)
            self._installed.append(innermost_optimizer(outer))

    # The train function.

    def make_train_function(self, force: bool = False) -> None:
        """The model's `make_train_function` while a stage is filled."""
        frame = inspect.currentframe()
        if not self._fit_has_begun(frame):
            self._drop_leftovers()
        if force:
            self.retrace()
            self._compiled.trainable = None
        if self.model.train_function is None:
            self.build()

    def build(self) -> None:
        """Sets the model's train function. Compiled functions are reused while nothing has changed."""
        self._by_configuration()
        stages = self.stages
        if stages.observe and any_divided(self.model.trainable_variables):
            raise ValueError(
                f"{type(stages.observe).__name__} looks at the gradients of each replica, and this model's weights and "
                "gradients are in shards. Train with DistributedFit(..., shard=None), or without that callback."
            )
        self.model.train_function = self._compiled.function(stages, self._seen)

    def retrace(self) -> None:
        """Drops compiled steps, after a change to what layers do when they are called."""
        self._compiled.retrace()
        self.model.train_function = None

    def read_from(self, iterator: EpochIterator | None) -> None:
        """Notes the iterator of the running `fit`. If a callback calls `compile`, it serves to build metrics."""
        self._reads = weakref.ref(iterator) if iterator is not None else lambda: None

    def one_step(self, data: Batch) -> StepLogs:
        """Runs a step that ends with an update, for tracing. Calls that weren't tried are divided."""
        divisions = self._compiled.divisions
        with override_attributes(divisions, entered=divisions.entered or {}):
            return self._compiled.step(self.stages, data, True, None)

    def _by_configuration(self) -> None:
        """Starts over if the model was compiled again."""
        configuration = self.model._compile_config
        if self._compiled_for is configuration:
            return
        # If no `fit` runs, stages of callbacks are left over from a `fit` that failed.
        if self._of_callbacks and fit_frame(inspect.currentframe(), self.model) is None:
            self._drop_leftovers()
        self._compiled_for, self._compiled = configuration, CompiledModel(self.model)
        if self.stages.take:
            # A callback may have called `compile` outside of the strategy's scope.
            check_compiled_in_scope(self.model)
        for fillers in self._of_callbacks:
            self.stages = self.stages._replace(**fillers())
        self._install_stages()
        if self.stages.take and (iterator := self._reads()) is not None:
            # Metrics can't create variables within a step on replicas.
            build_from_data(self.model, iterator, None)

    def _fit_has_begun(self, frame: FrameType | None) -> bool:
        """Whether a callback has called the frame during `fit`, rather than `fit` itself, before callbacks begin."""
        caller = frame and frame.f_back
        running = fit_frame(caller, self.model)
        return running is not None and running is not caller

    def _drop_leftovers(self) -> None:
        """Cleans up after a `fit` that failed: stages of callbacks, an open window, batches to skip."""
        if self._of_callbacks and self.stages.apply:
            self.stages.apply.abandoned(self.model.name)
        if self._seen.left:
            self.skip_batches(0)
        for fillers in list(self._of_callbacks):
            self.end_fit(fillers)

    # Resuming.

    def skip_batches(self, batches: int, then: Callable[[], None] | None = None) -> None:
        """Skips batches that resumed training has seen. Then builds losses and metrics, and calls `then`."""
        if batches and not self.stages.filled:
            # Keras's own train function can't skip batches.
            self.build()
        self._seen.expect(batches, then and functools.partial(self._resume, then))
        self._install()

    @property
    def batches_to_skip(self) -> int:
        return self._seen.left

    def _resume(self, then: Callable[[], None], batch: Batch) -> None:
        if not overrides_train_step(self.model):
            build_losses(self.model, batch, metrics=True)
        self.make_loss_window()
        then()
