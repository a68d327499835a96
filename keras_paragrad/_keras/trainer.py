"""The one place that builds a train function, from the stages that components fill.

A step has six stages: *take* batches from the iterator, *split* a batch into slices, *gradient* of a slice, *combine*
the gradients, *apply* them, *log*. Keras's own way is what an unfilled stage does.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import keras

from keras_paragrad._keras.execution import compile_steps
from keras_paragrad._keras.model import has_own_train_step
from keras_paragrad._keras.observe import Observe, observed
from keras_paragrad._keras.step import Gradient, Weigh, apply_gradient, gradient_of, rows_of, track_loss


class Split(Protocol):
    """Fills the *split* stage: a batch cut into slices, and its gradient put together again."""

    weigh: Weigh

    def __call__(self, model: keras.Model, gradient_of_slice: Callable[[Any], Gradient], data: Any) -> Gradient:
        """The gradient of a batch, from those of its slices."""
        ...


class Apply(Protocol):
    """Fills the *combine* and *apply* stages: when gradients that were gathered reach the weights."""

    def plan(self, batches: int) -> list[bool]:
        """Whether each of the next batches ends with an update; asked by the host before they are run."""
        ...

    def ended(self, batches: int, exhausted: bool) -> None:
        """Tells that the planned batches have run, or that the data ran out before the first of them."""
        ...

    def gathering(self, gradient: Gradient | None) -> contextlib.AbstractContextManager[Any]:
        """The context in which the optimizer gathers a gradient, or those of a `train_step` that can't be seen into."""
        ...

    def end(self, update: bool) -> None:
        """Ends the step on this replica, with an update or without."""
        ...


class StepBuilder:
    """Builds the train function of one model, in place of Keras while a stage is filled.

    Attributes:
        split: Cuts a batch up and puts its gradient together again, or `None`.
        weigh: Measures what a gradient counts for, or `None`.
        apply: Decides when gradients reach the weights, or `None`.
        observe: Sees the gradients on their way to them, or `None`.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.split: Split | None = None
        self.weigh: Weigh | None = None
        self.apply: Apply | None = None
        self.observe: Observe | None = None
        self._built: dict[Any, Callable] = {}
        self._built_for: Any = None

    @classmethod
    def of(cls, model: keras.Model) -> "StepBuilder":
        """The model's builder; it stays with the model, so that what it compiled serves the next `fit` too."""
        # Straight into `__dict__`: Keras tracks and saves what is assigned as an attribute.
        return model.__dict__.setdefault("_keras_paragrad_step_builder", cls(model))

    def fill(self, **stages: Any) -> None:
        """Fills stages, or empties them with `None`; with the last one emptied the model is Keras's again."""
        for stage, filler in stages.items():
            setattr(self, stage, filler)
        self.model.train_function = None
        if self.split or self.weigh or self.apply or self.observe:
            self.model.__dict__["make_train_function"] = self.make_train_function
        else:
            self.model.__dict__.pop("make_train_function", None)

    def make_train_function(self, force: bool = False) -> None:
        """What the model's `make_train_function` does while a stage is filled."""
        if not force and (self.apply or self.observe):
            # Keras calls this before a callback fills its stages: these were left by a `fit` that broke off.
            self.fill(weigh=None, apply=None, observe=None)
        if force or self.model.train_function is None:
            self.build()

    def build(self) -> None:
        """Gives the model its train function, compiled before if nothing has changed since."""
        # `compile` makes a new configuration, and a train function is only good for the one it was traced with.
        configuration, key = self.model._compile_config, (self.split, self.weigh, self.apply, self.observe)
        if self._built_for is not configuration:
            self._built_for, self._built = configuration, {}
        if key not in self._built:
            self._built[key] = compile_steps(self.model, self._steps(), self.apply)
        self.model.train_function = self._built[key]

    def _steps(self) -> list[Callable[[Any], dict]]:
        choices = (False, True) if self.apply else (False,)
        return [functools.partial(self._step, update=update) for update in choices]

    def _step(self, data: Any, update: bool) -> dict:
        with observed(self.model, self.observe, rows_of(data)):
            logs = self._train(data)
            if self.apply:
                self.apply.end(update)
        return logs

    def _train(self, data: Any) -> dict:
        model = self.model
        if has_own_train_step(model):
            with self._gathering(None):
                return model.train_step(data)
        gradient = self._gradient(data)
        track_loss(model, gradient)
        with self._gathering(gradient):
            apply_gradient(model, gradient)
        return model.get_metrics_result()

    def _gathering(self, gradient: Gradient | None) -> contextlib.AbstractContextManager[Any]:
        return self.apply.gathering(gradient) if self.apply else contextlib.nullcontext()

    def _gradient(self, data: Any) -> Gradient:
        if self.split is None:
            return gradient_of(self.model, data, self.weigh)
        weigh = self.weigh or self.split.weigh
        return self.split(self.model, lambda part: gradient_of(self.model, part, weigh), data)
