"""The shards of a backup: written by all workers, found again, and read one variable at a time."""

import collections
import contextlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import ReplicaPlacement, replica_placement
from keras_paragrad.distribution.checkpoint.content import Values, VariableInShards
from keras_paragrad.distribution.checkpoint.files import BackupFiles
from keras_paragrad.distribution.checkpoint.manifest import Position, digest_words
from keras_paragrad.distribution.checkpoint.shard_files import (
    ShardFile,
    has_shard_file,
    is_intact,
    read_shards,
    remove_shards,
    shard_file_name,
    write_shards,
)
from keras_paragrad.distribution.workers import from_chief, gather, sum_bytes
from keras_paragrad.storage.storage import Parts, storage_of


class WrittenShards(NamedTuple):
    """What the workers have written.

    Attributes:
        key: The key of this attempt, or `""` if no variable is in shards.
        files: Each worker's file.
    """

    key: str
    files: list[ShardFile]


NO_SHARDS = WrittenShards("", [])


def variable_values(place: ReplicaPlacement, sections: dict[str, list[keras.Variable]]) -> Values:
    """The values of variables, and how those are cut that are divided; every worker calls this.

    Values of which each replica has a part are summed or averaged over the replicas.
    """
    begin = 0
    values: Values = {}
    for name, variables in sections.items():
        values[name] = found = []
        for variable in variables:
            parts = storage_of(variable).parts(place)
            if parts is None:
                found.append(np.asarray(variable.numpy()))
                continue
            dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            found.append(VariableInShards(tuple(variable.shape), dtype, parts.size, begin))
            begin += parts.size * dtype.itemsize
    return values


def write_worker_shards(
    strategy: tf.distribute.Strategy, files: BackupFiles, position: Position, variables: Sequence[keras.Variable]
) -> WrittenShards:
    """Writes the shards of variables, each worker those that it has; every worker calls this.

    Raises:
        OSError: On every worker, if one of them could not write its own.
    """
    place = replica_placement(strategy)
    parts = [found for each in variables if (found := storage_of(each).parts(place)) is not None]
    if not parts:
        return NO_SHARDS
    # The chief's, so that it is the same on all workers.
    key = f"{int(gather(strategy, np.array([secrets.randbits(62)]))[0, 0]):016x}"
    names = [shard_file_name(position, key, worker, place.workers) for worker in range(place.workers)]
    mine, failure, shards = None, None, _local_shards(parts)
    try:
        mine = write_shards(files.directory, names[place.worker], shards)
    except OSError as error:
        failure = error
        # Other workers may still gather what is left of a mesh.
        collections.deque(shards, maxlen=0)
    digest = digest_words(mine.digest) if mine else [0] * 4
    answers = gather(strategy, np.array([mine.size if mine else -1, *digest], np.int64))
    failed = np.flatnonzero(answers[:, 0] < 0)
    if failure is not None:
        raise failure
    if len(failed):
        raise OSError(f"worker {failed[0]} could not write its shards")
    sizes = answers[:, 0].tolist()
    digests = [row.tobytes().hex() for row in answers[:, 1:]]
    return WrittenShards(key, [ShardFile(*each) for each in zip(names, sizes, digests, strict=True)])


def remove_unnamed_shards(strategy: tf.distribute.Strategy, files: BackupFiles, key: str) -> bool:
    """Removes the shards that no backup of the chief names; every worker calls this.

    Returns:
        Whether one names those of this key.
    """
    chief = replica_placement(strategy).worker == 0
    kept = json.loads(from_chief(strategy, json.dumps(files.shards).encode() if chief else None))
    with contextlib.suppress(OSError):
        remove_shards(files.directory, kept)
    return key in kept


def locate_shards(
    strategy: tf.distribute.Strategy, directory: Path, files: Sequence[ShardFile]
) -> tuple["ShardReader | None", str]:
    """Finds the shards that a backup names, and verifies them; every worker calls this.

    A file that several workers see is read by one of them, as it may be the same file.

    Args:
        strategy: The workers' strategy.
        directory: The directory of backups that this worker sees.
        files: What the backup names.

    Returns:
        What reads them, or `None` and the reason.
    """
    worker = replica_placement(strategy).worker
    seen = gather(strategy, np.array([has_shard_file(directory, file) for file in files], np.int64))
    intact, checked = seen.copy(), set()
    while True:
        readers = [_choose_worker(np.flatnonzero(column), index) for index, column in enumerate(intact.T)]
        if None in readers:
            index = readers.index(None)
            damage = "its checksum differs" if seen[:, index].any() else "it is missing, or has another size"
            return None, f"{files[index].name}, the shards of worker {index} of {len(files)}: {damage}"
        mine = {index for index, reader in enumerate(readers) if reader == worker} - checked
        damaged = [index in mine and not is_intact(directory, file) for index, file in enumerate(files)]
        checked |= mine
        found = gather(strategy, np.array(damaged, np.int64))
        if not found.any():
            return ShardReader(strategy, directory, files, readers), ""
        intact = intact - found


class ShardReader:
    """Reads whole variables from files of shards.

    Args:
        strategy: The workers' strategy.
        directory: The directory of backups that this worker sees.
        files: The files, one of each worker that wrote them.
        readers: For each file, the worker that reads it.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, directory: Path, files: Sequence[ShardFile], readers: Sequence[Any]
    ):
        self._strategy, self._directory = strategy, directory
        worker = replica_placement(strategy).worker
        self._parts = len(files)
        self._mine = {index: file for index, file in enumerate(files) if readers[index] == worker}

    def whole(self, cut: VariableInShards, replicas: int) -> np.ndarray:
        """A variable; every worker calls this.

        Args:
            cut: How it is cut.
            replicas: How many replicas those that wrote it had.
        """
        of_worker = replicas // self._parts
        size = of_worker * cut.size * cut.dtype.itemsize
        flat = np.zeros(self._parts * size, np.uint8)
        for index, file in self._mine.items():
            flat[index * size : (index + 1) * size] = read_shards(self._directory, file, of_worker * cut.begin, size)
        whole = sum_bytes(self._strategy, flat).view(cut.dtype)
        return whole[: math.prod(cut.shape)].reshape(cut.shape)


def _local_shards(parts: Iterable[Parts]) -> Iterator[np.ndarray]:
    for each in parts:
        yield from each.read()


def _choose_worker(workers: np.ndarray, index: int) -> int | None:
    return int(workers[index % len(workers)]) if len(workers) else None
