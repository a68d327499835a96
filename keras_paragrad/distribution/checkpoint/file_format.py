"""The files of a backup and of the workers' shards: the names and first lines that identify them.

A backup's first line is its manifest. A key distinguishes the shards of different attempts at a backup.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_paragrad.plain_text import counted

FORMAT = 2
# A backup with sharded variables, in further files.
FORMAT_OF_SHARDS = 3
# Most bytes read from a file that may not be one of ours; first lines are far shorter.
_LONGEST = 1024
_BACKUP_NAME = re.compile(r"epoch-(\d{6,18})-batch-(\d{10,18})\.backup(?:\.(?:partial|damaged)(?:-\d+)?)?")
_SHARDS_NAME = re.compile(r"epoch-(\d{6,18})-batch-(\d{10,18})\.backup\.shards-(\d{5})-of-(\d{5})-([0-9a-f]{16})")


class Position(NamedTuple):
    """The position of training.

    Attributes:
        epoch: The epoch to resume in, counted from 0.
        batch: Number of batches of the epoch trained on.
    """

    epoch: int
    batch: int

    def __str__(self) -> str:
        after = f", after {counted(self.batch, 'batch')}" if self.batch else ""
        return f"epoch {self.epoch + 1}{after}"


def backup_name(position: Position) -> str:
    """The file name of the backup of a position."""
    return f"epoch-{position.epoch:06d}-batch-{position.batch:010d}.backup"


def position_of(path: Path) -> Position | None:
    """The position in the name of a complete, partial or damaged backup; `None` for any other name."""
    match = _BACKUP_NAME.fullmatch(path.name)
    position = match and Position(int(match[1]), int(match[2]))
    return position if position and path.name.startswith(backup_name(position)) else None


def digest_words(digest: str) -> list[int]:
    """A SHA-256 as four integers, which workers can exchange."""
    return [int(word) for word in np.frombuffer(bytes.fromhex(digest), np.int64)]


def make_manifest(position: Position, content: bytes, shards: str = "") -> bytes:
    """The first line of a backup; `shards` is the key of its shards, if it has any."""
    described = {"format": FORMAT_OF_SHARDS, "shards": shards} if shards else {"format": FORMAT}
    return _line({**described, "position": list(position), "bytes": len(content)}, content)


def parse_manifest(line: bytes) -> dict[str, Any] | None:
    """The data in a manifest, or `None` if the line is not one."""
    try:
        manifest = json.loads(line) if len(line) <= _LONGEST else None
        if not isinstance(manifest, dict) or {*manifest} - {"shards"} != {"format", "position", "bytes", "sha256"}:
            return None
        return {**manifest, "position": Position(*manifest["position"])}
    except (ValueError, TypeError, RecursionError):
        return None


def verifies(manifest: dict[str, Any], line: bytes, content: bytes) -> bool:
    """Whether a manifest of any format, and the content after it, are intact."""
    described = {name: value for name, value in manifest.items() if name != "sha256"}
    return _line({**described, "position": list(manifest["position"])}, content) == line + b"\n"


def is_backup(path: Path) -> bool:
    """Whether a file is a backup by its name and manifest; only such a file is overwritten, moved or removed."""
    return read_manifest(path) is not None


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a file that is a backup by its name and first line; else `None`."""
    position = position_of(path)
    if position is None or path.is_symlink():
        return None
    try:
        with path.open("rb") as file:
            line, newline, _ = file.read(_LONGEST + 1).partition(b"\n")
    except OSError:
        return None
    manifest = parse_manifest(line) if newline else None
    return manifest if manifest and manifest["position"] == position else None


def _line(described: Mapping[str, object], content: bytes) -> bytes:
    """A manifest's line, with a SHA-256 of its other fields and of the content."""
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(content)
    return json.dumps({**described, "sha256": digest.hexdigest()}).encode() + b"\n"


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
    """Whether a file of shards in a directory has the checksum that was recorded when it was written."""
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
        begin: The first byte, counted from the start of the first shard.
        size: The number of bytes.
    """
    offset = len(_header(shards.name)) + begin
    return np.fromfile(directory / shards.name, np.uint8, size, offset=offset)


def remove_shards(directory: Path, keep: Collection[str] = ()) -> None:
    """Removes all files of shards, except files of the attempts whose keys are in `keep`."""
    # Another worker may remove the same ones.
    with contextlib.suppress(FileNotFoundError):
        for path in list(directory.iterdir()):
            match = _SHARDS_NAME.fullmatch(path.name)
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
    """Whether a file of shards is one of ours, by its first line."""
    try:
        with path.open("rb") as file:
            return not path.is_symlink() and file.read(_LONGEST).startswith(_header(path.name))
    except OSError:
        return False
