"""Writes a backup in a thread while training goes on."""

import contextlib
import json
import os
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import gather, replica_placement
from keras_paragrad.distribution.checkpoint.content import Content
from keras_paragrad.distribution.checkpoint.files import Archive, BackupFiles, Position, archive_name
from keras_paragrad.distribution.checkpoint.shards import Shards, joined
from keras_paragrad.distribution.launch.tasks import SAVED
from keras_paragrad.distribution.workers import broadcast_bytes


class Snapshot(NamedTuple):
    """The state of training in host memory: this worker's shards, and on the chief the content, unless it is a failure.

    The key of this attempt is the same on all workers.
    """

    position: Position
    key: str
    content: Content | None
    shards: Shards
    failure: Exception | None = None


class BackupWriter:
    """Writes a worker's archives in a thread; the manifest follows the archives of all workers.

    Where there are no other workers' shards, the thread of the chief writes it; else the chief in `finish`, in which
    the workers tell each other the sizes and checksums of their archives. Then `failure` says why it wasn't written.
    """

    def __init__(self, files: BackupFiles, strategy: tf.distribute.Strategy, snapshot: Snapshot):
        self.position, self._key = snapshot.position, snapshot.key
        self.failure: Exception | None = None
        self._files, self._strategy, self._placement = files, strategy, replica_placement(strategy)
        self._waits_for_others = bool(snapshot.shards) and self._placement.workers > 1
        # This worker's archives: on the chief the one of whole variables, and then the one of shards.
        self._archives: list[Archive] = []
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name=_thread_name(files))
        self._thread.start()

    @staticmethod
    def wait_for_earlier(files: BackupFiles) -> None:
        """Waits for what a `fit` of this process that has failed still writes to a directory."""
        for thread in threading.enumerate():
            if thread.name == _thread_name(files):
                thread.join()

    @property
    def is_done(self) -> bool:
        """Whether this worker's archives are written, or couldn't be."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Waits for what this worker writes, but not for other workers: one of them may be lost."""
        self._thread.join()

    def finish(self) -> None:
        """Waits for the backup; every worker calls this."""
        self._thread.join()
        if self._waits_for_others:
            self._finish_with_others()

    def _run(self, snapshot: Snapshot) -> None:
        """Writes this worker's archives, in the thread; an error becomes `failure`."""
        try:
            self._write(snapshot)
            if not self._waits_for_others:
                if self._archives:
                    self._files.commit(self.position, self._key, self._archives)
                _note_saved()
        except Exception as failure:
            # Its frames would keep the copy of the state.
            traceback.clear_frames(failure.__traceback__)
            self.failure = failure
            if not self._waits_for_others and self._placement.worker == 0:
                with contextlib.suppress(OSError):
                    self._files.remove_archives(self._files.kept())
        finally:
            del snapshot

    def _write(self, snapshot: Snapshot) -> None:
        """Writes this worker's archives."""
        files, placement = self._files, self._placement
        if snapshot.failure is not None:
            raise snapshot.failure
        if placement.worker == 0:
            # What a killed writer left.
            files.remove_archives([*files.kept(), self._key])
        if snapshot.content is not None:
            name = archive_name(self.position, self._key)
            self._archives.append(files.write_archive(name, snapshot.content.arrays()))
        if snapshot.shards:
            name = archive_name(self.position, self._key, placement.worker, placement.workers)
            self._archives.append(files.write_archive(name, joined(snapshot.shards)))

    def _finish_with_others(self) -> None:
        """Writes the manifest on the chief, if all workers have written their archives."""
        workers, keep = self._placement.workers, None
        mine = self._archives[-1] if self.failure is None else Archive("", -1, "0" * 64)
        # A SHA-256 as four integers.
        words = np.frombuffer(bytes.fromhex(mine.digest), np.int64)
        rows = gather(self._strategy, np.array([mine.size, *words], np.int64))
        if self._placement.worker == 0:
            try:
                failed = np.flatnonzero(rows[:, 0] < 0)
                if self.failure is None and len(failed):
                    raise OSError(f"worker {failed[0]} could not write its shards")
                if self.failure is None:
                    names = [archive_name(self.position, self._key, worker, workers) for worker in range(workers)]
                    shards = [
                        Archive(name, int(row[0]), row[1:].tobytes().hex())
                        for name, row in zip(names, rows, strict=True)
                    ]
                    self._files.commit(self.position, self._key, [self._archives[0], *shards])
            except Exception as error:
                self.failure = error
            # `None` if the directory can't be read: which archives are useless isn't known then.
            with contextlib.suppress(OSError):
                keep = self._files.kept()
        told = json.dumps([self.failure and str(self.failure), keep]).encode() if self._placement.worker == 0 else None
        reason, keep = json.loads(broadcast_bytes(self._strategy, told))
        # Even after a failure: archives that no backup names are useless.
        if keep is not None:
            with contextlib.suppress(OSError):
                self._files.remove_archives(keep)
        if reason is None:
            _note_saved()
        elif self.failure is None:
            self.failure = OSError(f"worker 0 wrote no backup: {reason}")


def _note_saved() -> None:
    """Has the launcher say that the same command resumes."""
    if path := os.environ.get(SAVED):
        Path(path).touch()


def _thread_name(files: BackupFiles) -> str:
    return f"keras_paragrad backup to {files.directory}"
