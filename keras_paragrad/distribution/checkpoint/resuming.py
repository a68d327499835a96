"""Chooses the backup that all workers resume from, and restores it into a `fit` that has just begun."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import gather, replica_placement
from keras_paragrad.distribution.checkpoint.content import Content, VariableInShards, shard_files_of
from keras_paragrad.distribution.checkpoint.file_format import digest_words
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position, StoredBackup
from keras_paragrad.distribution.checkpoint.shards import locate_shards
from keras_paragrad.distribution.checkpoint.writers import restore_callback_states
from keras_paragrad.distribution.kernels import describe_kernels, kernel_differences
from keras_paragrad.distribution.workers import broadcast_bytes
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.plain_text import counted
from keras_paragrad.storage import model_variables

_NONE, _FOUND, _DAMAGED = range(3)


def common_backup(strategy: tf.distribute.Strategy, files: BackupFiles) -> tuple[StoredBackup | None, list[str]]:
    """The backup to resume from, on all workers; every worker calls this.

    Args:
        strategy: The workers' strategy.
        files: The backups in this worker's directory.

    Returns:
        The chief's newest backup that is intact, with its shards, or `None` if no worker has any; and, on the chief,
        the damage to each newer one.

    Raises:
        DamagedBackupError: On every worker: all backups of the chief are damaged, or it has none and another worker
            does. No file has been changed.
    """
    damage: list[str] = []
    before = None
    while stored := _newest(strategy, files, before, damage):
        shards = shard_files_of(stored.content)
        reader, reason = locate_shards(strategy, files.directory, shards) if shards else (None, "")
        if reader or not shards:
            return StoredBackup(*stored[:-1], reader), damage
        # Without its shards, it is as useless as a damaged one.
        damage.append(f"{stored.path}: {reason}")
        before = stored.position
    return None, damage


def _newest(
    strategy: tf.distribute.Strategy, files: BackupFiles, before: Position | None, damage: list[str]
) -> StoredBackup | None:
    """The chief's newest intact backup before a position, on all workers; appends to `damage` on the chief."""
    is_chief = replica_placement(strategy).worker == 0
    mine, damaged = files.newest(before) if is_chief else (None, [])
    damage += damaged
    state = _FOUND if mine else _DAMAGED if damage else _NONE
    words = digest_words(mine.digest) if mine else [0] * 4
    # The chief's row of answers describes its backup; only the count of backups is taken from other workers.
    answers = gather(strategy, np.array([state, *(mine.position if mine else (0, 0)), *words, len(files.paths())]))
    state, epoch, batch, *digest = (int(number) for number in answers[0, :7])
    if state == _DAMAGED:
        _refuse_damaged(strategy, files, damage if is_chief else [])
    if state == _NONE:
        _refuse_if_elsewhere(files, answers[:, 7])
        return None
    mine = mine or _find_copy(files, (epoch, batch), digest)
    if gather(strategy, np.array([mine is not None], np.int64)).all():
        return mine
    return _from_chief(strategy, files, mine if is_chief else None, (epoch, batch))


def _find_copy(files: BackupFiles, position: tuple[int, int], digest: list[int]) -> StoredBackup | None:
    """The chief's backup, if an intact copy is in this worker's directory."""
    for path in files.paths():
        try:
            stored = files.read(path)
        except (DamagedBackupError, OSError):
            continue
        if tuple(stored.position) == position and digest_words(stored.digest) == digest:
            return stored
    return None


def _from_chief(
    strategy: tf.distribute.Strategy, files: BackupFiles, mine: StoredBackup | None, position: tuple[int, int]
) -> StoredBackup:
    """Sends the chief's backup, at a position, to all workers, which may have no copy."""
    content = broadcast_bytes(strategy, mine.content if mine else None)
    return mine or StoredBackup(files.directory, Position(*position), "", content)


def _refuse_damaged(strategy: tf.distribute.Strategy, files: BackupFiles, damage: list[str]) -> None:
    """Raises on all workers if the chief has only damaged backups."""
    reasons = broadcast_bytes(strategy, "; ".join(damage).encode() if damage else None).decode()
    raise DamagedBackupError(
        f"None of the backups in {files.directory} is intact, and nothing has been changed. {reasons}. Restore a good "
        "copy there, or move the directory away to start from scratch."
    )


def _refuse_if_elsewhere(files: BackupFiles, counts: np.ndarray) -> None:
    """Raises if other workers see backups that the chief does not."""
    holders = [f"worker {worker} sees {count}" for worker, count in enumerate(counts) if worker and count]
    if holders:
        raise DamagedBackupError(
            f"The chief, worker 0, sees no backup in {files.directory}, but {', '.join(holders)}. Training would start "
            "from scratch: use the same directory on all workers, copy the backups to the chief, or remove them."
        )


# Sections whose variables exist before the first step; metrics may create theirs in it.
_BUILT_SECTIONS = ("model", "optimizer")
_ADVICE = "Use the same data, batch_size and steps_per_epoch as before, or another directory to start from scratch."


class Resumption:
    """Restores a backup into a model in stages, as Keras becomes ready for it.

    Args:
        model: The model, in `on_train_begin` of `fit`.
        stored: The backup.
        source: Its source, named in errors.
        epochs: The argument `epochs` of `fit`.
        steps: Number of batches per epoch, or `None` if unknown.

    Raises:
        ValueError: The backup is of another model or `fit`, or the model has no variables yet.
    """

    def __init__(self, model: keras.Model, stored: StoredBackup, source: Path, epochs: int, steps: int | None):
        self.model = model
        self.position = stored.position
        self.epochs = epochs
        self._content, self._shards = Content.from_bytes(stored.content), stored.shards
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
        ordered = StepBuilder.of(self.model).stages.ordered
        return (
            kernel_differences(describe_kernels(), self._content.kernels) if ordered and self._content.kernels else ""
        )

    def in_first_epoch(self, epoch: int, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Resumes within the epoch, once Keras and all callbacks have begun it.

        Raises:
            ValueError: `fit` started with an epoch other than the backup's.
        """
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
            yield self._shards.read(value, self._content.replicas) if isinstance(value, VariableInShards) else value

    def _restore_metrics(self, assign: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        """Restores the metrics' states, once.

        Args:
            assign: `assign_all`, with which nothing happens while the model has fewer metric variables than the backup;
                or, after the first step, `add_all`, which adds to what that step counted.
        """
        metrics = {"metrics": model_variables.training_variables(self.model)["metrics"]}
        too_early = assign is model_variables.assign_all and len(metrics["metrics"]) < len(
            self._content.values["metrics"]
        )
        if self._metrics_restored or too_early:
            return
        self._content.check_fits("metrics", metrics["metrics"], self._source)
        assign(metrics, {"metrics": self._values("metrics")})
        self._metrics_restored = True
