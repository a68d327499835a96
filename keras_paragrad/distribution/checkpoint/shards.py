"""The shards of a backup: written by all workers, located, and read one variable at a time."""

import collections
import contextlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import ReplicaPlacement, replica_placement
from keras_paragrad.distribution.checkpoint.content import Values, VariableInShards
from keras_paragrad.distribution.checkpoint.file_format import (
    Position,
    ShardFile,
    digest_words,
    has_shard_file,
    is_intact,
    read_shards,
    remove_shards,
    shard_file_name,
    write_shards,
)
from keras_paragrad.distribution.checkpoint.files import BackupFiles
from keras_paragrad.distribution.workers import from_chief, gather, sum_bytes
from keras_paragrad.storage.storage import Parts, storage_of


class WrittenShards(NamedTuple):
    """The shards that the workers have written.

    Attributes:
        key: The key of this attempt, or `""` if no variable is sharded.
        files: The file of each worker.
    """

    key: str
    files: list[ShardFile]


NO_SHARDS = WrittenShards("", [])


def variable_values(placement: ReplicaPlacement, sections: dict[str, list[keras.Variable]]) -> Values:
    """The values of variables, or the layout of sharded ones; every worker calls this.

    Values that each replica has for itself are summed or averaged.
    """
    begin = 0
    values: Values = {}
    for name, variables in sections.items():
        values[name] = section = []
        for variable in variables:
            parts = storage_of(variable).parts(placement)
            if parts is None:
                section.append(np.asarray(variable.numpy()))
                continue
            dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            section.append(VariableInShards(tuple(variable.shape), dtype, parts.size, begin))
            begin += parts.size * dtype.itemsize
    return values


def write_worker_shards(
    strategy: tf.distribute.Strategy, files: BackupFiles, position: Position, variables: Sequence[keras.Variable]
) -> WrittenShards:
    """Writes each worker's shards of variables; every worker calls this.

    Raises:
        OSError: On every worker, if one of them could not write its shards.
    """
    placement = replica_placement(strategy)
    parts = [each for variable in variables if (each := storage_of(variable).parts(placement)) is not None]
    if not parts:
        return NO_SHARDS
    # The chief's, on all workers.
    key = f"{int(gather(strategy, np.array([secrets.randbits(62)]))[0, 0]):016x}"
    names = [shard_file_name(position, key, worker, placement.workers) for worker in range(placement.workers)]
    mine, failure, shards = None, None, _local_shards(parts)
    try:
        mine = write_shards(files.directory, names[placement.worker], shards)
    except OSError as error:
        failure = error
        # Reading the rest of a mesh is a collective operation.
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
        Whether a backup names those with this key.
    """
    chief = replica_placement(strategy).worker == 0
    keys = json.loads(from_chief(strategy, json.dumps(files.shards).encode() if chief else None))
    with contextlib.suppress(OSError):
        remove_shards(files.directory, keys)
    return key in keys


def locate_shards(
    strategy: tf.distribute.Strategy, directory: Path, files: Sequence[ShardFile]
) -> tuple["ShardReader | None", str]:
    """Locates and verifies the shards that a backup names; every worker calls this.

    A file that several workers see may be the same one, so one of them reads it.

    Args:
        strategy: The workers' strategy.
        directory: This worker's directory of backups.
        files: The files that the backup names.

    Returns:
        Their reader, or `None` and the reason.
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
        damaged_on_workers = gather(strategy, np.array(damaged, np.int64))
        if not damaged_on_workers.any():
            return ShardReader(strategy, directory, files, readers), ""
        intact = intact - damaged_on_workers


class ShardReader:
    """Reads whole variables from files of shards.

    Args:
        strategy: The workers' strategy.
        directory: This worker's directory of backups.
        files: The files, one for each worker that wrote.
        readers: For each file, the worker that reads it.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        directory: Path,
        files: Sequence[ShardFile],
        readers: Sequence[int | None],
    ):
        self._strategy, self._directory = strategy, directory
        worker = replica_placement(strategy).worker
        self._parts = len(files)
        self._mine = {index: file for index, file in enumerate(files) if readers[index] == worker}

    def read(self, variable: VariableInShards, replicas: int) -> np.ndarray:
        """Reads a whole variable; every worker calls this.

        Args:
            variable: The layout of its shards.
            replicas: Number of replicas that wrote them.
        """
        replicas_per_worker = replicas // self._parts
        size = replicas_per_worker * variable.size * variable.dtype.itemsize
        flat = np.zeros(self._parts * size, np.uint8)
        for index, file in self._mine.items():
            flat[index * size : (index + 1) * size] = read_shards(
                self._directory, file, replicas_per_worker * variable.begin, size
            )
        whole = sum_bytes(self._strategy, flat).view(variable.dtype)
        return whole[: math.prod(variable.shape)].reshape(variable.shape)


def _local_shards(parts: Iterable[Parts]) -> Iterator[np.ndarray]:
    for each in parts:
        yield from each.read()


def _choose_worker(workers: np.ndarray, index: int) -> int | None:
    return int(workers[index % len(workers)]) if len(workers) else None
