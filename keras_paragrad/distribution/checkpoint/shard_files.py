"""The files of a backup's shards: one for each worker, named with its checksum in the backup."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_paragrad.distribution.checkpoint.manifest import Position, backup_name

_NAME = re.compile(r"epoch-(\d{6,18})-batch-(\d{10,18})\.backup\.shards-(\d{5})-of-(\d{5})-([0-9a-f]{16})")
# Most bytes read from a file that may not be one of ours; headers are shorter.
_LONGEST = 256


class ShardFile(NamedTuple):
    """A file of one worker's shards.

    Attributes:
        name: The file's name.
        size: Its size in bytes.
        digest: Its SHA-256, in hexadecimal.
    """

    name: str
    size: int
    digest: str


def shard_file_name(position: Position, key: str, worker: int, workers: int) -> str:
    """The name of a worker's file.

    Args:
        position: The position of training.
        key: The key of this attempt, so that a later one at the same position doesn't overwrite a backup's shards.
        worker: The worker.
        workers: Number of workers.
    """
    return f"{backup_name(position)}.shards-{worker:05d}-of-{workers:05d}-{key}"


def write_shards(directory: Path, name: str, shards: Iterable[np.ndarray]) -> ShardFile:
    """Writes a worker's shards, one at a time, before the backup that names them.

    Args:
        directory: The directory of the backups.
        name: The file's name.
        shards: Flat arrays.

    Raises:
        OSError: They could not be written; no file is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, header = directory / name, _header(name)
    digest = hashlib.sha256(header)
    with path.open("xb") as file:
        try:
            file.write(header)
            # If this writer is killed, the next one recognizes the file by its header.
            file.flush()
            for shard in shards:
                content = shard.view(np.uint8).data
                file.write(content)
                digest.update(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        size = file.tell()
    flush_directory(directory)
    return ShardFile(name, size, digest.hexdigest())


def has_shard_file(directory: Path, shards: ShardFile) -> bool:
    """Whether a directory has a file of this name and size."""
    try:
        return (directory / shards.name).stat().st_size == shards.size
    except OSError:
        return False


def is_intact(directory: Path, shards: ShardFile) -> bool:
    """Whether a file has the checksum of what was written."""
    try:
        with (directory / shards.name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == shards.digest
    except OSError:
        return False


def read_shards(directory: Path, shards: ShardFile, begin: int, size: int) -> np.ndarray:
    """Reads bytes of a worker's shards.

    Args:
        directory: The directory of the backups.
        shards: The file.
        begin: Their offset from the first shard.
        size: Their number.
    """
    offset = len(_header(shards.name)) + begin
    return np.fromfile(directory / shards.name, np.uint8, size, offset=offset)


def remove_shards(directory: Path, keep: Collection[str] = ()) -> None:
    """Removes all files of shards, except those of attempts with some keys."""
    # Another worker may remove the same ones.
    with contextlib.suppress(FileNotFoundError):
        for path in list(directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and match[5] not in keep and _is_ours(path):
                path.unlink(missing_ok=True)


def flush_directory(directory: Path) -> None:
    """Makes a new name durable; some systems can't open directories, and don't need this."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _header(name: str) -> bytes:
    return json.dumps({"keras_paragrad": "shards", "name": name}).encode() + b"\n"


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return not path.is_symlink() and file.read(_LONGEST).startswith(_header(path.name))
    except OSError:
        return False
