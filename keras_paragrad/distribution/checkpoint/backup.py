"""`Backup`: saves everything that a killed `fit` needs to resume."""

import logging
import secrets
from collections.abc import Sequence
from os import PathLike
from typing import Any

import keras
import numpy as np

from keras_paragrad.arguments import check_flag, check_integer
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.model import overrides_train_step
from keras_paragrad.compat.types import Logs
from keras_paragrad.compat.workers import gather, replica_placement, worker_strategy
from keras_paragrad.distribution.checkpoint.content import (
    Content,
    UnstorableError,
    Values,
    copy_state,
    state_in_words,
)
from keras_paragrad.distribution.checkpoint.files import BackupFiles, Position
from keras_paragrad.distribution.checkpoint.interruptions import StopChecks, StopRequest, TrainingInterrupted
from keras_paragrad.distribution.checkpoint.resuming import Resumption, StoredBackup, common_backup
from keras_paragrad.distribution.checkpoint.shards import read_variables
from keras_paragrad.distribution.checkpoint.writers import (
    HISTORY,
    append_epoch,
    callback_states,
    check_callback_states,
    check_callbacks,
)
from keras_paragrad.distribution.checkpoint.writing import BackupWriter, Snapshot
from keras_paragrad.distribution.consistency.describe import describe_kernels
from keras_paragrad.distribution.workers import agree
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage import model_variables

_log = logging.getLogger("keras_paragrad")


