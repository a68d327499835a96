"""One backup for all workers: the chief's newest intact one, broadcast to those that lack it."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import place_of
from keras_paragrad.distribution.checkpoint.content import files_of_shards
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position, Stored
from keras_paragrad.distribution.checkpoint.manifest import words_of
from keras_paragrad.distribution.checkpoint.shards import locate
from keras_paragrad.distribution.workers import from_chief, gather

_NONE, _FOUND, _ALL_DAMAGED = range(3)


def common_backup(strategy: tf.distribute.Strategy, files: BackupFiles) -> tuple[Stored | None, list[str]]:
    """The backup to resume from, the same on every worker; every worker calls this.

    Args:
        strategy: The workers' strategy.
        files: The backups that this worker sees.

    Returns:
        The chief's newest intact backup, whose shards are intact too, or `None` if no worker has any; and, on the
        chief, the damage to each newer one.

    Raises:
        DamagedBackupError: On every worker: all of the chief's are damaged, or it has none and another worker does.
            Nothing has been changed.
    """
    damage: list[str] = []
    before = None
    while stored := _newest(strategy, files, before, damage):
        shards = files_of_shards(stored.content)
        reader, reason = locate(strategy, files.directory, shards) if shards else (None, "")
        if reader or not shards:
            return Stored(*stored[:-1], reader), damage
        damage.append(f"{stored.path}: {reason}")
        before = stored.position
    return None, damage


def _newest(
    strategy: tf.distribute.Strategy, files: BackupFiles, before: Position | None, damage: list[str]
) -> Stored | None:
    """The chief's newest intact backup before a position, on all workers; the damage of others is noted."""
    is_chief = place_of(strategy).worker == 0
    mine, found = files.newest(before) if is_chief else (None, [])
    damage += found
    state = _FOUND if mine else _ALL_DAMAGED if damage else _NONE
    words = words_of(mine.digest) if mine else [0] * 4
    answers = gather(strategy, np.array([state, *(mine.position if mine else (0, 0)), *words, len(files.paths())]))
    state, epoch, batch, *digest = (int(number) for number in answers[0, :7])
    if state == _ALL_DAMAGED:
        _refuse_damaged(strategy, files, damage if is_chief else [])
    if state == _NONE:
        _refuse_if_elsewhere(files, answers[:, 7])
        return None
    mine = mine or _same(files, (epoch, batch), digest)
    if gather(strategy, np.array([mine is not None], np.int64)).all():
        return mine
    return _from_chief(strategy, files, mine if is_chief else None, (epoch, batch))


def _same(files: BackupFiles, position: tuple[int, int], digest: list[int]) -> Stored | None:
    """The chief's backup, if this worker sees it intact in its own directory."""
    for path in files.paths():
        try:
            stored = files.read(path)
        except (DamagedBackupError, OSError):
            continue
        if tuple(stored.position) == position and words_of(stored.digest) == digest:
            return stored
    return None


def _from_chief(
    strategy: tf.distribute.Strategy, files: BackupFiles, mine: Stored | None, position: tuple[int, int]
) -> Stored:
    content = from_chief(strategy, mine.content if mine else None)
    return mine or Stored(files.directory, Position(*position), "", content)


def _refuse_damaged(strategy: tf.distribute.Strategy, files: BackupFiles, damage: list[str]) -> None:
    said = from_chief(strategy, "; ".join(damage).encode() if damage else None).decode()
    raise DamagedBackupError(
        f"None of the backups in {files.directory} is intact, and nothing has been changed. {said}. Restore a good "
        "copy there, or move the directory away to start from scratch."
    )


def _refuse_if_elsewhere(files: BackupFiles, counts: Any) -> None:
    holders = [f"worker {worker} sees {count}" for worker, count in enumerate(counts) if worker and count]
    if holders:
        raise DamagedBackupError(
            f"The chief, worker 0, sees no backup in {files.directory}, but {', '.join(holders)}. Training would start "
            "from scratch: use the same directory on all workers, copy the backups to the chief, or remove them."
        )
