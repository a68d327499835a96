"""Backups as files: an archive of each worker, and a manifest with their checksums, which is renamed into place last.

Each attempt at a backup has a key of its own, so that none overwrites the archives of another.
"""

import contextlib
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Collection, Generator, Iterable
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_paragrad.arguments import check_integer, check_path
from keras_paragrad.plain_text import counted, read_json

FORMAT = 4
_BEGINS = b'{"keras_paragrad backup": '
_POSITION = r"epoch-(\d{6,18})-batch-(\d{10,18})"
_MANIFEST = re.compile(rf"{_POSITION}\.backup(\.[-0-9a-z]+\.damaged)?")
_OF_ATTEMPT = re.compile(rf"({_POSITION})-([0-9a-f]{{16}})(-\d{{5}}-of-\d{{5}}\.npz|\.npz|\.partial)")


class DamagedBackupError(RuntimeError):
    """A backup, or every one of several, is damaged."""


class Position(NamedTuple):
    """Where training is: the epoch to resume in, from 0, and the number of its batches that were trained on."""

    epoch: int
    batch: int

    def __str__(self) -> str:
        after = f", after {counted(self.batch, 'batch')}" if self.batch else ""
        return f"epoch {self.epoch + 1}{after}"

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"epoch-{self.epoch:06d}-batch-{self.batch:010d}"


def position_of(path: Path) -> Position | None:
    """The position in the name of a manifest, damaged or not; `None` for any other name."""
    match = _MANIFEST.fullmatch(path.name)
    position = match and Position(int(match[1]), int(match[2]))
    return position if position and path.name.startswith(f"{position.stem}.") else None


