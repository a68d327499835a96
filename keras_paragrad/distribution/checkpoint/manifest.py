"""The name and the first line of a backup, which identify a file as one."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT = 2
# A backup with sharded variables, in further files.
FORMAT_OF_SHARDS = 3
# Most bytes read from a file that may not be a backup; manifests are far shorter.
_LONGEST = 1024
_NAME = re.compile(r"epoch-(\d{6,18})-batch-(\d{10,18})\.backup(?:\.(?:partial|damaged)(?:-\d+)?)?")


class Position(NamedTuple):
    """The position of training.

    Attributes:
        epoch: The epoch to resume in, counted from 0.
        batch: Number of batches of that epoch trained on.
    """

    epoch: int
    batch: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, after {self.batch} batches" if self.batch else f"epoch {self.epoch + 1}"


def backup_name(position: Position) -> str:
    """The file name of the backup of a position."""
    return f"epoch-{position.epoch:06d}-batch-{position.batch:010d}.backup"


def position_of(path: Path) -> Position | None:
    """The position in the name of a complete, partial or damaged backup; `None` for any other name."""
    match = _NAME.fullmatch(path.name)
    position = match and Position(int(match[1]), int(match[2]))
    return position if position and path.name.startswith(backup_name(position)) else None


def digest_words(digest: str) -> list[int]:
    """A SHA-256 as four integers, which workers can exchange."""
    return [int(word) for word in np.frombuffer(bytes.fromhex(digest), np.int64)]


def make_manifest(position: Position, content: bytes, shards: str = "") -> bytes:
    """The first line of a backup, with the key of its shards if it has any."""
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


def _line(described: dict[str, Any], content: bytes) -> bytes:
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(content)
    return json.dumps({**described, "sha256": digest.hexdigest()}).encode() + b"\n"
