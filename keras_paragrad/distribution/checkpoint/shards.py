"""The archives of a backup: variables' shards that each worker writes, and what workers read for each other."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import ReplicaPlacement, gather, replica_placement
from keras_paragrad.distribution.checkpoint.content import Values, VariableInShards
from keras_paragrad.distribution.checkpoint.files import Archive, Manifest
from keras_paragrad.distribution.workers import broadcast_bytes, sum_bytes
from keras_paragrad.storage.storage import host_value, storage_of

# The shards of each variable on this worker's replicas, by the name of its array.
Shards = dict[str, list[np.ndarray]]


def read_variables(placement: ReplicaPlacement, sections: dict[str, list[keras.Variable]]) -> tuple[Values, Shards]:
    """The values of variables by section, and this worker's shards, in host memory; every worker calls this.

    Values of single replicas are summed or averaged.
    """
    values: Values = {}
    shards: Shards = {}
    for name, variables in sections.items():
        values[name] = section = []
        for variable in variables:
            parts = storage_of(variable).parts(placement)
            if parts is None:
                section.append(host_value(variable))
                continue
            member, dtype = str(len(shards)), np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            section.append(VariableInShards(tuple(variable.shape), dtype, placement.replicas * parts.size, member))
            shards[member] = list(parts.read())
    return values, shards


def joined(shards: Shards) -> Iterator[tuple[str, np.ndarray]]:
    """Each variable's shards as one array of bytes; a variable at a time is copied."""
    for member, parts in shards.items():
        yield member, np.concatenate([part.view(np.uint8) for part in parts])


class ArchiveReader:
    """Reads a backup's archives, each of them on one of the workers that see it; every worker calls its methods."""

    def __init__(self, strategy: tf.distribute.Strategy, directory: Path, manifest: Manifest):
        self._strategy, self._directory = strategy, directory
        self._whole, *self._shards = manifest.archives
        self._readers = self._find_readers(manifest.archives)
        worker = replica_placement(strategy).worker
        self._is_first = self._readers[0] == worker
        self._mine: dict[int, Any] = {
            index: np.load(directory / archive.name, allow_pickle=False)
            for index, (archive, reader) in enumerate(zip(self._shards, self._readers[1:], strict=True))
            if reader == worker
        }

    def _find_readers(self, archives: tuple[Archive, ...]) -> list[int]:
        """The worker that reads each archive, and has found it intact.

        An archive that several workers see may be the same file, so one of them verifies it.
        """
        worker = replica_placement(self._strategy).worker
        seen = gather(self._strategy, np.array([each.is_seen(self._directory) for each in archives], np.int64))
        # By worker and archive: whether it sees the archive, and hasn't found it damaged.
        intact, checked = seen.copy(), set[int]()
        while True:
            missing = np.flatnonzero(~intact.any(axis=0))
            if len(missing):
                damage = "its checksum differs" if seen[:, missing[0]].any() else "it is missing, or has another size"
                raise ValueError(f"{archives[missing[0]].name}: {damage}")
            seers = [np.flatnonzero(column) for column in intact.T]
            readers = [int(those[index % len(those)]) for index, those in enumerate(seers)]
            mine = {index for index, reader in enumerate(readers) if reader == worker} - checked
            checked |= mine
            damaged = [index in mine and not each.is_intact(self._directory) for index, each in enumerate(archives)]
            newly_damaged = gather(self._strategy, np.array(damaged, np.int64))
            if not newly_damaged.any():
                return readers
            # Another worker may see an intact copy.
            intact = intact - newly_damaged

    def read_whole(self) -> bytes:
        """The archive of what is whole."""
        packed = (self._directory / self._whole.name).read_bytes() if self._is_first else None
        return broadcast_bytes(self._strategy, packed, self._readers[0])

    def read(self, variable: VariableInShards) -> np.ndarray:
        """A whole variable, from the shards in all archives."""
        size = variable.size * variable.dtype.itemsize // len(self._shards)
        flat = np.zeros(len(self._shards) * size, np.uint8)
        for index, archive in self._mine.items():
            flat[index * size : (index + 1) * size] = archive[variable.member]
        whole = sum_bytes(self._strategy, flat).view(variable.dtype)
        return whole[: math.prod(variable.shape)].reshape(variable.shape)
