"""One backup for all workers: the chief's newest intact one, broadcast to those that lack it."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad._keras.replicas.local import place_of
from keras_paragrad.distribution.checkpoint.files import BackupFiles, DamagedBackupError, Position, Stored
from keras_paragrad.distribution.workers import gather

# A broadcast is an all-reduce; of this many bytes at a time, so that it takes no more memory than a large gradient.
CHUNK = 1 << 24

_NONE, _FOUND, _ALL_DAMAGED = range(3)


def common_backup(strategy: tf.distribute.Strategy, files: BackupFiles) -> tuple[Stored | None, list[str]]:
    """The backup to resume from, the same on every worker; every worker calls this.

    Args:
        strategy: The workers' strategy.
        files: The backups that this worker sees.

    Returns:
        The chief's newest intact backup, or `None` if no worker has any; and, on the chief, the damage to each newer
        one.

    Raises:
        DamagedBackupError: On every worker: all of the chief's are damaged, or it has none and another worker does.
            Nothing has been changed.
    """
    is_chief = place_of(strategy).worker == 0
    mine, damage = files.newest() if is_chief else (None, [])
    state = _FOUND if mine else _ALL_DAMAGED if damage else _NONE
    words = _words(mine.digest) if mine else [0] * 4
    answers = gather(strategy, np.array([state, *(mine.position if mine else (0, 0)), *words, len(files.paths())]))
    state, epoch, batch, *digest = (int(number) for number in answers[0, :7])
    if state == _ALL_DAMAGED:
        _refuse_damaged(strategy, files, damage)
    if state == _NONE:
        _refuse_if_elsewhere(files, answers[:, 7])
        return None, []
    mine = mine or _same(files, (epoch, batch), digest)
    if gather(strategy, np.array([mine is not None], np.int64)).all():
        return mine, damage
    return _from_chief(strategy, files, mine if is_chief else None, (epoch, batch)), damage


def _same(files: BackupFiles, position: tuple[int, int], digest: list[int]) -> Stored | None:
    """The chief's backup, if this worker sees it intact in its own directory."""
    for path in files.paths():
        try:
            stored = files.read(path)
        except (DamagedBackupError, OSError):
            continue
        if tuple(stored.position) == position and _words(stored.digest) == digest:
            return stored
    return None


def _words(digest: str) -> list[int]:
    return [int(word) for word in np.frombuffer(bytes.fromhex(digest), np.int64)]


def _from_chief(
    strategy: tf.distribute.Strategy, files: BackupFiles, mine: Stored | None, position: tuple[int, int]
) -> Stored:
    content = from_chief(strategy, mine.content if mine else None)
    return mine or Stored(files.directory, Position(*position), "", content)


def from_chief(strategy: tf.distribute.Strategy, content: bytes | None) -> bytes:
    """Broadcasts the chief's bytes; every worker calls this.

    Args:
        strategy: The workers' strategy.
        content: The bytes to send, on the chief; `None` on the others.

    Returns:
        The same bytes everywhere.
    """
    length = int(gather(strategy, np.array([len(content or b"")]))[0, 0])
    chunks = []
    for start in range(0, length, CHUNK):
        size = min(CHUNK, length - start)
        mine = np.zeros(-(-size // 4) * 4, np.uint8)
        if content is not None:
            mine[:size] = np.frombuffer(content, np.uint8, size, start)
        chunks.append(_sum(strategy, mine.view(np.int32)).view(np.uint8)[:size].tobytes())
    return b"".join(chunks)


def _sum(strategy: tf.distribute.Strategy, mine: np.ndarray) -> np.ndarray:
    first = place_of(strategy).first

    def shown(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        return tf.constant(mine if context.replica_id_in_sync_group == first else np.zeros_like(mine))

    return strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(shown), axis=None).numpy()


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
