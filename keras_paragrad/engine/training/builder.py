"""`StepBuilder`: the stages that components fill, and the train function that follows from them.

The stages of a step: *take* a batch from the iterator, *split* it into slices, compute the *gradient* of each,
*combine* them, *observe* and *transform* the gradient of an update, *apply* it, *log*. Keras fills the others.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import EpochIterator
from keras_paragrad.compat.model import fit_frame, overrides_train_step
from keras_paragrad.compat.optimizer import innermost_optimizer
from keras_paragrad.compat.types import Batch, StepLogs
from keras_paragrad.engine.losses.sums import LossWindow
from keras_paragrad.engine.step.building import build_from_data, build_losses, check_compiled_in_scope
from keras_paragrad.engine.step.data_order import follow_data_order
from keras_paragrad.engine.step.execution import SeenBatches
from keras_paragrad.engine.step.interception import install_transform
from keras_paragrad.engine.step.stages import Stages, save_states
from keras_paragrad.engine.telemetry.watch import watched_optimizers
from keras_paragrad.engine.training.compiled_model import CompiledModel
from keras_paragrad.storage.model_variables import STEP_BUILDER
from keras_paragrad.storage.storage import any_divided
from keras_paragrad.storage.updating import install_storages

# Returns the stages that a callback fills, by name, for the model as it is compiled now.
Fillers = Callable[[], dict[str, Any]]


class StepBuilder:
    """The stages of a model, whose train function is built in Keras's place while one of them is filled.

    Attributes:
        stages: The fillers.
    """

    def __init__(self, model: keras.Model):
        check_internals("models", "steps")
        self.model = model
        self.stages = Stages()
        self._compiled = CompiledModel(model)
        # The model's `compile` configuration of `_compiled`.
        self._compiled_for: object = None
        self._seen = SeenBatches()
        # The optimizer whose `apply` runs the last stages, and others whose updates are watched.
        self._installed: list[keras.optimizers.Optimizer] = []
        # The optimizer that keeps the order of the data.
        self._ordered: keras.optimizers.Optimizer | None = None
        # The names of the stages that the callbacks of the running `fit` have filled, and what to call at its end.
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
        """Describes how batches were divided and weighted, and by what evidence; `None` before `fit` has seen data."""
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
        """Fills stages until `end_fit`, which calls `end`, also after a `fit` that failed.

        Calls `fillers` again if a callback calls `compile` during this `fit`.
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
        """Installs the last stages in the optimizer that updates the weights, which `compile` may have replaced."""
        while self._installed:
            install_transform(self._installed.pop(), None)
        optimizer = innermost_optimizer(self.model.optimizer) if self.model.compiled else None
        if optimizer is not None:
            install_storages(optimizer, self.model.trainable_variables)
            install_transform(optimizer, self.stages.chain, shown=bool(self.stages.observe or self.stages.telemetry))
            save_states(self.model.optimizer, self.stages.transforms or ())
            self._installed.append(optimizer)
        self._ordered = follow_data_order(self.model, self._ordered, follow=self.stages.ordered is not None)
        # The first is `model.optimizer`.
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
        """Sets the model's train function; compiled functions are reused while nothing has changed."""
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
        """Notes the iterator of the running `fit`, to build metrics from if a callback calls `compile`."""
        self._reads = weakref.ref(iterator) if iterator is not None else lambda: None

    def one_step(self, data: Batch) -> StepLogs:
        """Runs a step that ends with an update, and returns its logs; for tracing. Untried calls are divided."""
        with self._compiled.divisions.taking_untried():
            return self._compiled.step(self.stages, data, True, None)

    def _by_configuration(self) -> None:
        """Starts over if the model was compiled again."""
        configuration = self.model._compile_config
        if self._compiled_for is configuration:
            return
        # Outside of `fit`, stages of callbacks are left over from one that failed.
        if self._of_callbacks and fit_frame(inspect.currentframe(), self.model) is None:
            self._drop_leftovers()
        self._compiled_for, self._compiled = configuration, CompiledModel(self.model)
        if self.stages.take:
            # A callback may have called `compile`.
            check_compiled_in_scope(self.model)
        for fillers in self._of_callbacks:
            self.stages = self.stages._replace(**fillers())
        self._install_stages()
        if self.stages.take and (iterator := self._reads()) is not None:
            # Metrics can't create variables within a step on replicas.
            build_from_data(self.model, iterator, None)

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

    # Resuming.

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
