"""The shards of a backup: read by each worker, located in files, and restored one variable at a time."""

import math
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import ReplicaPlacement, gather, replica_placement
from keras_paragrad.distribution.checkpoint.content import Values, VariableInShards
from keras_paragrad.distribution.checkpoint.file_format import (
    ShardFile,
    has_shard_file,
    is_intact,
    read_shards,
)
from keras_paragrad.distribution.workers import sum_bytes
from keras_paragrad.storage.storage import host_value, storage_of


def variable_values(placement: ReplicaPlacement, sections: dict[str, list[keras.Variable]]) -> Values:
    """The values of variables, and for sharded ones, where their shards are in files; every worker calls this.

    Args:
        placement: This worker's replicas.
        sections: The variables of each section of a backup.

    Returns:
        By section, a value or a `VariableInShards` for each variable. Values of single replicas are summed or averaged.
    """
    # Where the variable's shards begin among one replica's, in bytes.
    begin = 0
    values: Values = {}
    for name, variables in sections.items():
        values[name] = section = []
        for variable in variables:
            parts = storage_of(variable).parts(placement)
            if parts is None:
                section.append(host_value(variable))
                continue
            dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            section.append(VariableInShards(tuple(variable.shape), dtype, parts.size, begin))
            begin += parts.size * dtype.itemsize
    return values


def read_local_shards(placement: ReplicaPlacement, variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """This worker's shards of variables, in host memory; every worker calls this."""
    parts = [storage_of(variable).parts(placement) for variable in variables]
    return [shard for part in parts if part is not None for shard in part.read()]


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
    # By worker and file: whether it sees the file, and hasn't found it damaged.
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
        # Another worker may see an intact copy.
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
        self._file_count = len(files)
        self._mine = {index: file for index, file in enumerate(files) if readers[index] == worker}

    def read(self, variable: VariableInShards, replicas: int) -> np.ndarray:
        """Reads a whole variable; every worker calls this.

        Args:
            variable: The layout of its shards.
            replicas: Number of replicas that wrote them.
        """
        replicas_per_file = replicas // self._file_count
        size = replicas_per_file * variable.size * variable.dtype.itemsize
        flat = np.zeros(self._file_count * size, np.uint8)
        for index, file in self._mine.items():
            flat[index * size : (index + 1) * size] = shards_in(self._directory, file, variable, replicas_per_file)
        return join_shards(sum_bytes(self._strategy, flat), variable)


def shards_in(directory: Path, file: ShardFile, variable: VariableInShards, replicas: int) -> np.ndarray:
    """The bytes of a variable's shards in a file of `replicas` replicas."""
    size = replicas * variable.size * variable.dtype.itemsize
    return read_shards(directory, file, replicas * variable.begin, size)


def join_shards(shards: np.ndarray, variable: VariableInShards) -> np.ndarray:
    """The whole variable, from the bytes of all its shards."""
    return shards.view(variable.dtype)[: math.prod(variable.shape)].reshape(variable.shape)


def _choose_worker(workers: np.ndarray, index: int) -> int | None:
    """The worker that reads the file of this index, of the workers that see it; `None` if none does."""
    return int(workers[index % len(workers)]) if len(workers) else None
