"""The ledger of the releases that training has made. Its entries travel with the weights, and are only added to."""

import hashlib
import math
import struct
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.privacy.accounting import Updates, composed_epsilon

# Entries that a file has room for, and the 64-bit words of each: a checksum and `_FORMAT`.
ROWS, WORDS = 256, 8
# An entry's fields in order, with its event's four numbers.
_FORMAT = "<2q4dq"
# The `key_id` of an entry for updates of unknown noise.
_UNKNOWN_KEY = 1


class Event(NamedTuple):
    """One update, as the accountant sees it.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability that an example is drawn.
        truncation: The update's `truncation_probability`.
        clip_norm: The clip norm, or 0 if it is not a single number. Epsilon doesn't depend on it.
    """

    noise_multiplier: float
    sampling_rate: float
    truncation: float = 0.0
    clip_norm: float = 0.0


class Entry(NamedTuple):
    """The updates of one run: of an epoch, whose samples and noise are drawn with one key.

    Attributes:
        key_id: A keyed hash of all that the run depends on. It identifies the key, and reveals nothing of it.
        salt: A keyed hash of what the run began with. A resumed epoch finds its key by it.
        event: The noise and sampling of each of its updates.
        updates: The number of updates that were made.
    """

    key_id: int
    salt: int
    event: Event
    updates: int

    @property
    def is_unknown(self) -> bool:
        """Whether the noise and the sampling of these updates are unknown."""
        return self.key_id == _UNKNOWN_KEY

    def with_updates(self, updates: int) -> "Entry":
        """The same run after another number of updates."""
        return Entry(*self[:-1], updates)


def unknown_entry(updates: int) -> Entry:
    """An entry for weights without a known ledger, after a number of updates."""
    return Entry(_UNKNOWN_KEY, 0, Event(0.0, 1.0), updates)


class Ledger:
    """The releases that weights depend on, and digests of their values by path, if it is of layers."""

    def __init__(self, entries: Iterable[Entry] = (), values: Mapping[str, Collection[bytes]] | None = None):
        self._entries: dict[int, Entry] = {}
        self.add(entries)
        self.values = values or {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds runs, and further updates of known ones; what is added last comes last."""
        for entry in entries:
            # A folded entry stands for entries that may be known already, which must not count twice.
            for run in _FOLDED.get(entry.key_id, (entry,)):
                known = self._entries.pop(run.key_id, run)
                self._entries[run.key_id] = max(known, run, key=lambda each: each.updates)

    @property
    def has_unknown(self) -> bool:
        """Whether there are weights without a known ledger."""
        return _UNKNOWN_KEY in self._entries

    def replace_unknown(self, entries: Iterable[Entry]) -> None:
        """Replaces the unknown entry by the entries that the user states."""
        self._entries.pop(_UNKNOWN_KEY, None)
        self.add(entries)


# The entries that were folded into one row of a file, by its run.
_FOLDED: dict[int, tuple[Entry, ...]] = {}
# What the weights of a layer depend on, if private training in this process or a file changed them. A layer that shares
# or replaces its variables keeps it.
LEDGERS: "weakref.WeakKeyDictionary[keras.layers.Layer, Ledger]" = weakref.WeakKeyDictionary()
# What values depend on, by their digests: those that private training in this process began with and left, and those
# of files. Values that identify nothing depend on nothing.
RELEASED: dict[bytes, Ledger] = {b"": Ledger()}


def value_digest(variable: keras.Variable) -> bytes:
    """A digest of a variable's value and shape; empty for a single whole number, as initializers and counters have."""
    value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
    if not value.size or (float(value.flat[0]).is_integer() and (value == value.flat[0]).all()):
        return b""
    digest = hashlib.sha256(str(value.shape).encode())
    digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.digest()


def count_by_event(entries: Iterable[Entry]) -> dict[Event, int]:
    """The number of updates of each event; those that are unknown are left out."""
    counts: dict[Event, int] = {}
    for entry in entries:
        if entry.updates and not entry.is_unknown:
            counts[entry.event] = counts.get(entry.event, 0) + entry.updates
    return counts


def epsilon_of(entries: Sequence[Entry], delta: float, accountant: str) -> float:
    """Epsilon of entries together; infinite if one of them is unknown."""
    if any(entry.is_unknown for entry in entries):
        return math.inf
    parts = [
        Updates(event.noise_multiplier, event.sampling_rate, updates, event.truncation)
        for event, updates in count_by_event(entries).items()
    ]
    return composed_epsilon(parts, delta, accountant)


def dp_event(entries: Sequence[Entry]) -> Any:
    """The `dp_accounting.DpEvent` of entries."""
    import dp_accounting as dp  # pyright: ignore[reportMissingImports]

    events: list[Any] = [
        dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(event.sampling_rate, dp.GaussianDpEvent(event.noise_multiplier)), updates
        )
        for event, updates in count_by_event(entries).items()
    ]
    return dp.ComposedDpEvent(events + [dp.NonPrivateDpEvent()] * any(entry.is_unknown for entry in entries))


def table_of(entries: Sequence[Entry]) -> np.ndarray:
    """Entries as an int64 array `(ROWS, WORDS)`; the last entry is the current run's, which is never folded."""
    table = np.zeros((ROWS, WORDS), np.int64)
    for row, entry in enumerate(_fold(entries)):
        packed = _packed(entry)
        table[row] = np.frombuffer(_checksum(packed) + packed, np.int64)
    return table


def entries_of(table: np.ndarray, updates: int) -> list[Entry]:
    """Reads the entries of a table, for weights of a number of updates.

    Updates that the table lacks belong to its last entry, or are unknown if it has none or a row is damaged.
    """
    rows = [row.tobytes() for row in table if row.any()]
    intact = [row[8:] for row in rows if row[:8] == _checksum(row[8:])]
    entries: list[Entry] = []
    for packed in intact:
        run, salt, *event, made = struct.unpack(_FORMAT, packed)
        entries.append(Entry(run, salt, Event(*event), made))
    further = updates - sum(entry.updates for entry in entries)
    if len(intact) < len(rows) or (further > 0 and not entries):
        return [unknown_entry(max(0, further)), *(entry for entry in entries if not entry.is_unknown)]
    if further > 0:
        entries[-1] = entries[-1].with_updates(entries[-1].updates + further)
    return entries


def _packed(entry: Entry) -> bytes:
    return struct.pack(_FORMAT, entry.key_id, entry.salt, *entry.event, entry.updates)


def _checksum(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=8).digest()


def _fold(entries: Sequence[Entry]) -> list[Entry]:
    """Entries that fit into a file: if they are too many, one for each event, and the last one."""
    if len(entries) <= ROWS:
        return list(entries)
    *others, last = entries
    alike: dict[tuple[bool, Event], list[Entry]] = {}
    for entry in others:
        alike.setdefault((entry.is_unknown, entry.event), []).append(entry)
    if len(alike) >= ROWS:
        return [unknown_entry(sum(entry.updates for entry in others)), last]
    folded: list[Entry] = []
    for parts in alike.values():
        run = parts[0].key_id
        if len(parts) > 1:
            run = int.from_bytes(_checksum(b"".join(map(_packed, parts))), "little", signed=True)
            _FOLDED[run] = tuple(each for part in parts for each in _FOLDED.get(part.key_id, (part,)))
        folded.append(Entry(run, parts[0].salt, parts[0].event, sum(part.updates for part in parts)))
    return [*folded, last]
