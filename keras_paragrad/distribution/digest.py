"""Digests of trained state, for two trainings to be compared: of weights, optimizer, and data order."""

import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import SEED_STATE
from keras_paragrad.distribution.checkpoint.content import VariableInShards
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, position_of
from keras_paragrad.distribution.checkpoint.resuming import read_backup
from keras_paragrad.storage.model_variables import training_variables

_WEIGHTS, _OPTIMIZER, _DATA = "weights", "optimizer", "data order"
# The sections of a backup, and of `training_variables`.
_SECTIONS = {"model": _WEIGHTS, "optimizer": _OPTIMIZER}
_KINDS = "a directory of backups, a backup, or a .keras or .weights.h5 file"


class Digest(NamedTuple):
    """SHA-256 of the values that training leaves, in hexadecimal; `None` where there are no values of a kind.

    It depends on the values, their shapes and dtypes, and on which of several variables of one shape and dtype has
    which, by the order of the layers' names. It doesn't depend on the kind of file.

    Attributes:
        weights: Of the model's variables, with statistics, and without the states of seeds.
        optimizer: Of the optimizer's variables, with accumulated gradients.
        data_order: Of the checksum of all batches that deterministic training has read.
        source: What was read.
    """

    weights: str | None
    optimizer: str | None
    data_order: str | None
    source: str

    def lines(self) -> list[str]:
        """The digests with their names, one on a line."""
        named = {_WEIGHTS: self.weights, _OPTIMIZER: self.optimizer, _DATA: self.data_order}
        return [f"{name:<12}{value or 'not in it'}" for name, value in named.items()]


def digest_of(source: keras.Model | str | os.PathLike[str]) -> Digest:
    """The digest of a model, of the newest backup in a directory, or of a backup, a `.keras` or `.weights.h5` file."""
    if not isinstance(source, (str, os.PathLike)):
        return _digest_of_values(_values_of_model(source), source.name)
    path = Path(source)
    if path.is_dir() and (backups := BackupFiles(path).paths()):
        path = backups[0]
    if path.is_file() and position_of(path):
        values = _values_of_backup(path)
    elif path.is_file() and zipfile.is_zipfile(path):
        values = _values_of_archive(path)
    elif path.is_file() and path.suffix == ".h5":
        values = _values_of_h5(path)
    else:
        found = "a directory without backups" if path.is_dir() else "another file" if path.exists() else "missing"
        raise ValueError(f"{str(path)!r} is {found}. Name {_KINDS}.")
    return _digest_of_values(values, str(path))


# Values with their kinds (`_WEIGHTS`, `_OPTIMIZER` or `_DATA`, or `None` for a value that no digest covers), and with
# their paths: the names of their layers, from the outermost, and their own.
Values = Iterable[tuple[str | None, str, np.ndarray]]


def _digest_of_values(values: Values, source: str) -> Digest:
    """Combines the hashes of the values of each kind."""
    hashes: dict[str, dict[bytes, list[tuple[Any, bytes]]]] = {}
    for kind, path, value in values:
        if kind is not None:
            head = f"{value.dtype.name} {value.shape} ".encode()
            digest = hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).digest()
            hashes.setdefault(kind, {}).setdefault(head, []).append((_place_of(path, kind), digest))
    sums = {}
    for kind, by_shape in hashes.items():
        alike = [[digest for _, digest in sorted(group, key=lambda each: each[0])] for group in by_shape.values()]
        groups = [group[0] if len(group) == 1 else hashlib.sha256(b"".join(group)).digest() for group in alike]
        sums[kind] = hashlib.sha256(b"".join(sorted(groups))).hexdigest()
    return Digest(sums.get(_WEIGHTS), sums.get(_OPTIMIZER), sums.get(_DATA), source)


def _by_number(path: str) -> list[list[Any]]:
    """Sorts the names in a path by the numbers in them: `dense_9` before `dense_10`."""
    return [[int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)] for name in path.split("/")]


def _place_of(path: str, kind: str) -> Any:
    """What variables of one shape are ordered by: the names of their layers, innermost first.

    Automatic names count up: a layer that was made later has a higher number, in every process. Variables of one layer,
    and of an optimizer, stay in the order that they come in.
    """
    *layers, name = _by_number(path)
    # Variables of no layer are the last.
    return (not layers, (layers[::-1] if kind == _WEIGHTS else []) if layers else [name])


def _kind_of(name: str, kind: str | None = None) -> str | None:
    """The kind that is given, or else the kind by the path; `None` for seeds, which Keras's own files lack."""
    parts = name.split("/")
    if SEED_STATE in parts:
        return None
    if "data_order" in parts:
        return _DATA
    return kind or (_OPTIMIZER if "optimizer" in parts else _WEIGHTS)


def _values_of_model(model: keras.Model) -> Iterator[tuple[str | None, str, np.ndarray]]:
    sections = training_variables(model)
    for section, kind in _SECTIONS.items():
        for variable in sections[section]:
            yield _kind_of(variable.path, kind), variable.path, keras.ops.convert_to_numpy(variable)


def _values_of_backup(path: Path) -> Iterator[tuple[str | None, str, np.ndarray]]:
    """Yields a backup's variables with their kinds and paths, joining the shards of sharded ones."""
    try:
        stored = read_backup(tf.distribute.get_strategy(), path, BackupFiles(path.parent).read(path))
    except ValueError as error:
        raise DamagedBackupError(f"{path}: {error}") from None
    for section, kind in _SECTIONS.items():
        for name, value in zip(stored.content.names[section], stored.content.values[section], strict=True):
            array = stored.reader.read(value) if isinstance(value, VariableInShards) else value
            yield _kind_of(name, kind), name, array


def _values_of_archive(path: Path) -> Iterator[tuple[str | None, str, np.ndarray]]:
    """Yields the variables in a `.keras` file with their kinds and paths."""
    with zipfile.ZipFile(path) as archive:
        if "model.weights.h5" not in archive.namelist():
            raise ValueError(f"{str(path)!r} is an archive without weights. Name {_KINDS}.")
        with archive.open("model.weights.h5") as file:
            yield from _values_of_h5(file)


def _values_of_h5(file: Any) -> Iterator[tuple[str | None, str, np.ndarray]]:
    """Yields the variables in an HDF5 file, by path or open, with their kinds and paths."""
    import h5py

    names: list[str] = []
    with h5py.File(file, "r") as weights:
        weights.visit(names.append)
        # Keras saves the variables of a layer under their numbers, and beside them the layer's name.
        layers = {name: str(weights[name].attrs["name"]) for name in names if "name" in weights[name].attrs}
        for name in sorted(names, key=_by_number):
            # An optimizer around another one has saved its variables.
            outer = f"{name.rpartition('/inner_optimizer/vars/')[0]}/vars"
            if isinstance(dataset := weights[name], h5py.Dataset) and outer not in names:
                parts = name.split("/")
                around = ["/".join([*parts[:end], "vars"]) for end in range(1, len(parts) - 1)] or ["vars"]
                path = [layers[group] for group in around if group in layers and around[-1] in layers]
                yield _kind_of(name), "/".join([*path, parts[-1]]), dataset[()]
