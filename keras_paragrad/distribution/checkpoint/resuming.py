"""Restores a backup into a `fit` that has just begun."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_paragrad.distribution.checkpoint.callback_state import restore_state
from keras_paragrad.distribution.checkpoint.content import Content, CutVariable
from keras_paragrad.distribution.checkpoint.files import Stored
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.storage import model_variables as seam

# Variables that exist before the first step; metrics may create theirs in it.
_BEFORE_STEPS = ("model", "optimizer")
_WHAT_TO_DO = "Use the same data, batch_size and steps_per_epoch as before, or another directory to start from scratch."


class Resumption:
    """Restores a backup into a model in stages, as Keras becomes ready for it.

    Args:
        model: The model, in `on_train_begin` of `fit`.
        stored: The backup.
        source: Its source, named in errors.
        epochs: The last epoch of `fit`.
        steps: Number of batches per epoch, or `None` if unknown.

    Raises:
        ValueError: The backup is of another model or `fit`, or the model has no variables yet.
    """

    def __init__(self, model: keras.Model, stored: Stored, source: Path, epochs: int, steps: int | None):
        self.model = model
        self.position = stored.position
        self.epochs = epochs
        self._content, self._shards = Content.from_bytes(stored.content), stored.shards
        self._source = source
        self._metrics_restored = not self.position.batch
        variables = self._fitting_variables()
        self._check_run(steps)
        self._restore(variables)
        seam.set_initial_epoch(model, self.position.epoch)

    @property
    def ends(self) -> bool:
        """Whether there is nothing left to do."""
        return self.position.epoch >= self.epochs

    def in_first_epoch(self, epoch: int, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Resumes within the epoch, once Keras and all callbacks have begun it.

        Raises:
            ValueError: `fit` has begun another epoch than that of the backup.
        """
        seam.set_initial_epoch(self.model, None)
        if epoch != self.position.epoch:
            raise ValueError(
                f"fit starts with epoch {epoch + 1}, but the backup in {self._source} is at {self.position}. Leave out "
                "initial_epoch, as the backup determines where to resume, or use another directory."
            )
        self.restore_callbacks(callbacks)
        if self.position.batch:
            # Restore again: Keras has reset the metrics, and callbacks may have changed state at the epoch's start.
            self._restore(self._fitting_variables())
            self._restore_metrics(seam.assign_all)
            # If Keras creates the metrics' variables in the first step, a skipped batch is used for that: a real first
            # step could close a window whose other part is in the backup.
            then = None if self._metrics_restored else functools.partial(self._restore_metrics, seam.assign_all)
            StepBuilder.of(self.model).skip_batches(self.position.batch, then)

    def after_first_batch(self) -> None:
        """Adds the restored counts to metrics whose variables were created only in the first step."""
        self._restore_metrics(seam.add_all)

    def restore_callbacks(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Restores the state of the other callbacks."""
        restore_state(callbacks, self._content.callbacks)

    @property
    def _stands(self) -> str:
        return f"The backup in {self._source} is at {self.position}."

    def _check_run(self, steps: int | None) -> None:
        position, before = self.position, self._content.steps
        if position.epoch > self.epochs or (position.batch and self.ends):
            raise ValueError(
                f"{self._stands} This fit ends with epoch {self.epochs}. Pass epochs={position.epoch + 1} or more to "
                "resume from it, or use another directory to start from scratch."
            )
        if steps is None:
            return
        if before is not None and before != steps:
            raise ValueError(
                f"{self._stands} Its epochs had {before} batches, but those of this fit have {steps}. {_WHAT_TO_DO}"
            )
        if position.batch > steps:
            raise ValueError(f"{self._stands} The epochs of this fit have {steps} batches. {_WHAT_TO_DO}")

    def _fitting_variables(self) -> dict[str, list[keras.Variable]]:
        if not self.model.built:
            raise ValueError(
                "The model has no variables yet to restore a backup into. Build it before fit, by calling it on a "
                "batch, or start it with keras.Input(shape)."
            )
        seam.build_optimizer(self.model)
        variables = seam.training_variables(self.model)
        for section in _BEFORE_STEPS:
            self._content.check_fits(section, variables[section], self._source)
        return variables

    def _restore(self, variables: dict[str, list[keras.Variable]]) -> None:
        for section in _BEFORE_STEPS:
            seam.assign_all({section: variables[section]}, {section: self._values(section)})

    def _values(self, section: str) -> Iterator[np.ndarray]:
        """The values of variables; those in shards are read one at a time."""
        for value in self._content.values[section]:
            yield self._shards.whole(value, self._content.replicas) if isinstance(value, CutVariable) else value

    def _restore_metrics(self, how: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        metrics = {"metrics": seam.training_variables(self.model)["metrics"]}
        waits = how is seam.assign_all and len(metrics["metrics"]) < len(self._content.values["metrics"])
        if self._metrics_restored or waits:
            return
        self._content.check_fits("metrics", metrics["metrics"], self._source)
        how(metrics, {"metrics": self._values("metrics")})
        self._metrics_restored = True
