"""Writes a backup in a thread while training goes on; workers tell each other when they have written their shards.

Each attempt at a backup with shards has a key, which is in the names of its files of shards and in the backup.
"""

import contextlib
import json
import os
import secrets
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import gather, post, remove_post, replica_placement, wait_for_post
from keras_paragrad.distribution.checkpoint.content import Content
from keras_paragrad.distribution.checkpoint.file_format import (
    Position,
    ShardFile,
    remove_shards,
    shard_file_name,
    write_shards,
)
from keras_paragrad.distribution.checkpoint.files import BackupFiles
from keras_paragrad.distribution.launch.tasks import SAVED

# Seconds between two looks at whether training has ended, while a worker waits for another one's shards.
_LOOK = 1.0
_CHIEF = "chief"


class Snapshot(NamedTuple):
    """The state of training in host memory.

    Attributes:
        position: The position of training.
        content: All but the shards; `None` on workers other than the chief, or if there is a failure.
        key: The key of this attempt, the same on all workers, or `""` if no variable is in shards.
        shards: This worker's shards.
        failure: What the state has that can't be stored.
    """

    position: Position
    content: Content | None
    key: str = ""
    shards: list[np.ndarray] = []  # noqa: RUF012 - never changed
    failure: Exception | None = None


def agree_on_key(strategy: tf.distribute.Strategy) -> str:
    """A new key for an attempt at a backup; every worker calls this."""
    return f"{int(gather(strategy, np.array([secrets.randbits(62)]))[0, 0]):016x}"


class BackupWriter:
    """Writes a snapshot in a thread.

    Each worker writes its shards and posts their size and checksum. Once all have, the chief writes the backup that
    names them, and posts the keys of all backups; shards of other attempts are removed.

    Args:
        files: Where to write.
        strategy: The workers' strategy.
        snapshot: What to write.

    Attributes:
        files: Where it writes.
        position: The position of training.
        failure: Why the backup wasn't written, once `is_done`.
    """

    _running: set["BackupWriter"] = set()  # noqa: RUF012 - of this process

    def __init__(self, files: BackupFiles, strategy: tf.distribute.Strategy, snapshot: Snapshot):
        self.position = snapshot.position
        self.failure: Exception | None = None
        self.files, self._strategy = files, strategy
        self._placement = replica_placement(strategy)
        self._posts = _Posts(snapshot.key, self._placement.workers, self._is_abandoned)
        self._in_shards = bool(snapshot.key)
        self._has_posted, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="keras_paragrad backup")
        self._running.add(self)
        self._thread.start()

    @classmethod
    def finish_in(cls, files: BackupFiles) -> None:
        """Waits for the backups that earlier `fit`s of this process still write to a directory."""
        for writer in [writer for writer in list(cls._running) if writer.files.directory == files.directory]:
            writer.abandon()

    @property
    def is_done(self) -> bool:
        """Whether the backup is written, or couldn't be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the backup; every worker calls this."""
        if self._in_shards and self._placement.workers > 1:
            # Collectives end with an error if a worker is lost; its posts would never come.
            self._has_posted.wait()
            gather(self._strategy, [0])
            if self._placement.worker == 0:
                self._thread.join()
            gather(self._strategy, [0])
            self._thread.join()
            # Another worker's thread may still read what the chief has posted.
            gather(self._strategy, [0])
            self._posts.remove()
        self._thread.join()

    def abandon(self) -> None:
        """Waits for what this worker writes, but not for other workers: one of them may be lost."""
        self._abandoned.set()
        self._thread.join()

    def _is_abandoned(self) -> bool:
        return self._abandoned.is_set() or not threading.main_thread().is_alive()

    def _run(self, snapshot: Snapshot) -> None:
        """Writes the snapshot, in the thread; an error becomes `failure`."""
        try:
            if self._in_shards:
                self._write_in_shards(snapshot)
            elif snapshot.failure is not None:
                raise snapshot.failure
            elif snapshot.content is not None:
                self.files.write(snapshot.position, snapshot.content.to_bytes())
        except Exception as failure:
            # Its frames would keep the copy of the state.
            traceback.clear_frames(failure.__traceback__)
            self.failure = failure
        else:
            # The launcher says that the same command resumes.
            if path := os.environ.get(SAVED):
                Path(path).touch()
        finally:
            del snapshot
            self._has_posted.set()
            self._running.discard(self)

    def _write_in_shards(self, snapshot: Snapshot) -> None:
        """Writes this worker's shards and, on the chief, the backup that names the shards of all workers."""
        worker, failure, written = self._placement.worker, None, None
        try:
            written = self._write_shards(snapshot)
        except Exception as error:
            failure = error
        self._posts.post(str(worker), written)
        self._has_posted.set()
        if worker == 0:
            # `None` if the directory can't be read: which shards are useless isn't known then.
            named_keys = None
            try:
                try:
                    self._write_main(snapshot)
                finally:
                    named_keys = self.files.shards
            except Exception as error:
                failure = failure or error
            self._posts.post(_CHIEF, [named_keys, str(failure or "")])
        named_keys, reason = self._posts.read(_CHIEF)
        # Even after a failure: shards that no backup names are useless.
        if named_keys is not None:
            with contextlib.suppress(OSError):
                remove_shards(self.files.directory, named_keys)
        if snapshot.key not in (named_keys or ()):
            raise failure or OSError(f"worker 0 wrote no backup: {reason}")

    def _write_shards(self, snapshot: Snapshot) -> ShardFile:
        """Writes this worker's shards, unless the snapshot has a failure, which is raised."""
        if snapshot.failure is not None:
            raise snapshot.failure
        name = shard_file_name(snapshot.position, snapshot.key, self._placement.worker, self._placement.workers)
        return write_shards(self.files.directory, name, snapshot.shards)

    def _write_main(self, snapshot: Snapshot) -> None:
        """Writes the backup on the chief, once all workers have posted; an `OSError` if one has no shards to name."""
        posted = [self._posts.read(str(worker)) for worker in range(self._placement.workers)]
        failed = [worker for worker, file in enumerate(posted) if file is None]
        if failed:
            raise OSError(f"worker {failed[0]} could not write its shards")
        if snapshot.content is not None:
            content = snapshot.content.to_bytes([ShardFile(*file) for file in posted])
            self.files.write(snapshot.position, content, snapshot.key)


