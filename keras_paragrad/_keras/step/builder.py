"""The one place that builds a train function, from the stages that components fill.

A step has seven stages: *take* batches from the iterator, *split* a batch into slices, *gradient* of a slice, *combine*
the gradients, *transform* that of a whole update, *apply* it, *log*. An unfilled stage does what Keras does.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.hooks.check import check_objects
from keras_paragrad._keras.losses.tracking import LossWindow
from keras_paragrad._keras.objects.capabilities import updating
from keras_paragrad._keras.objects.model import has_own_train_step
from keras_paragrad._keras.replicas.collectives import replica_count
from keras_paragrad._keras.replicas.shard import Shard
from keras_paragrad._keras.step.execution import compile_steps
from keras_paragrad._keras.step.stages import Stages
from keras_paragrad._keras.step.symbolic import build_losses, losses_built
from keras_paragrad._keras.step.train_step import TrainStep
from keras_paragrad._keras.step.transform import install
from keras_paragrad._keras.step.uncut import Limit
from keras_paragrad._keras.storage.layout import in_shards
from keras_paragrad._keras.storage.updating import install as install_for_shards
from keras_paragrad._keras.telemetry.execution import LATEST, LookAhead, Telemetry, pick_watched
from keras_paragrad._keras.telemetry.observe import observed
from keras_paragrad._keras.telemetry.watch import updates_each_batch, watched


class StepBuilder:
    """Builds the train function of one model, in place of Keras while a stage is filled.

    Attributes:
        stages: What the stages are filled with.
        loss_window: The losses of the micro-batches since the last update, once an *apply* stage has run.
    """

    def __init__(self, model: keras.Model):
        check_objects()
        self.model = model
        self.stages = Stages()
        self.loss_window: LossWindow | None = None
        self._to_skip = 0
        self._then: Callable[[], None] | None = None
        self._built: dict[Any, Callable] = {}
        self._built_for: Any = None
        # The optimizer that the transform is installed in.
        self._transformed: Any = None

    @classmethod
    def of(cls, model: keras.Model) -> "StepBuilder":
        """The model's builder; stored on the model, so that compiled functions are reused by the next `fit`."""
        # Bypass `__setattr__`: Keras tracks and saves what is assigned as an attribute.
        return model.__dict__.setdefault("_keras_paragrad_step_builder", cls(model))

    def fill(self, **stages: Any) -> None:
        """Fills stages, or empties them with `None`; when all are empty, Keras's own methods are restored.

        Args:
            **stages: What to fill them with, by the names that `Stages` has.
        """
        self.stages = self.stages._replace(**stages)
        self._install_transform()
        self.model.train_function = None
        if self.stages.filled:
            self.model.__dict__["make_train_function"] = self.make_train_function
        else:
            self.model.__dict__.pop("make_train_function", None)

    def retrace(self) -> None:
        """Has the next step traced anew: layers of the model do something else when they are called."""
        self._built.clear()
        self.model.train_function = None

    def make_train_function(self, force: bool = False) -> None:
        """Replaces the model's `make_train_function` while a stage is filled."""
        of_callbacks = {"combine": None, "apply": None, "observe": None, "telemetry": None}
        if not force and any(getattr(self.stages, stage) for stage in of_callbacks):
            # Keras calls this before a callback fills its stages: these were left by a `fit` that failed.
            self.fill(**of_callbacks)
        if force or self.model.train_function is None:
            self.build()

    def build(self) -> None:
        """Gives the model its train function, compiled before if nothing has changed since."""
        # `compile` makes a new configuration, and a train function is only good for the one it was traced with.
        configuration, stages = self.model._compile_config, self.stages
        if self._built_for is not configuration:
            self._built_for, self._built, self.loss_window = configuration, {}, None
            self._install_transform()
        if stages.observe and in_shards(self.model.trainable_variables):
            raise ValueError(
                f"{type(stages.observe).__name__} looks at the gradients of each replica, and this model's weights and "
                "gradients are in shards. Train with DistributedFit(..., shard=None), or without that callback."
            )
        self.make_loss_window()
        if stages not in self._built:
            telemetry = stages.telemetry
            self._built[stages] = self._picked(telemetry) if telemetry else self._compiled(stages.apply)
        self.model.train_function = self._built[stages]

    def _install_transform(self) -> None:
        """Installs the transform in the optimizer that updates the weights, which `compile` may have replaced."""
        optimizer = updating(self.model.optimizer) if self.model.compiled else None
        if optimizer is not None and in_shards(self.model.trainable_variables):
            install_for_shards(optimizer)
        if self._transformed not in (None, optimizer):
            install(self._transformed, None)
        if optimizer is not None:
            install(optimizer, self.stages.transform)
        self._transformed = optimizer

    def _compiled(self, apply: Any, telemetry: Telemetry | None = None) -> Callable[[Any], dict]:
        limit = Limit(self.model, self.stages.split)
        steps = self._steps(telemetry, limit)
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        whole = not self.stages.by_xla_alone(self.model, replicas)
        taking = self.stages.take, self._skipped, limit, self._goes_on
        return compile_steps(self.model, steps, apply, *taking, by_xla=whole, mesh=self.stages.mesh)

    def _picked(self, telemetry: Telemetry) -> Callable[[Any], dict]:
        ahead = LookAhead(self.stages.apply) if self.stages.apply else None
        functions = self._compiled(ahead), self._compiled(ahead, telemetry)
        return pick_watched(*functions, telemetry, ahead, self._next_batches, updates_each_batch(self.model.optimizer))

    def make_loss_window(self) -> None:
        """Makes the `loss_window`, if there is to be one and the model's losses are built."""
        if self.stages.apply and losses_built(self.model):
            self._make_loss_window()

    def _make_loss_window(self) -> None:
        if self.loss_window is None:
            strategy = self.model.distribute_strategy
            inside = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
            with tf.init_scope(), contextlib.nullcontext() if inside else strategy.scope():
                self.loss_window = LossWindow(self.model)

    def _window_of(self, data: Any) -> LossWindow | None:
        if not self.stages.apply or has_own_train_step(self.model):
            return None
        build_losses(self.model, data)
        self._make_loss_window()
        return self.loss_window

    def _next_batches(self) -> int:
        return 0 if self._to_skip else self.model.steps_per_execution

    def skip_batches(self, batches: int, then: Callable[[], None] | None = None) -> None:
        """Skips the next batches: a resumed run has already been trained on them.

        Args:
            batches: How many.
            then: Called after them, when the compiled losses and metrics have been built.
        """
        self._to_skip, self._then = batches, then

    @property
    def batches_to_skip(self) -> int:
        """How many of the next batches are skipped."""
        return self._to_skip

    def _goes_on(self, batch: Any) -> None:
        if self._to_skip or self._then is None:
            return
        then, self._then = self._then, None
        if not has_own_train_step(self.model):
            build_losses(self.model, batch, metrics=True)
        self.make_loss_window()
        then()

    def _skipped(self, batches: int) -> int:
        passed = min(self._to_skip, batches)
        self._to_skip -= passed
        return passed

    def one_step(self, data: Any) -> dict:
        """Takes a step that ends with an update, and returns its logs; called while a function is traced."""
        return self._step(data, True, None, Limit(self.model, self.stages.split))

    def _steps(self, telemetry: Telemetry | None, limit: Limit) -> list[Callable[[Any], dict]]:
        choices = (False, True) if self.stages.apply else (False,)
        return [functools.partial(self._step, update=update, telemetry=telemetry, limit=limit) for update in choices]

    def _step(self, data: Any, update: bool, telemetry: Telemetry | None, limit: Limit) -> dict:
        step = TrainStep(self.model, self.stages, self._window_of(data), update, limit)
        shard = Shard.of(data)
        place = self.stages.place() if self.stages.place else contextlib.nullcontext()
        with place, observed(self.model, self.stages.observe, shard.rows), watched(self.model, telemetry):
            logs = step.in_its_own_way(data) if has_own_train_step(self.model) else step(data, shard)
            if self.stages.apply:
                self.stages.apply.end(update)
        if telemetry and replica_count() == 1:
            logs = {**logs, LATEST: telemetry.latest()}
        return logs