class Backup(keras.callbacks.Callback):
    """Backs up training during `fit`, and makes the next `fit` resume from there, on all workers at the same step.

    A backup holds the variables of the model, the optimizer (including an open window of an `AccumulatingOptimizer`)
    and the metrics, the states of random seeds, the epoch and batch, and the state of `EarlyStopping`,
    `ReduceLROnPlateau`, `ModelCheckpoint` and custom callbacks with `get_state` and `set_state`. It is read
    between two steps, and written by a thread while training goes on, which waits for the file at the end of `fit`, on
    SIGTERM, and when the next backup is due. The state that was read is in host memory meanwhile. The
    chief writes it, after every worker has written its shards; writes are atomic, and checksums are
    verified before use. A backup can be restored on a different number of replicas and workers, and under another
    `shard=`. Pass this as the last callback of `fit`, on every worker, and use a separate
    directory for each `fit`. Other files in it are never touched.

    Data is not backed up: when resuming within an epoch, batches already trained on are read and skipped, so the data
    must have the same order.

    Args:
        directory: The directory of the backups; on other workers it may be on another file system, or empty.
        every: `"epoch"`, or the number of batches between backups.
        keep: Number of the newest backups to keep.
        on_sigterm: Whether SIGTERM to any worker makes all of them back up after the same batch and leave `fit` with
            `TrainingInterrupted`, exit status 143.
        callbacks: The other callbacks of this `fit`, whose state is backed up too.
        delete_when_done: Whether to remove the backups when `fit` completes, and their directory if it wasn't there
            before; otherwise the next `fit` resumes from them.

    Raises:
        ValueError: An argument is invalid; or when `fit` begins: arguments differ between workers, or the backup is of
            another model, of an epoch or batch that this `fit` does not have, or of epochs of another length.
        TypeError: When `fit` begins: the state of a callback has a value that can't be restored exactly.
        DamagedBackupError: When `fit` begins: there are backups, but none is intact.
        TrainingInterrupted: After SIGTERM.

    Example:

    >>> import tempfile, keras, numpy as np
    >>> from keras_paragrad.distribution import Backup
    >>> directory = tempfile.mkdtemp()
    >>> def trained(epochs, callbacks):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("adam", loss="mse")
    ...     x = np.ones((8, 4))
    ...     model.fit(x, x[:, :1], batch_size=2, epochs=epochs, shuffle=False, callbacks=callbacks, verbose=0)
    ...     return model.get_weights()[0]
    >>> _ = trained(1, [Backup(directory, delete_when_done=False)])
    >>> bool(np.all(trained(2, [Backup(directory)]) == trained(2, [])))
    True
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        every: str | int = "epoch",
        keep: int = 2,
        on_sigterm: bool = True,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        delete_when_done: bool = True,
    ):
        check_internals("models", "steps", "backups")
        super().__init__()
        self.files = BackupFiles(directory, keep)
        self.every = check_integer("every", every, also=("epoch",), example=500)
        self.on_sigterm = check_flag("on_sigterm", on_sigterm)
        self.callbacks = check_callbacks(callbacks)
        self.delete_when_done = check_flag("delete_when_done", delete_when_done)
        self._request = StopRequest()
        self._resumption: Resumption | None = None
        self._position = Position(0, 0)
        # Batches of the epoch: trained on before `fit` resumed, and trained on at the latest backup.
        self._skipped = self._backed_up_at = 0
        # The epoch that has just ended, and its logs.
        self._ended: tuple[int, dict[str, Any]] | None = None
        self._writer: BackupWriter | None = None
        # Whether the latest backup failed.
        self._failing = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Restores the newest backup, if there is one."""
        model: keras.Model = self.model
        self._strategy = worker_strategy(model)
        placement = replica_placement(self._strategy)
        self._is_chief = placement.worker == 0
        self._checks = StopChecks(self._strategy, placement.workers)
        check_callback_states(self._stateful_callbacks)
        every = 0 if self.every == "epoch" else int(self.every)
        settings = {"batches between backups": every, "as on_sigterm": int(self.on_sigterm)}
        agree(self._strategy, settings, "settings of Backup")
        BackupWriter.wait_for_earlier(self.files)
        self._writer = None
        stored, damage = common_backup(self._strategy, self.files)
        self._failing, self._resumption = False, None
        if stored:
            epochs, steps = self.params["epochs"], self.params.get("steps")
            self._resumption = Resumption(model, stored, self.files.directory, epochs, steps)
            self._announce(self._resumption, stored, damage)
        if self.on_sigterm:
            self._request.listen()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Skips the batches of the epoch that have already been trained on."""
        self._position, self._ended = Position(epoch, 0), None
        self._skipped = self._backed_up_at = 0
        if self._resumption:
            self._resumption.in_first_epoch(epoch, self._stateful_callbacks)
            self._skipped = self._backed_up_at = self._resumption.position.batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Backs up, if a backup is due or SIGTERM was received."""
        done = batch + 1
        if done <= self._skipped:
            return
        self._position = Position(self._position.epoch, done)
        if self._resumption:
            self._resumption.after_first_batch()
            self._resumption = None
        if done == self.params.get("steps"):
            # The epoch is about to end, and its state is complete in `on_epoch_end`.
            return
        if self.on_sigterm or self._writer:
            stop, all_done = self._checks.after_step(self._request.received, not self._writer or self._writer.is_done)
            if all_done:
                self._finish()
            if stop:
                self._stop()
        if self.every != "epoch" and done - self._backed_up_at >= int(self.every):
            self._backed_up_at = done
            self._begin()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Backs up, if a backup is due or SIGTERM was received."""
        done, self._position, self._ended = self._position.batch, Position(epoch + 1, 0), (epoch, logs or {})
        self._resumption = None
        if self.model.stop_training:
            # Resuming from here would train one epoch too many.
            return
        if self.on_sigterm and self._checks.ask(self._request.received).stop:
            self._stop()
        if self.every == "epoch" or done - self._backed_up_at >= int(self.every):
            self._begin()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Removes the backups."""
        if self._resumption:
            # No training was left.
            self._resumption.restore_callbacks(self._stateful_callbacks)
        self._finish()
        self.leave()
        if self.delete_when_done:
            # Wait for all workers: if one failed, a restart needs the backup.
            gather(self._strategy, [0])
            if self._is_chief:
                self._remove_all()
            # No archive goes before the manifests that name it.
            gather(self._strategy, [0])
            if not self._is_chief:
                self._remove_all()

    def leave(self) -> None:
        """Restores the previous SIGTERM handler, and waits for this worker's files, after `fit` failed."""
        self._request.restore()
        if self._writer:
            self._writer.abandon()
            self._writer = None
        self._resumption = None
        if self.model is not None:
            # A `Resumption` has set these, and may not have got as far as using them.
            model_variables.set_initial_epoch(self.model, None)
            StepBuilder.of(self.model).skip_batches(0)

    def save(self) -> bool:
        """Backs up now, at the end of a batch or an epoch. Call it on every worker after the same step.

        Returns:
            Whether this worker succeeded; only the chief writes what isn't in shards.
        """
        self._begin()
        return self._finish()

    def _begin(self) -> None:
        """Reads the state, and begins to write it."""
        self._check_optimizers()
        self._finish()
        self._writer = BackupWriter(self.files, self._strategy, self._snapshot())

    def _finish(self) -> bool:
        """Waits for the backup that is being written, if any; returns whether this worker succeeded."""
        if self._writer is None:
            return True
        writer, self._writer = self._writer, None
        writer.finish()
        self._report(writer)
        return writer.failure is None

    def _report(self, writer: BackupWriter) -> None:
        """Warns, once for consecutive failures, that no backup could be written; raises unexpected errors."""
        failure = writer.failure
        if failure is not None and not isinstance(failure, (OSError, UnstorableError)):
            raise failure
        if failure is not None and not self._failing:
            newest = next(iter(self.files.paths()), None)
            _log.warning(
                "No backup could be written at %s: %s. Training continues, and retries; until then %s. %s",
                writer.position,
                str(failure).rstrip("."),
                f"the last one is {newest.name}" if newest else "there is none to resume from",
                "Keep it out of the callback's state, and out of logs."
                if isinstance(failure, UnstorableError)
                else f"Free some space in {self.files.directory}, or use another directory.",
            )
        self._failing = failure is not None

    def _check_optimizers(self) -> None:
        """Refuses a step with optimizers that a backup would leave out."""
        known = {id(optimizer) for optimizer in model_variables.optimizers_of(self.model)}
        others = [
            optimizer.name for optimizer in StepBuilder.of(self.model).called_optimizers if id(optimizer) not in known
        ]
        if others:
            raise ValueError(
                f"The train_step of {type(self.model).__name__} updates weights with {', '.join(others)}, which is in "
                "no attribute of the model, so a backup can't hold its state. Write self.name_of_yours = optimizer in "
                "compile."
            )

    def _snapshot(self) -> Snapshot:
        """The state at this position; every worker calls this."""
        sections = model_variables.variables_of_run(self.model)
        values, shards = read_variables(replica_placement(self._strategy), sections)
        # The chief's, on all workers.
        key = f"{int(gather(self._strategy, np.array([secrets.randbits(62)]))[0, 0]):016x}"
        content, failure = None, None
        if self._is_chief:
            try:
                content = self._content(sections, values)
            except UnstorableError as error:
                # Its frames would keep the copy of the state.
                failure = error.with_traceback(None)
        return Snapshot(self._position, key, content, shards, failure)

    def _content(self, sections: dict[str, list[keras.Variable]], values: Values) -> Content:
        """What the chief writes: variables and their values, by section, and copies of the states of callbacks."""
        names = {name: [variable.path for variable in section] for name, section in sections.items()}
        states = callback_states(self._stateful_callbacks)
        if self._ended and HISTORY in states:
            states[HISTORY] = append_epoch(states[HISTORY], *self._ended)
        states = {name: copy_state(state, state_in_words(name)) for name, state in states.items()}
        built = model_variables.built_with(self.model) if overrides_train_step(self.model) else None
        kernels = describe_kernels() if StepBuilder.of(self.model).stages.ordered else None
        return Content(values, names, states, self.params.get("steps"), built, kernels)

    @property
    def _stateful_callbacks(self) -> list[keras.callbacks.Callback]:
        history = getattr(self.model, "history", None)
        return [*([history] if isinstance(history, keras.callbacks.History) else ()), *self.callbacks]

    def _announce(self, resumption: Resumption, resumed: StoredBackup, damage: list[str]) -> None:
        """Logs on the chief where training resumes, and sets damaged backups aside."""
        if not self._is_chief:
            return
        if resumption.other_kernels:
            _log.warning(
                "The backup was computed with other kernels (%s), so the last bits of what follows differ from what "
                "they would have been there. Train on processors of one kind, and set TF_NUM_INTRAOP_THREADS to the "
                "same number.",
                resumption.other_kernels,
            )
        if damage:
            _log.warning("A damaged backup is not used: %s.", "; ".join(damage))
            self.files.set_aside(resumed.position)
        if resumption.ends:
            _log.warning(
                "Nothing is left to train: the backup %s is from the end of epoch %d, the last one.",
                resumed.path,
                resumed.position.epoch,
            )
        else:
            _log.warning("Training resumes in %s, from the backup %s.", resumed.position, resumed.path)

    def _remove_all(self) -> None:
        """Removes the shards, and on the chief the backups too; a failure is only logged."""
        try:
            # Other workers' directories may be on other file systems.
            self.files.remove_all(only_archives=not self._is_chief)
        except OSError as error:
            _log.warning("The backups could not be removed: %s. The next fit would resume from them.", error)

    def _stop(self) -> None:
        """Backs up and raises `TrainingInterrupted`; every worker calls this."""
        # All leave once the chief has written: one that ended before would have a launcher end the chief.
        saved = bool(gather(self._strategy, [int(self.save())]).all())
        self.leave()
        outcome = f"a backup is in {self.files.directory}" if saved else "no backup could be written"
        _log.warning("SIGTERM: training stops in %s; %s. Run the same command to resume.", self._position, outcome)
        raise TrainingInterrupted(self._position, saved)
