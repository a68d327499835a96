"""Backups as files: each is written whole or not at all, and checked before anything of it is believed."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
_NAME = re.compile(r"epoch-(\d+)-batch-(\d+)\.backup")


class Position(NamedTuple):
    """Where training stands.

    Attributes:
        epoch: The epoch that it goes on in, counted from 0.
        batch: How many batches of that epoch have been trained on.
    """

    epoch: int
    batch: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, after {self.batch} batches" if self.batch else f"epoch {self.epoch + 1}"


class Stored(NamedTuple):
    """A backup that was read and found intact.

    Attributes:
        path: Its file.
        position: Where training stood.
        digest: The SHA-256 of the file's content, in hexadecimal.
        content: What was written.
    """

    path: Path
    position: Position
    digest: str
    content: bytes


class DamagedBackupError(RuntimeError):
    """A backup is not what was written, or none of several is."""


class BackupFiles:
    """The backups in one directory.

    A backup is one file: a manifest, which is a line of JSON with the position, the length and a checksum, and then
    what was backed up. It is written under another name, flushed to the disk and renamed, so that a file with a
    backup's name is whole, whenever the writer was killed; the checksum, over the manifest too, finds what happens to
    it later.

    Args:
        directory: Where they are; made when the first one is written. A local or mounted file system.
        keep: How many of the newest to keep.

    Raises:
        ValueError: An argument can't be used.

    Example:

    >>> import tempfile
    >>> files = BackupFiles(tempfile.mkdtemp(), keep=2)
    >>> for batch in range(3):
    ...     path = files.write(Position(0, batch), b"weights")
    >>> path.name, len(files.paths())
    ('epoch-000000-batch-0000000002.backup', 2)
    >>> files.read(path).content
    b'weights'
    """

    def __init__(self, directory: str | PathLike[str], keep: int = 2):
        if not isinstance(directory, (str, PathLike)) or not str(directory):
            raise ValueError(f"Got the directory {directory!r} for backups. Write the path of one: Backup('backups').")
        if "://" in str(directory):
            raise ValueError(
                f"Got {str(directory)!r} for backups, which are renamed into place: that needs a local or mounted file "
                "system. Mount the bucket, or write a local path: only the chief's has to last."
            )
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"Got keep={keep!r}. Write how many backups to keep, 1 or more: keep=2.")
        self.directory = Path(directory)
        self.keep = keep

    def paths(self) -> list[Path]:
        """The files that have a backup's name, the newest position first."""
        found = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(filter(_position_of, found), key=_position_of, reverse=True)

    def write(self, position: Position, content: bytes) -> Path:
        """Writes a backup, then removes those that are older than the newest `keep`.

        Returns:
            The new file.

        Raises:
            OSError: It could not be written; no part of it is left, and the other backups are as they were.
        """
        path = self.directory / f"epoch-{position.epoch:06d}-batch-{position.batch:010d}.backup"
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob("*.backup.partial"):
            left.unlink()
        with _removed_on_failure(path.with_name(f"{path.name}.partial")) as partial:
            with partial.open("xb") as file:
                file.write(_manifest(position, content))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        _flush_directory(self.directory)
        for old in self.paths()[self.keep :]:
            old.unlink()
        return path

    def read(self, path: Path) -> Stored:
        """Reads a backup.

        Raises:
            DamagedBackupError: It is not, to the last bit, what was written.
            OSError: It can't be read.
        """
        line, _, content = path.read_bytes().partition(b"\n")
        try:
            manifest = json.loads(line)
            position = Position(*manifest["position"])
            whole = _manifest(position, content) == line + b"\n" and position == _position_of(path)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DamagedBackupError(f"{path}: its first line, the manifest, is damaged") from None
        if not whole:
            expected = manifest.get("bytes")
            reason = f"{len(content)} bytes of {expected}" if len(content) != expected else "the checksum differs"
            raise DamagedBackupError(f"{path}: {reason}")
        return Stored(path, position, manifest["sha256"], content)

    def newest(self) -> tuple[Stored | None, list[str]]:
        """The newest backup that is intact, or `None`, and what is wrong with each that is newer."""
        damage = []
        for path in self.paths():
            try:
                return self.read(path), damage
            except (DamagedBackupError, OSError) as error:
                damage.append(str(error))
        return None, damage

    def set_aside(self, newer_than: Position) -> None:
        """Renames what is newer than a position, so that it does not take the place of backups yet to be written."""
        for path in self.paths():
            if _position_of(path) > newer_than:
                path.replace(path.with_name(f"{path.name}.damaged"))

    def remove_all(self) -> None:
        """Removes all backups, and the directory if there is nothing else in it."""
        for path in self.directory.glob("*.backup*"):
            path.unlink()
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def _position_of(path: Path) -> Any:
    match = _NAME.fullmatch(path.name)
    return match and Position(int(match[1]), int(match[2]))


def _manifest(position: Position, content: bytes) -> bytes:
    described = {"format": FORMAT, "position": list(position), "bytes": len(content)}
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(content)
    return json.dumps({**described, "sha256": digest.hexdigest()}).encode() + b"\n"


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[Path]:
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _flush_directory(directory: Path) -> None:
    """Makes a rename last; some systems can't open a directory, and need not."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