class Archive(NamedTuple):
    """A file of arrays, in the format of `numpy.savez`, without code: its size in bytes, and SHA-256 in hexadecimal."""

    name: str
    size: int
    digest: str

    def is_seen(self, directory: Path) -> bool:
        """Whether a directory has a file of this name and size."""
        try:
            return (directory / self.name).stat().st_size == self.size
        except OSError:
            return False

    def is_intact(self, directory: Path) -> bool:
        """Whether the file in a directory has this checksum."""
        try:
            with (directory / self.name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.digest
        except OSError:
            return False


def archive_name(position: Position, key: str, worker: int | None = None, workers: int = 1) -> str:
    """The name of a worker's archive of shards, or of the archive of all that is whole."""
    of_worker = "" if worker is None else f"-{worker:05d}-of-{workers:05d}"
    return f"{position.stem}-{key}{of_worker}.npz"


class Manifest(NamedTuple):
    """What a backup consists of: an archive of whole variables, and then those of the workers' shards, if any."""

    position: Position
    key: str
    archives: tuple[Archive, ...]

    def text(self) -> str:
        """The content of its file: a line of JSON that ends with the SHA-256 of the rest."""
        archives = [list(archive) for archive in self.archives]
        fields = {"keras_paragrad backup": FORMAT, "position": self.position, "key": self.key, "archives": archives}
        digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return json.dumps({**fields, "sha256": digest})

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Reads an intact manifest; a `ValueError` says what is wrong with another one."""
        fields = read_json(text)
        if isinstance(fields, dict) and (number := fields.get("keras_paragrad backup", FORMAT)) != FORMAT:
            raise ValueError(
                f"another version of keras_paragrad wrote it, in format {number}; this version reads {FORMAT}"
            )
        try:
            archives = tuple(Archive(*archive) for archive in fields["archives"])
            manifest = cls(Position(*fields["position"]), fields["key"], archives)
        except (TypeError, KeyError):
            raise ValueError("it isn't a backup's manifest") from None
        if manifest.text() != text:
            raise ValueError("its checksum differs")
        return manifest


class BackupFiles:
    """The backups in one directory.

    A backup is a manifest and the archives that it names. An archive has the key of its attempt in its name, and is
    flushed to disk before the manifest is written, flushed and renamed: where there is a manifest, all of the backup is
    there, even if a writer was killed. The manifest has the checksums of the archives and its own.

    Other files in the directory are never touched: only files with the name and the first bytes of a manifest, and
    files with a key in the name of an archive.

    Example:

    >>> import tempfile, numpy as np
    >>> files = BackupFiles(tempfile.mkdtemp(), keep=2)
    >>> for batch in range(3):
    ...     position, key = Position(0, batch), f"{batch:016x}"
    ...     archive = files.write_archive(archive_name(position, key), [("weights", np.ones(3))])
    ...     path = files.commit(position, key, [archive])
    >>> path.name, len(files.paths())
    ('epoch-000000-batch-0000000002.backup', 2)
    >>> files.read(path).archives == (archive,)
    True
    """

    def __init__(self, directory: str | PathLike[str], keep: int = 2):
        # Manifests are renamed into place, which object stores don't support.
        self.directory: Path = check_path("directory", directory, directory=True, example="backups")
        self.keep: int = check_integer("keep", keep, example=2)
        self._existed = self.directory.exists()

    def paths(self) -> list[Path]:
        """The files with a manifest's name, newest position first."""
        found = [(position_of(path), path) for path in self._all() if path.suffix == ".backup"]
        return [path for _, path in sorted((each for each in found if each[0]), reverse=True)]

    def write_archive(self, name: str, arrays: Iterable[tuple[str, np.ndarray]]) -> Archive:
        """Writes named arrays to a new archive, one at a time."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        with path.open("x+b") as file, _removed_on_failure(path):
            with zipfile.ZipFile(file, "w") as archive:
                for member, array in arrays:
                    with archive.open(f"{member}.npy", "w", force_zip64=True) as target:
                        np.lib.format.write_array(target, np.asanyarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._flush()
        return Archive(name, size, digest)

    def commit(self, position: Position, key: str, archives: Iterable[Archive]) -> Path:
        """Writes the manifest of archives, then removes all backups but the newest `keep`."""
        path = self.directory / f"{position.stem}.backup"
        if (path.exists() or path.is_symlink()) and not is_backup(path):
            raise FileExistsError(f"{path} already exists, and is not a backup. Move it away")
        whole, *shards = archives
        if not whole.is_seen(self.directory):
            raise FileNotFoundError(f"{whole.name} was removed: another training backs up to {self.directory}")
        partial = self.directory / f"{position.stem}-{key}.partial"
        with partial.open("xb") as file, _removed_on_failure(partial):
            file.write(Manifest(position, key, (whole, *shards)).text().encode())
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
        self._flush()
        for old in [path for path in self.paths() if is_backup(path)][self.keep :]:
            old.unlink()
        self.remove_archives(self.kept())
        return path

    def read(self, path: Path) -> Manifest:
        """Reads a manifest."""
        try:
            manifest = Manifest.from_text(path.read_bytes().decode())
        except ValueError as error:
            raise DamagedBackupError(f"{path}: {error}") from None
        if manifest.position != position_of(path):
            raise DamagedBackupError(f"{path}: it is the manifest of {manifest.position}, under another name")
        return manifest

    def set_aside(self, newer_than: Position) -> None:
        """Renames backups newer than a position, so that they don't count among the newest `keep`."""
        for path in self.paths():
            position = position_of(path)
            if position and position > newer_than and is_backup(path):
                path.replace(path.with_name(f"{path.name}.{_key_in(path)}.damaged"))

    def kept(self) -> list[str]:
        """The keys in all manifests, or an `OSError`; of a damaged one without its key, the position."""
        return [_key_in(path) for path in self._all() if position_of(path) and is_backup(path)]

    def remove_archives(self, keep: Collection[str] = ()) -> None:
        """Removes the archives and partial files of all attempts whose keys, and whose positions, aren't in `keep`."""
        for path in self._all():
            match = _OF_ATTEMPT.fullmatch(path.name)
            if match and not {match[1], match[4]} & {*keep} and path.is_file() and not path.is_symlink():
                # Another worker may remove the same ones.
                path.unlink(missing_ok=True)

    def remove_all(self, *, only_archives: bool = False) -> None:
        """Removes all backups, or all archives, and the directory if it wasn't there before and is empty now."""
        for path in () if only_archives else self._all():
            if position_of(path) and is_backup(path):
                path.unlink()
        self.remove_archives()
        if not self._existed:
            with contextlib.suppress(OSError):
                self.directory.rmdir()

    def _all(self) -> list[Path]:
        return list(self.directory.iterdir()) if self.directory.is_dir() else []

    def _flush(self) -> None:
        """Makes new names durable; some systems can't open directories, and don't need this."""
        with contextlib.suppress(OSError):
            handle = os.open(self.directory, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def is_backup(path: Path) -> bool:
    """Whether a file begins as a manifest; only such a file is overwritten, renamed or removed."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS


def _key_in(path: Path) -> str:
    """The key in a manifest, which may be damaged; without one, the position in its name."""
    match = re.search(rb'"key": "([0-9a-f]{16})"', path.read_bytes())
    return match[1].decode() if match else path.name.partition(".")[0]


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Generator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
