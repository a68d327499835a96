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

from keras_paragrad.compat.model import SEED_STATE
from keras_paragrad.distribution.checkpoint.content import Content, VariableInShards
from keras_paragrad.distribution.checkpoint.file_format import is_intact, position_of
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError
from keras_paragrad.distribution.checkpoint.shards import join_shards, shards_in
from keras_paragrad.storage.model_variables import training_variables

_WEIGHTS, _OPTIMIZER, _DATA = "weights", "optimizer", "data order"
# The sections of a backup, and of `training_variables`.
_SECTIONS = {"model": _WEIGHTS, "optimizer": _OPTIMIZER}
_KINDS = "a directory of backups, a backup, a .keras or .weights.h5 file, or a tf.train.Checkpoint"


class Digest(NamedTuple):
    """SHA-256 of the values that training leaves, in hexadecimal; `None` where there are no values of a kind.

    It depends on the values, their shapes and dtypes, and on which of several variables of one shape and dtype has
    which, by the order of the layers' names. It doesn't depend on the kind of file, except that checkpoints have no
    names of layers.

    Attributes:
        weights: Of the model's variables, with statistics, and without the states of seeds.
        optimizer: Of the optimizer's variables, with accumulated gradients.
        data_order: Of the checksum of all batches that deterministic training has read.
        source: What was read.
        named: Whether it has names of layers.
        unordered: `weights` and `optimizer`, whichever variable has which value.
    """

    weights: str | None
    optimizer: str | None
    data_order: str | None
    source: str
    named: bool = True
    unordered: tuple[str | None, str | None] = (None, None)

    def lines(self) -> list[str]:
        """The digests with their names, one on a line."""
        named = {_WEIGHTS: self.weights, _OPTIMIZER: self.optimizer, _DATA: self.data_order}
        return [f"{name:<12}{value or 'not in it'}" for name, value in named.items()]


def digest_of(source: keras.Model | str | os.PathLike[str]) -> Digest:
    """The digest of a model, or of a file that holds its state.

    Args:
        source: A built model; or the newest backup in a directory, a backup, a `.keras` or `.weights.h5` file, or the
            prefix of a `tf.train.Checkpoint`.

    Raises:
        ValueError: There is nothing of these kinds there. The message says what there is.
        DamagedBackupError: The backup was changed since it was written.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _digest_of_values(_values_of_model(source), source.name)
    path, named = Path(source), True
    if path.is_dir() and (backups := BackupFiles(path).paths()):
        path = backups[0]
    if path.is_file() and position_of(path):
        values = _values_of_backup(path)
    elif path.is_file() and zipfile.is_zipfile(path):
        values = _values_of_archive(path)
    elif path.is_file() and path.suffix == ".h5":
        values = _values_of_h5(path)
    else:
        named = False
        path, values = _values_of_checkpoint(path)
    return _digest_of_values(values, str(path), named)


# Values with their kinds (`_WEIGHTS`, `_OPTIMIZER` or `_DATA`, or `None` for a value that no digest covers), and with
# their paths: the names of their layers, from the outermost, and their own.
Values = Iterable[tuple[str | None, str, np.ndarray]]


def _digest_of_values(values: Values, source: str, named: bool = True) -> Digest:
    """Combines the hashes of the values of each kind."""
    hashes: dict[str, dict[bytes, list[tuple[Any, bytes]]]] = {}
    for kind, path, value in values:
        if kind is not None:
            head = f"{value.dtype.name} {value.shape} ".encode()
            digest = hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).digest()
            place = _place_of(path, kind) if named else _by_number(path)
            hashes.setdefault(kind, {}).setdefault(head, []).append((place, digest))
    ordered, unordered = {}, {}
    for kind, by_shape in hashes.items():
        alike = [[digest for _, digest in sorted(group, key=lambda each: each[0])] for group in by_shape.values()]
        groups = [group[0] if len(group) == 1 else hashlib.sha256(b"".join(group)).digest() for group in alike]
        ordered[kind] = hashlib.sha256(b"".join(sorted(groups))).hexdigest()
        unordered[kind] = hashlib.sha256(b"".join(sorted(sum(alike, [])))).hexdigest()
    sums = ordered.get(_WEIGHTS), ordered.get(_OPTIMIZER), ordered.get(_DATA)
    return Digest(*sums, source, named, (unordered.get(_WEIGHTS), unordered.get(_OPTIMIZER)))


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
    """The kind of a variable; `None` for seeds, which Keras's own files leave out, and a checkpoint's counter.

    Args:
        name: The variable's path.
        kind: The kind of its section, where there are sections; otherwise the path tells.
    """
    parts = name.split("/")
    if SEED_STATE in parts or parts[0] == "save_counter":
        return None
    if "data_order" in parts:
        return _DATA
    # Checkpoints may name the model's weights as the optimizer's `_trainable_variables`.
    return kind or (_OPTIMIZER if "optimizer" in parts and "_trainable_variables" not in parts else _WEIGHTS)


def _values_of_model(model: keras.Model) -> Iterator[tuple[str | None, str, np.ndarray]]:
    sections = training_variables(model)
    for section, kind in _SECTIONS.items():
        for variable in sections[section]:
            yield _kind_of(variable.path, kind), variable.path, keras.ops.convert_to_numpy(variable)


def _values_of_backup(path: Path) -> Iterator[tuple[str | None, str, np.ndarray]]:
    """Yields a backup's variables with their kinds and paths, joining the shards of sharded ones."""
    content = Content.from_bytes(BackupFiles(path.parent).read(path).content)
    for file in content.shards:
        if not is_intact(path.parent, file):
            raise DamagedBackupError(f"{path}: its file of shards {file.name} is missing or was changed")
    for section, kind in _SECTIONS.items():
        for name, value in zip(content.names[section], content.values[section], strict=True):
            if isinstance(value, VariableInShards):
                # Each worker has written one file, with a shard for each of its replicas.
                replicas = content.replicas // len(content.shards)
                shards = [shards_in(path.parent, file, value, replicas) for file in content.shards]
                value = join_shards(np.concatenate(shards), value)
            yield _kind_of(name, kind), name, value


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


def _values_of_checkpoint(path: Path) -> tuple[Path, Values]:
    """The prefix and the variables of a `tf.train.Checkpoint`, or of the latest one in a directory."""
    import tensorflow as tf

    prefix = tf.train.latest_checkpoint(str(path)) if path.is_dir() else str(path)
    if prefix is None or not Path(f"{prefix}.index").is_file():
        found = "a directory without backups or checkpoints" if path.is_dir() else "a file" if path.exists() else None
        raise ValueError(f"{str(path)!r} is {found or 'missing'}. Name {_KINDS}.")
    reader = tf.train.load_checkpoint(prefix)
    names = [name for name in reader.get_variable_to_shape_map() if name.endswith("/.ATTRIBUTES/VARIABLE_VALUE")]
    return Path(prefix), ((_kind_of(name), name, reader.get_tensor(name)) for name in names)
