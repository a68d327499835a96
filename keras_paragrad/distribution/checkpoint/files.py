"""Backups as files: written atomically, and verified before use."""

import contextlib
import itertools
import os
from collections.abc import Generator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from keras_paragrad.arguments import check_integer, check_path
from keras_paragrad.distribution.checkpoint.file_format import (
    FORMAT,
    FORMAT_OF_SHARDS,
    Position,
    backup_name,
    flush_directory,
    is_backup,
    make_manifest,
    parse_manifest,
    position_of,
    read_manifest,
    remove_shards,
    verifies,
)


class StoredBackup(NamedTuple):
    """A backup that was read and verified.

    Attributes:
        path: Its file.
        position: The position of training.
        digest: The SHA-256 of the file's content, in hexadecimal.
        content: The bytes that were written.
        shards: A `ShardReader` of the variables in shards, once the shards are located; else `None`.
    """

    path: Path
    position: Position
    digest: str
    content: bytes
    shards: Any = None


class DamagedBackupError(RuntimeError):
    """A backup, or every one of several, is damaged."""


class BackupFiles:
    """The backups in one directory.

    A backup is one file: a manifest (a line of JSON with the position, the length and a checksum), followed by the
    content. It is written under a temporary name, flushed to disk and renamed, so a file with a backup's name is
    complete even if the writer was killed. The checksum, which covers the manifest too, detects later damage. Sharded
    variables are in one more file of each worker, written before and named in the content.

    Other files in the directory are never touched: only files with both the name and the manifest of a backup are
    overwritten, renamed or removed.

    Args:
        directory: A local or mounted directory; created with the first backup.
        keep: Number of the newest backups to keep.

    Raises:
        ValueError: An argument is invalid.

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
        # Backups are renamed into place, which object stores don't support.
        self.directory: Path = check_path("directory", directory, directory=True, example="backups")
        self.keep: int = check_integer("keep", keep, example=2)
        self._found = self.directory.exists()

    def paths(self) -> list[Path]:
        """The files with a backup's name, newest position first."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted((path for path in paths if path.name == _plain_name(path)), key=_position, reverse=True)

    def write(self, position: Position, content: bytes, shards: str = "") -> Path:
        """Writes a backup, then removes all but the newest `keep`.

        Args:
            position: The position of training.
            content: The content.
            shards: The key of its shards, which distinguishes attempts at a backup; empty if it has none.

        Returns:
            The new file.

        Raises:
            OSError: It could not be written; no partial file is left, and the other backups are unchanged.
        """
        path = self.directory / backup_name(position)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_partial()
        if (path.exists() or path.is_symlink()) and not is_backup(path):
            raise FileExistsError(f"{path} already exists, and is not a backup. Move it away")
        with _new_file(path) as partial:
            with partial.open("wb") as file:
                file.write(make_manifest(position, content, shards))
                # If this writer is killed, the next one recognizes the file by its manifest.
                file.flush()
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        flush_directory(self.directory)
        for old in list(filter(is_backup, self.paths()))[self.keep :]:
            old.unlink()
        return path

    def read(self, path: Path) -> StoredBackup:
        """Reads a backup.

        Raises:
            DamagedBackupError: It was changed or truncated, or is of another version.
            OSError: It can't be read.
        """
        line, _, content = path.read_bytes().partition(b"\n")
        manifest = parse_manifest(line)
        if manifest is None or manifest["position"] != position_of(path):
            raise DamagedBackupError(f"{path}: the first line is not this backup's manifest, so it is left alone")
        if not verifies(manifest, line, content):
            expected = manifest["bytes"]
            reason = f"{len(content)} bytes of {expected}" if len(content) != expected else "the checksum differs"
            raise DamagedBackupError(f"{path}: {reason}")
        if manifest["format"] not in (FORMAT, FORMAT_OF_SHARDS):
            raise DamagedBackupError(
                f"{path}: another version of keras_paragrad wrote it, in format {manifest['format']}; this version "
                f"reads formats {FORMAT} and {FORMAT_OF_SHARDS}"
            )
        return StoredBackup(path, manifest["position"], manifest["sha256"], content)

    def newest(self, before: Position | None = None) -> tuple[StoredBackup | None, list[str]]:
        """The newest intact backup before a position, or `None`, and the damage to newer ones; doesn't check shards."""
        damage = []
        for path in self.paths():
            if before is not None and _position(path) >= before:
                continue
            try:
                return self.read(path), damage
            except (DamagedBackupError, OSError) as error:
                damage.append(str(error))
        return None, damage

    def set_aside(self, newer_than: Position) -> None:
        """Renames backups newer than a position, so that they don't count among the newest `keep`."""
        for path in self.paths():
            if _position(path) > newer_than and is_backup(path):
                with _new_file(path, "damaged") as aside:
                    path.replace(aside)

    @property
    def shards(self) -> list[str]:
        """The keys of the shards of all backups in the directory, damaged ones too."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return [manifest["shards"] for path in paths if (manifest := read_manifest(path)) and "shards" in manifest]

    def remove_all(self, *, only_shards: bool = False) -> None:
        """Removes all backups, or all shards, and the directory if it wasn't there before and is empty now."""
        if not self.directory.is_dir():
            return
        for path in () if only_shards else filter(is_backup, list(self.directory.iterdir())):
            path.unlink()
        remove_shards(self.directory)
        if not self._found:
            with contextlib.suppress(OSError):
                self.directory.rmdir()

    def _remove_partial(self) -> None:
        """Removes the files left by a killed writer."""
        for path in list(self.directory.glob("*.backup.partial*")):
            if is_backup(path):
                path.unlink()


def _plain_name(path: Path) -> str | None:
    """The name of a backup without `.partial` or `.damaged`; `None` for other files."""
    position = position_of(path)
    return position and backup_name(position)


def _position(path: Path) -> Any:
    return position_of(path)


def _create(path: Path) -> bool:
    """Creates an empty file; whether there was none."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _new_file(path: Path, suffix: str = "partial") -> Generator[Path]:
    """Context with a new, empty file next to another, under its name, the suffix and a number; removed on failure."""
    names = (f"{path.name}.{suffix}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    new = next(candidate for candidate in map(path.with_name, names) if _create(candidate))
    try:
        yield new
    except BaseException:
        new.unlink(missing_ok=True)
        raise
