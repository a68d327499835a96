"""Builds a model's train function from the stages that components fill.

The stages of a step: *take* a batch from the iterator, *split* it into slices, compute the *gradient* of each,
*combine* them, *observe* and *transform* the gradient of an update, *apply* it, *log*. Keras fills the others.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.data import EpochIterator
from keras_paragrad.compat.model import Trainable, begins_epoch, fit_frame, overrides_train_step, traced_as
from keras_paragrad.compat.optimizer import build_optimizer, innermost_optimizer
from keras_paragrad.compat.types import Batch, Specs, Step, StepLogs, TrainFunction
from keras_paragrad.engine.batches.batch_statistics import counting_examples
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch
from keras_paragrad.engine.losses.sums import LossWindow
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
from keras_paragrad.engine.step.execution import WatchedSteps, compile_steps
from keras_paragrad.engine.step.indivisible import IndivisibleBatchGuard
from keras_paragrad.engine.step.interception import install_transform, noticing_applies
from keras_paragrad.engine.step.seen_batches import SeenBatches
from keras_paragrad.engine.step.stages import Stages, save_states
from keras_paragrad.engine.telemetry.train_functions import LATEST, compiled_functions
from keras_paragrad.engine.telemetry.watch import (
    Telemetry,
    observing_gradients,
    refuse_unwatched,
    updates_each_batch,
    watched_optimizers,
    watching_updates,
)
from keras_paragrad.engine.tracing.announcing import announcing_part
from keras_paragrad.engine.training.train_step import TrainStep
from keras_paragrad.storage.model_variables import STEP_BUILDER
from keras_paragrad.storage.regathering import forget_gathers
from keras_paragrad.storage.storage import any_divided
from keras_paragrad.storage.updating import install_storages

# Returns the stages that a callback fills, by name, for the model as it is compiled now.
Fillers = Callable[[], dict[str, Any]]


class StepBuilder:
    """Builds the train function of one model, in Keras's place while a stage is filled.

    Attributes:
        stages: The fillers.
        loss_window: The losses of the micro-batches since the last update, once the *apply* stage has run.
    """

    def __init__(self, model: keras.Model):
        check_internals("models", "steps")
        self.model = model
        self.stages = Stages()
        self.loss_window: LossWindow | None = None
        self._seen = SeenBatches()
        self._built: dict[Stages, TrainFunction] = {}
        # The model's `compile` configuration when they were built.
        self._built_for: object = None
        # The optimizer whose `apply` runs the last stages, and others whose updates are watched.
        self._installed: list[keras.optimizers.Optimizer] = []
        # The optimizer that keeps the order of the data.
        self._ordered: keras.optimizers.Optimizer | None = None
        # The names of the stages that the callbacks of the running `fit` have filled.
        self._of_callbacks: dict[Fillers, tuple[str, ...]] = {}
        # The `trainable` flags with which all steps are traced; `None` before the first trace.
        self._trainable: Trainable | None = None
        # Returns the iterator of the running `fit`, if known.
        self._reads: Callable[[], EpochIterator | None] = lambda: None
        self._divisions = Divisions(model)

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
        return list(self._divisions.called.values())

    def describe_division(self) -> str | None:
        """Describes how batches were divided and weighted, and by what evidence; `None` before `fit` has seen data."""
        return self._divisions.describe(self.stages)

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

    @contextlib.contextmanager
    def split_as(self, split: Any) -> Generator[None]:
        """Context in which `one_step` uses another *split* stage; nothing else changes."""
        stages = self.stages
        self.stages = stages._replace(split=split)
        try:
            yield
        finally:
            self.stages = stages

    def _install(self) -> None:
        """Replaces the model's `make_train_function` while a stage is filled or batches are to be skipped."""
        if self.stages.filled or self._seen.left:
            self.model.__dict__["make_train_function"] = self.make_train_function
        else:
            self.model.__dict__.pop("make_train_function", None)

    def retrace(self) -> None:
        """Drops compiled steps, after a change to what layers do when they are called."""
        self._built.clear()
        self._divisions = Divisions(self.model)
        self.model.train_function = None

    def _renew(self, proof: FirstBatchProof, frame: FrameType | None) -> TrainFunction | None:
        """Makes the train function anew, if its proof changes before an epoch how batches are divided."""
        if not proof.asks_again or not begins_epoch(frame, self.model):
            return None
        with announcing_part("proving how batches are divided"):
            if not proof.again():
                return None
        self._built.clear()
        self.build()
        return self.model.train_function

    def begin_fit(self, fillers: Fillers) -> None:
        """Fills stages until `end_fit`; calls `fillers` again if a callback calls `compile` during this `fit`."""
        filled = fillers()
        self.fill(**filled)
        self._of_callbacks[fillers] = tuple(filled)
        self.build()

    def end_fit(self, fillers: Fillers) -> None:
        """Empties the stages that `begin_fit` filled."""
        self.fill(**dict.fromkeys(self._of_callbacks.pop(fillers, ())))

    def make_train_function(self, force: bool = False) -> None:
        """The model's `make_train_function` while a stage is filled."""
        frame = inspect.currentframe()
        if not self._fit_has_begun(frame):
            self._drop_leftovers()
        self._choose_split(frame)
        if force:
            self.retrace()
            self._trainable = None
        if self.model.train_function is None:
            self.build()

    def _choose_split(self, frame: FrameType | None) -> None:
        """Lets the *split* stage choose its slice size, if it depends on the batch size of `fit`."""
        choose = getattr(self.stages.split, "choose", None)
        if choose:
            running = fit_frame(frame, self.model)
            # `train_on_batch` has no iterator.
            iterator: EpochIterator | None = running and running.f_locals.get("epoch_iterator")
            self.fill(split=choose(self.model, iterator.data_adapter if iterator else None))

    def _fit_has_begun(self, frame: FrameType | None) -> bool:
        """Whether a callback of the running `fit` has called the frame, and not `fit` itself before callbacks begin."""
        caller = frame and frame.f_back
        running = fit_frame(caller, self.model)
        return running is not None and running is not caller

    def _drop_leftovers(self) -> None:
        """Cleans up after a `fit` that failed: its callbacks' stages, an open window, batches to skip."""
        if self._of_callbacks and self.stages.apply:
            self.stages.apply.abandoned(self.model.name)
        if self._seen.left:
            self.skip_batches(0)
        for fillers in list(self._of_callbacks):
            self.end_fit(fillers)

    def build(self) -> None:
        """Sets the model's train function; compiled functions are reused while nothing has changed."""
        self._by_configuration()
        stages = self.stages
        if stages.observe and any_divided(self.model.trainable_variables):
            raise ValueError(
                f"{type(stages.observe).__name__} looks at the gradients of each replica, and this model's weights and "
                "gradients are in shards. Train with DistributedFit(..., shard=None), or without that callback."
            )
        self.make_loss_window()
        if stages not in self._built:
            self._built[stages] = self._compiled()
        self.model.train_function = self._built[stages]

    def read_from(self, iterator: EpochIterator | None) -> None:
        """Notes the iterator of the running `fit`, to build metrics from if a callback calls `compile`."""
        self._reads = weakref.ref(iterator) if iterator is not None else lambda: None

    def _by_configuration(self) -> None:
        """Starts over if the model was compiled again."""
        configuration = self.model._compile_config
        if self._built_for is configuration:
            return
        # Outside of `fit`, stages of callbacks are left over from one that failed.
        if self._of_callbacks and fit_frame(inspect.currentframe(), self.model) is None:
            self._drop_leftovers()
        self._built_for, self._built, self.loss_window = configuration, {}, None
        self._divisions = Divisions(self.model)
        optimizer = self.model.optimizer
        if self.stages.take:
            # A callback may have called `compile`.
            check_compiled_in_scope(self.model)
        functions = compiled_functions(self.model.train_function)
        traced = any(function.experimental_get_tracing_count() for function in functions)
        known = traced and optimizer is not None and optimizer.built
        # The flags with which Keras's step was traced. If it wasn't, the first trace of ours reads them.
        self._trainable = Trainable.by_optimizer(self.model) if known else None
        for fillers in self._of_callbacks:
            self.stages = self.stages._replace(**fillers())
        self._install_stages()
        if self.stages.take and (iterator := self._reads()) is not None:
            # Metrics can't create variables within a step on replicas.
            build_from_data(self.model, iterator, None)

    def _install_stages(self) -> None:
        """Installs the last stages in the optimizer that updates the weights, which `compile` may have replaced."""
        while self._installed:
            install_transform(self._installed.pop(), None)
        optimizer = innermost_optimizer(self.model.optimizer) if self.model.compiled else None
        if optimizer is not None:
            install_storages(optimizer, self.model.trainable_variables)
            install_transform(optimizer, self.stages.chain, shown=bool(self.stages.observe or self.stages.telemetry))
            save_states(self.model.optimizer, self.stages.transforms or ())
            self._installed.append(optimizer)
        self._ordered = follow_data_order(self.model, self._ordered, follow=self.stages.sums_replicas)
        # The first is `model.optimizer`.
        for outer in self._watched()[1:]:
            install_transform(innermost_optimizer(outer), None, shown=True)
            self._installed.append(innermost_optimizer(outer))

    def _watched(self) -> list[keras.optimizers.Optimizer]:
        return watched_optimizers(self.model) if self.stages.telemetry else []

    def _compiled(self) -> TrainFunction:
        """Makes the train function of the current stages; steps are traced when it is called."""
        divisions, stages, telemetry = self._divisions, self.stages, self.stages.telemetry
        guard = IndivisibleBatchGuard(self.model, stages.split, lambda: divisions.undivided)
        watched = None
        if telemetry:
            watched = WatchedSteps(self._steps(telemetry), telemetry, updates_each_batch(self.model.optimizer))
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        proof = FirstBatchProof(self.model, stages, divisions)
        return compile_steps(
            self.model,
            self._steps(None),
            schedule=stages.apply,
            take=stages.take,
            seen=self._seen,
            guard=guard,
            prepare=functools.partial(self._prepare, stages, divisions),
            proof=proof,
            renew=functools.partial(self._renew, proof),
            running=stages.running,
            watched=watched,
            by_xla=not stages.by_xla_alone(self.model, replicas),
            on_mesh=stages.mesh.wrap if stages.mesh else None,
        )

    def _prepare(self, stages: Stages, divisions: Divisions, iterator: Any, specs: Specs) -> None:
        """Creates variables, and finds how batches of these specs are divided, before a step is traced."""
        if self.model.distribute_strategy.num_replicas_in_sync == 1 and not stages.mesh:
            self._build_variables(iterator)
        divisions.find(stages, iterator, specs)

    def make_loss_window(self) -> None:
        """Makes the `loss_window`, if a stage needs it and the model's losses are built."""
        if self.stages.apply and losses_built(self.model):
            self._make_loss_window()

    def _make_loss_window(self) -> None:
        if self.loss_window is None:
            strategy = self.model.distribute_strategy
            in_scope = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
            with tf.init_scope(), contextlib.nullcontext() if in_scope else strategy.scope():
                self.loss_window = LossWindow(self.model)

    def _build_variables(self, iterator: Any) -> None:
        """Creates the variables that the first step would create, which TensorFlow would then trace twice."""
        model = self.model
        if is_fully_built(model) or overrides_train_step(model) or not model.built:
            return
        if not build_losses_of(model, iterator.element_spec):
            return
        self.make_loss_window()
        if model.optimizer is not None:
            build_optimizer(model.optimizer, model.trainable_variables)

    def _window_of(self, data: Batch) -> LossWindow | None:
        """The `loss_window` for a step on a batch; `None` if no stage needs it."""
        if not self.stages.apply or overrides_train_step(self.model):
            return None
        build_losses(self.model, data)
        # Even if a custom `compute_loss` leaves the compiled losses unbuilt.
        self._make_loss_window()
        return self.loss_window

    def skip_batches(self, batches: int, then: Callable[[], None] | None = None) -> None:
        """Skips batches that a resumed training has seen, then builds the losses and metrics and calls `then`."""
        if batches and not self.stages.filled:
            # Keras's own train function can't skip batches.
            self.build()
        self._seen.expect(batches, then and functools.partial(self._resume, then))
        self._install()

    @property
    def batches_to_skip(self) -> int:
        """Number of batches still to skip."""
        return self._seen.left

    def _resume(self, then: Callable[[], None], batch: Batch) -> None:
        if not overrides_train_step(self.model):
            build_losses(self.model, batch, metrics=True)
        self.make_loss_window()
        then()

    def one_step(self, data: Batch) -> StepLogs:
        """Runs a step that ends with an update, and returns its logs; for tracing. Untried calls are divided."""
        with self._divisions.taking_untried():
            return self._step(data, True, None)

    def _steps(self, telemetry: Telemetry | None) -> list[Step]:
        """The steps to compile: with the *apply* stage, one that only accumulates, and one that ends with an update."""
        choices = (False, True) if self.stages.apply else (False,)
        return [functools.partial(self._step, update=update, telemetry=telemetry) for update in choices]

    def _step(self, data: Batch, update: bool, telemetry: Telemetry | None) -> StepLogs:
        """Runs a step on one replica, with all fillers in effect; ends with an update of accumulated gradients if told.

        `data` may have no rows, and `telemetry`, if any, watches the updates.
        """
        replica_batch = ReplicaBatch.of(data)
        place = self.stages.place() if self.stages.place else contextlib.nullcontext()
        self._trainable = self._trainable or Trainable.of(self.model)
        traced = traced_as(self.model, self._trainable)
        with (
            traced,
            place,
            counting_examples(replica_batch.nonempty),
            observing_gradients(self.model, self.stages.observe, replica_batch.rows),
            watching_updates(self._watched(), telemetry),
        ):
            division = self._divisions.of(self.stages, replica_batch.filled(data))
            step = TrainStep(self.model, self.stages, self._window_of(data), update, division)
            if division.calls or overrides_train_step(self.model):
                check = functools.partial(refuse_unwatched, self.model)
                with noticing_applies(check) if self.stages.telemetry else contextlib.nullcontext():
                    logs = step.run_whole(data, self._divisions)
                # The backward pass of a custom step reuses gathered weights.
                forget_gathers()
            else:
                logs = step(data, replica_batch)
                step.end()
        if telemetry and replica_count() == 1:
            logs = {**logs, LATEST: telemetry.latest()}
        return logs
