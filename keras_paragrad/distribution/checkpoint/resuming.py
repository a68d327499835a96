"""Chooses the backup that all workers resume from, and restores it into a `fit` that has just begun."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import gather, replica_placement
from keras_paragrad.distribution.checkpoint.content import Content, VariableInShards
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Manifest, Position
from keras_paragrad.distribution.checkpoint.shards import ArchiveReader
from keras_paragrad.distribution.checkpoint.writers import restore_callback_states
from keras_paragrad.distribution.consistency.describe import describe_kernels
from keras_paragrad.distribution.workers import broadcast_bytes
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.plain_text import counted
from keras_paragrad.storage import model_variables


class StoredBackup(NamedTuple):
    """A backup that was read and verified: its manifest's path, all but the shards, and what reads these."""

    path: Path
    position: Position
    content: Content
    reader: ArchiveReader


def read_backup(strategy: tf.distribute.Strategy, path: Path, manifest: Manifest) -> StoredBackup:
    """Reads a backup, given its manifest; every worker calls this."""
    reader = ArchiveReader(strategy, path.parent, manifest)
    return StoredBackup(path, manifest.position, Content.from_archive(reader.read_whole()), reader)


def common_backup(strategy: tf.distribute.Strategy, files: BackupFiles) -> tuple[StoredBackup | None, list[str]]:
    """The chief's newest intact backup, or `None`, and the damage to newer ones, on all workers, which all call this.

    If none of several is intact, or only other workers see some, it raises on all, and nothing is changed.
    """
    is_chief, damage = replica_placement(strategy).worker == 0, []
    paths = files.paths()
    candidates = iter(paths if is_chief else ())
    while True:
        manifest = None
        for path in candidates:
            try:
                manifest = files.read(path)
                break
            except (DamagedBackupError, OSError) as error:
                damage.append(str(error))
        told = json.dumps([manifest and manifest.text(), damage]).encode() if is_chief else None
        text, damage = json.loads(broadcast_bytes(strategy, told))
        if text is None:
            break
        manifest = Manifest.from_text(text)
        path = files.directory / f"{manifest.position.stem}.backup"
        try:
            return read_backup(strategy, path, manifest), damage
        except ValueError as error:
            # Without its archives, it is as useless as a damaged one.
            damage.append(f"{path}: {error}")
    if damage:
        raise DamagedBackupError(
            f"None of the backups in {files.directory} is intact, and nothing has been changed. {'; '.join(damage)}. "
            "Restore a good copy there, or move the directory away to start from scratch."
        )
    counts = gather(strategy, [len(paths)])[:, 0]
    if holders := [f"worker {worker} sees {count}" for worker, count in enumerate(counts) if worker and count]:
        raise DamagedBackupError(
            f"The chief, worker 0, sees no backup in {files.directory}, but {', '.join(holders)}. Training would start "
            "from scratch: use the same directory on all workers, copy the backups to the chief, or remove them."
        )
    return None, damage


# Sections whose variables exist before the first step; metrics may create theirs in it.
_BUILT_SECTIONS = ("model", "optimizer")
_ADVICE = "Use the same data, batch_size and steps_per_epoch as before, or another directory to start from scratch."