class _Posts:
    """What the workers tell each other about one attempt, as JSON.

    Under its index, each worker posts its `ShardFile`, or `None` if it failed. Under `_CHIEF`, the chief posts the keys
    that backups name, and why it failed, if it did.

    Args:
        key: The key of the attempt.
        workers: The number of workers; one has only itself to tell.
        is_abandoned: Whether to wait no longer.
    """

    def __init__(self, key: str, workers: int, is_abandoned: Callable[[], bool]):
        self._key, self._workers, self._is_abandoned = key, workers, is_abandoned
        self._posted: dict[str, str] = {}

    def post(self, name: str, value: Any) -> None:
        """Posts a value under a name: a worker's index, or `_CHIEF`."""
        self._posted[name] = json.dumps(value)
        if self._workers > 1:
            post(self._full_name(name), self._posted[name])

    def read(self, name: str) -> Any:
        """Waits for the value posted under a name.

        Raises:
            OSError: Training ended before it was posted.
        """
        text = self._posted.get(name)
        while text is None:
            is_last_look = self._is_abandoned()
            text = wait_for_post(self._full_name(name), _LOOK)
            if text is None and is_last_look:
                raise OSError(f"training ended before worker {0 if name == _CHIEF else name} had written its part")
        return json.loads(text)

    def remove(self) -> None:
        """Removes what this worker has posted, once all have read it."""
        if self._workers > 1:
            for name in self._posted:
                remove_post(self._full_name(name))

    def _full_name(self, name: str) -> str:
        return f"keras_paragrad/backup/{self._key}/{name}"
