"""`CompiledModel`: the train functions of a model as it is compiled now, and what their steps share."""

import contextlib
import functools
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.model import Trainable, begins_epoch, overrides_train_step, traced_as
from keras_paragrad.compat.optimizer import build_optimizer
from keras_paragrad.compat.types import Batch, Specs, Step, StepLogs, TrainFunction
from keras_paragrad.engine.batches.batch_statistics import counting_examples
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch
from keras_paragrad.engine.losses.sums import LossWindow
from keras_paragrad.engine.proof.division import Divisions
from keras_paragrad.engine.proof.first_batch import FirstBatchProof
from keras_paragrad.engine.step.building import build_losses, build_losses_of, is_fully_built, losses_built
from keras_paragrad.engine.step.execution import SeenBatches, StepExecution, WatchedSteps
from keras_paragrad.engine.step.indivisible import IndivisibleBatchGuard
from keras_paragrad.engine.step.stages import Stages
from keras_paragrad.engine.telemetry.train_functions import LATEST, compiled_functions
from keras_paragrad.engine.telemetry.watch import (
    Telemetry,
    observing_gradients,
    updates_each_batch,
    watched_optimizers,
    watching_updates,
)
from keras_paragrad.engine.tracing.announcing import announcing_part
from keras_paragrad.engine.training.train_step import TrainStep


class CompiledModel:
    """Train functions by stages, which are built once until the model is compiled again.

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
        # The flags with which Keras's step was traced. If it wasn't, the first trace of ours reads them.
        self.trainable = Trainable.by_optimizer(model) if known else None

    def function(self, stages: Stages, seen: SeenBatches) -> TrainFunction:
        """The train function of these stages; steps are traced when it is called."""
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
            """With the *apply* stage, a step that only accumulates, and one that ends with an update."""
            choices = (False, True) if stages.apply else (False,)
            return [functools.partial(self.step, stages, update=update, telemetry=telemetry) for update in choices]

        def renew(frame: FrameType | None) -> TrainFunction | None:
            """Makes the function anew, if its proof changes before an epoch how batches are divided."""
            if not proof.asks_again or not begins_epoch(frame, model):
                return None
            with announcing_part("proving how batches are divided"):
                if not proof.again():
                    return None
            self._functions.clear()
            model.train_function = self.function(stages, seen)
            return model.train_function

        updates = updates_each_batch(model.optimizer)
        execution = StepExecution(
            take=stages.take,
            schedule=stages.apply,
            seen=seen,
            guard=IndivisibleBatchGuard(model, stages.split, lambda: divisions.why_whole),
            prepare=functools.partial(self._prepare, stages, divisions),
            proof=proof,
            renew=renew,
            running=stages.running,
            watched=WatchedSteps(steps(telemetry), telemetry, updates) if telemetry else None,
            by_xla=not stages.by_xla_alone(model, model.distribute_strategy.num_replicas_in_sync),
            on_mesh=stages.mesh.wrap if stages.mesh else None,
        )
        return execution.function(model, steps(None))

    def _prepare(self, stages: Stages, divisions: Divisions, iterator: Any, specs: Specs) -> None:
        """Creates variables, and finds how batches of these specs are divided, before a step is traced."""
        if self.model.distribute_strategy.num_replicas_in_sync == 1 and not stages.mesh:
            self._build_variables(stages, iterator)
        divisions.find(stages, iterator, specs)

    def _build_variables(self, stages: Stages, iterator: Any) -> None:
        """Creates the variables that the first step would create, which TensorFlow would then trace twice."""
        model = self.model
        if is_fully_built(model) or overrides_train_step(model) or not model.built:
            return
        if not build_losses_of(model, iterator.element_spec):
            return
        self.make_loss_window(stages)
        if model.optimizer is not None:
            build_optimizer(model.optimizer, model.trainable_variables)

    def make_loss_window(self, stages: Stages, data: Batch = None) -> LossWindow | None:
        """Makes the `loss_window`, if a stage needs it and the model's losses are built, or can be from `data`."""
        if not stages.apply or (data is not None and overrides_train_step(self.model)):
            return None
        if data is not None:
            build_losses(self.model, data)
        # A custom `compute_loss` leaves the compiled losses unbuilt, also by data.
        if self.loss_window is None and (data is not None or losses_built(self.model)):
            strategy = self.model.distribute_strategy
            in_scope = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
            with tf.init_scope(), contextlib.nullcontext() if in_scope else strategy.scope():
                self.loss_window = LossWindow(self.model)
        return self.loss_window

    def step(self, stages: Stages, data: Batch, update: bool, telemetry: Telemetry | None) -> StepLogs:
        """Runs a step on one replica, with all fillers in effect; ends with an update of accumulated gradients if told.

        `data` may have no rows, and `telemetry`, if any, watches the updates.
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
            logs = TrainStep(model, stages, window, update, division).run(data, replica_batch, self.divisions)
        if telemetry and replica_count() == 1:
            logs = {**logs, LATEST: telemetry.latest()}
        return logs