class Resumption:
    """Restores a backup into a model in stages, as Keras becomes ready for it."""

    def __init__(self, model: keras.Model, stored: StoredBackup, source: Path, epochs: int, steps: int | None):
        self.model = model
        self.position = stored.position
        self.epochs = epochs
        self._content, self._reader = stored.content, stored.reader
        self._source = source
        self._metrics_restored = not self.position.batch
        variables = self._fitting_variables()
        self._check_run(steps)
        self._restore(variables)
        model_variables.set_initial_epoch(model, self.position.epoch)

    @property
    def ends(self) -> bool:
        """Whether no training is left."""
        return self.position.epoch >= self.epochs

    @property
    def other_kernels(self) -> str:
        """How this process's kernels differ from the backup's, in deterministic training; else empty."""
        stored = self._content.kernels if StepBuilder.of(self.model).stages.ordered else None
        pairs = {} if stored is None else {name: (stored.get(name), now) for name, now in describe_kernels().items()}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        return "; ".join(f"{name}: {old or 'unknown'} there, {now} here" for name, (old, now) in differing.items())

    def in_first_epoch(self, epoch: int, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Resumes within the epoch, once Keras and all callbacks have begun it."""
        model_variables.set_initial_epoch(self.model, None)
        if epoch != self.position.epoch:
            raise ValueError(
                f"fit starts with epoch {epoch + 1}, but the backup in {self._source} is at {self.position}. Leave out "
                "initial_epoch, as the backup determines where to resume, or use another directory."
            )
        self.restore_callbacks(callbacks)
        if self.position.batch:
            # Restore again: Keras has reset the metrics, and callbacks may have changed state at the epoch's start.
            self._restore(self._fitting_variables())
            self._restore_metrics(model_variables.assign_all)
            # If Keras creates the metrics' variables in the first step, a skipped batch does that: a real step could
            # close a window whose first micro-batches are in the backup.
            on_resumed = (
                None if self._metrics_restored else functools.partial(self._restore_metrics, model_variables.assign_all)
            )
            StepBuilder.of(self.model).skip_batches(self.position.batch, on_resumed)

    def after_first_batch(self) -> None:
        """Adds the restored values to metrics whose variables the first step created."""
        self._restore_metrics(model_variables.add_all)

    def restore_callbacks(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Restores the state of the other callbacks."""
        restore_callback_states(callbacks, self._content.callbacks)

    @property
    def _where(self) -> str:
        return f"The backup in {self._source} is at {self.position}."

    def _check_run(self, steps: int | None) -> None:
        """Refuses a `fit` with fewer epochs, or other batches in an epoch, than the backup's."""
        position, before = self.position, self._content.steps
        if position.epoch > self.epochs or (position.batch and self.ends):
            raise ValueError(
                f"{self._where} This fit ends with epoch {self.epochs}. Pass epochs={position.epoch + 1} or more to "
                "resume from it, or use another directory to start from scratch."
            )
        if steps is None:
            return
        if before is not None and before != steps:
            raise ValueError(
                f"{self._where} Its epochs had {counted(before, 'batch')}, but this fit's have {steps}. {_ADVICE}"
            )
        if position.batch > steps:
            raise ValueError(f"{self._where} The epochs of this fit have {counted(steps, 'batch')}. {_ADVICE}")

    def _fitting_variables(self) -> dict[str, list[keras.Variable]]:
        """The model's variables to restore, checked against the variables in the backup."""
        if not self.model.built:
            raise ValueError(
                "The model has no variables yet to restore a backup into. Build it before fit, by calling it on a "
                "batch, or start it with keras.Input(shape)."
            )
        if self._content.built is None:
            model_variables.build_model_optimizer(self.model)
        else:
            model_variables.build_as_before(self.model, self._content.built)
        variables = model_variables.variables_of_run(self.model)
        for section in _BUILT_SECTIONS:
            self._content.check_fits(section, variables[section], self._source)
        return variables

    def _restore(self, variables: dict[str, list[keras.Variable]]) -> None:
        """Assigns the values of the backup to the variables, except metrics."""
        for section in _BUILT_SECTIONS:
            model_variables.assign_all({section: variables[section]}, {section: self._values(section)})

    def _values(self, section: str) -> Iterator[np.ndarray]:
        """The values of a section's variables; variables in shards are read one at a time."""
        for value in self._content.values[section]:
            yield self._reader.read(value) if isinstance(value, VariableInShards) else value

    def _restore_metrics(self, assign: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        """Restores the metrics' states, once: by `assign_all`, or by `add_all` after the first step."""
        metrics = {"metrics": model_variables.training_variables(self.model)["metrics"]}
        too_early = assign is model_variables.assign_all and len(metrics["metrics"]) < len(
            self._content.values["metrics"]
        )
        if self._metrics_restored or too_early:
            return
        self._content.check_fits("metrics", metrics["metrics"], self._source)
        assign(metrics, {"metrics": self._values("metrics")})
        self._metrics_restored = True
