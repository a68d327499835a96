"""The one place that builds a train function, from the stages that components fill.

A step has seven stages: *take* batches from the iterator, *split* a batch into slices, *gradient* of a slice, *combine*
the gradients, *transform* that of a whole update, *apply* it, *log*. Keras's own way is what an unfilled stage does.
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
from keras_paragrad._keras.step.forward import Normalize
from keras_paragrad._keras.step.stages import Apply, Split, Spread
from keras_paragrad._keras.step.symbolic import build_losses, losses_built
from keras_paragrad._keras.step.train_step import TrainStep
from keras_paragrad._keras.step.transform import Transform, install
from keras_paragrad._keras.step.uncut import Limit
from keras_paragrad._keras.telemetry.execution import LATEST, LookAhead, Telemetry, pick_watched
from keras_paragrad._keras.telemetry.observe import Observe, observed
from keras_paragrad._keras.telemetry.watch import updates_each_batch, watched


class StepBuilder:
    """Builds the train function of one model, in place of Keras while a stage is filled.

    Attributes:
        split: Cuts a batch up and puts its gradient together again, or `None`.
        normalize: Measures what a gradient counts for, or `None`.
        transform: Changes the gradient of a whole update, or `None`.
        apply: Decides when gradients reach the weights, or `None`.
        observe: Sees the gradients on their way to them, or `None`.
        telemetry: Looks at some updates of the weights, or `None`.
        spread: How batches are spread over replicas, or `None` for Keras's way.
        loss_window: The losses of the micro-batches since the last update, once an `apply` stage has run.
    """

    def __init__(self, model: keras.Model):
        check_objects()
        self.model = model
        self.split: Split | None = None
        self.normalize: Normalize | None = None
        self.transform: Transform | None = None
        self.apply: Apply | None = None
        self.observe: Observe | None = None
        self.telemetry: Telemetry | None = None
        self.spread: Spread | None = None
        self.loss_window: LossWindow | None = None
        self._to_skip = 0
        self._then: Callable[[], None] | None = None
        self._built: dict[Any, Callable] = {}
        self._built_for: Any = None
        # The optimizer that the transform is installed in.
        self._transformed: Any = None

    @classmethod
    def of(cls, model: keras.Model) -> "StepBuilder":
        """The model's builder; it stays with the model, so that what it compiled serves the next `fit` too."""
        # Straight into `__dict__`: Keras tracks and saves what is assigned as an attribute.
        return model.__dict__.setdefault("_keras_paragrad_step_builder", cls(model))

    def fill(self, **stages: Any) -> None:
        """Fills stages, or empties them with `None`; with the last one emptied the model is Keras's again."""
        for stage, filler in stages.items():
            setattr(self, stage, filler)
        self._install_transform()
        self.model.train_function = None
        if any(self._stages):
            self.model.__dict__["make_train_function"] = self.make_train_function
        else:
            self.model.__dict__.pop("make_train_function", None)

    def make_train_function(self, force: bool = False) -> None:
        """What the model's `make_train_function` does while a stage is filled."""
        if not force and (self.apply or self.observe or self.telemetry):
            # Keras calls this before a callback fills its stages: these were left by a `fit` that broke off.
            self.fill(normalize=None, apply=None, observe=None, telemetry=None)
        if force or self.model.train_function is None:
            self.build()

    def build(self) -> None:
        """Gives the model its train function, compiled before if nothing has changed since."""
        # `compile` makes a new configuration, and a train function is only good for the one it was traced with.
        configuration, key = self.model._compile_config, self._stages
        if self._built_for is not configuration:
            self._built_for, self._built, self.loss_window = configuration, {}, None
            self._install_transform()
        if self.apply and losses_built(self.model):
            self._make_loss_window()
        if key not in self._built:
            self._built[key] = self._picked(self.telemetry) if self.telemetry else self._compiled(self.apply)
        self.model.train_function = self._built[key]

    def _install_transform(self) -> None:
        """Installs the transform in the optimizer that updates the weights, which `compile` may have replaced."""
        optimizer = updating(self.model.optimizer) if self.model.compiled else None
        if self._transformed not in (None, optimizer):
            install(self._transformed, None)
        if optimizer is not None:
            install(optimizer, self.transform)
        self._transformed = optimizer

    def _compiled(self, apply: Any, telemetry: Telemetry | None = None) -> Callable[[Any], dict]:
        limit = Limit(self.model, self.split)
        steps = self._steps(telemetry, limit)
        return compile_steps(self.model, steps, apply, self.spread, self._skipped, limit, self._goes_on)

    def _picked(self, telemetry: Telemetry) -> Callable[[Any], dict]:
        ahead = LookAhead(self.apply) if self.apply else None
        functions = self._compiled(ahead), self._compiled(ahead, telemetry)
        return pick_watched(*functions, telemetry, ahead, self._next_batches, updates_each_batch(self.model.optimizer))

    def _make_loss_window(self) -> None:
        if self.loss_window is None:
            strategy = self.model.distribute_strategy
            inside = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
            with tf.init_scope(), contextlib.nullcontext() if inside else strategy.scope():
                self.loss_window = LossWindow(self.model)

    def _window_of(self, data: Any) -> LossWindow | None:
        if not self.apply or has_own_train_step(self.model):
            return None
        build_losses(self.model, data)
        self._make_loss_window()
        return self.loss_window

    def _next_batches(self) -> int:
        return 0 if self._to_skip else self.model.steps_per_execution

    def skip_batches(self, batches: int, then: Callable[[], None] | None = None) -> None:
        """Takes the next batches and trains on none of them: where training goes on, it has seen them already.

        Args:
            batches: How many.
            then: Called after them, when the compiled losses and metrics have been built.
        """
        self._to_skip, self._then = batches, then

    def _goes_on(self, batch: Any) -> None:
        if self._to_skip or self._then is None:
            return
        then, self._then = self._then, None
        if not has_own_train_step(self.model):
            build_losses(self.model, batch, metrics=True)
        if self.apply and losses_built(self.model):
            self._make_loss_window()
        then()

    def _skipped(self, batches: int) -> int:
        passed = min(self._to_skip, batches)
        self._to_skip -= passed
        return passed

    @property
    def _stages(self) -> tuple:
        return self.split, self.normalize, self.transform, self.apply, self.observe, self.telemetry, self.spread

    def _steps(self, telemetry: Telemetry | None, limit: Limit) -> list[Callable[[Any], dict]]:
        choices = (False, True) if self.apply else (False,)
        return [functools.partial(self._step, update=update, telemetry=telemetry, limit=limit) for update in choices]

    def _step(self, data: Any, update: bool, telemetry: Telemetry | None, limit: Limit) -> dict:
        window = self._window_of(data)
        reduced = self.transform is not None
        step = TrainStep(
            self.model, self.split, self.normalize, reduced, self.apply, self.spread, window, update, limit
        )
        shard = Shard.of(data)
        with observed(self.model, self.observe, shard.rows), watched(self.model, telemetry):
            logs = step.in_its_own_way(data) if has_own_train_step(self.model) else step(data, shard)
            if self.apply:
                self.apply.end(update)
        if telemetry and replica_count() == 1:
            logs = {**logs, LATEST: telemetry.latest()}
        return logs
