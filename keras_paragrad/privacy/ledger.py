"""The ledger of the releases that training has made. Its entries travel with the weights, and are only added to."""

import hashlib
import math
import struct
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.privacy.accounting import Updates, composed_epsilon

# Entries that a file has room for, and the 64-bit words of each: a checksum and `_FORMAT`.
ROWS, WORDS = 32, 10
# An entry's fields in order, with its event's four numbers.
_FORMAT = "<4q4dq"
# The `run` of an entry for updates of unknown noise.
_UNKNOWN_RUN = 1


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
    """The updates of one run, a sequence of updates with one key.

    Attributes:
        run: A public number that identifies the key.
        salt: The key is derived from this and the model's secret.
        context: A keyed hash of the data, the optimizer and the loss; 0 without a seed.
        iterations: The optimizer's iterations when the run began.
        event: The noise and sampling of each of its updates.
        updates: The number of updates that were made.
    """

    run: int
    salt: int
    context: int
    iterations: int
    event: Event
    updates: int

    @property
    def is_unknown(self) -> bool:
        """Whether the noise and the sampling of these updates are unknown."""
        return self.run == _UNKNOWN_RUN

    def with_updates(self, updates: int) -> "Entry":
        """The same run after another number of updates."""
        return Entry(*self[:-1], updates)


def unknown_entry(updates: int) -> Entry:
    """An entry for weights without a known ledger, after a number of updates."""
    return Entry(_UNKNOWN_RUN, 0, 0, 0, Event(0.0, 1.0), updates)


class Ledger:
    """The releases that weights depend on, and digests of their values by path, if it is of layers."""

    def __init__(self, entries: Iterable[Entry] = (), values: Mapping[str, Collection[bytes]] | None = None):
        self._entries: dict[int, Entry] = {}
        self.add(entries)
        self.values = values or {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds runs, and further updates of known ones."""
        for entry in entries:
            # A merged entry stands for entries that may be known already, which must not count twice.
            for run in _MERGED.get(entry.run, (entry,)):
                known = self._entries.get(run.run)
                if known is None or known.updates < run.updates:
                    self._entries[run.run] = run

    @property
    def has_unknown(self) -> bool:
        """Whether there are weights without a known ledger."""
        return _UNKNOWN_RUN in self._entries

    def replace_unknown(self, entries: Iterable[Entry]) -> None:
        """Replaces the unknown entry by the entries that the user states."""
        self._entries.pop(_UNKNOWN_RUN, None)
        self.add(entries)


# The entries that were merged into one row of a file, by its run.
_MERGED: dict[int, tuple[Entry, ...]] = {}
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


def epsilon_of(
    entries: Iterable[Entry], delta: float, accountant: str, further: tuple[Event, int] | None = None
) -> float:
    """Epsilon of entries and further updates together; infinite if one of the entries is unknown.

    `further` is an event, and the number of such updates.
    """
    counts: dict[tuple[float, ...], int] = {}
    for entry in entries:
        if entry.is_unknown:
            return math.inf
        counts[entry.event[:3]] = counts.get(entry.event[:3], 0) + entry.updates
    if further is not None:
        event, updates = further
        counts[event[:3]] = counts.get(event[:3], 0) + updates
    parts = [Updates(noise, rate, updates, truncation) for (noise, rate, truncation), updates in counts.items()]
    return composed_epsilon(parts, delta, accountant)


def dp_event(entries: Iterable[Entry]) -> Any:
    """The `dp_accounting.DpEvent` of entries."""
    import dp_accounting as dp  # pyright: ignore[reportMissingImports]

    def event_of(entry: Entry) -> Any:
        if entry.is_unknown:
            return dp.NonPrivateDpEvent()
        update = dp.PoissonSampledDpEvent(entry.event.sampling_rate, dp.GaussianDpEvent(entry.event.noise_multiplier))
        return dp.SelfComposedDpEvent(update, entry.updates)

    return dp.ComposedDpEvent([event_of(entry) for entry in entries if entry.updates or entry.is_unknown])


def table_of(entries: Iterable[Entry]) -> np.ndarray:
    """Entries as an int64 array `(ROWS, WORDS)`; the last entry is the current run's, which is never merged."""
    table = np.zeros((ROWS, WORDS), np.int64)
    for row, entry in enumerate(_merge_to_fit(list(entries))):
        table[row] = _words(entry)
    return table


def entries_of(table: np.ndarray, updates: int) -> list[Entry]:
    """Reads the entries of a table, for weights of a number of updates.

    Updates that the table lacks belong to its last entry, or are unknown if it has none or a row is damaged.
    """
    entries, damaged = [], False
    for row in table:
        if row.any():
            entry = _entry(row)
            if np.array_equal(_words(entry), row):
                entries.append(entry)
            else:
                damaged = True
    further = updates - sum(entry.updates for entry in entries)
    if damaged or (further > 0 and not entries):
        return [unknown_entry(max(0, further)), *(entry for entry in entries if not entry.is_unknown)]
    if further > 0:
        entries[-1] = entries[-1].with_updates(entries[-1].updates + further)
    return entries


def _words(entry: Entry) -> np.ndarray:
    """A row of the table: a checksum, then the entry's fields."""
    packed = _packed(entry)
    return np.frombuffer(hashlib.blake2b(packed, digest_size=8).digest() + packed, np.int64)


def _packed(entry: Entry) -> bytes:
    run, salt, context, iterations, event, updates = entry
    return struct.pack(_FORMAT, run, salt, context, iterations, *event, updates)


def _entry(row: np.ndarray) -> Entry:
    """The entry in a row of the table, whose checksum isn't checked."""
    run, salt, context, iterations, *event, updates = struct.unpack(_FORMAT, row[1:].tobytes())
    return Entry(run, salt, context, iterations, Event(*event), updates)


def _merge_to_fit(entries: list[Entry]) -> list[Entry]:
    """Merges pairs of entries until they fit into a file: a pair with equal events, or else the first two."""
    while len(entries) > ROWS:
        *others, last = entries
        events = [entry.event for entry in others]
        first = next((index for index, event in enumerate(events) if event in events[index + 1 :]), 0)
        second = events.index(events[first], first + 1) if events[first] in events[first + 1 :] else 1
        one, other = others[first], others[second]
        entries = [entry for entry in others if entry not in (one, other)]
        entries = [_merge(one, other), *entries, last]
    return entries


def _merge(one: Entry, other: Entry) -> Entry:
    """Merges two entries into one whose epsilon is no less."""
    parts = [part for entry in (one, other) for part in _MERGED.get(entry.run, (entry,))]
    digest = hashlib.blake2b(b"".join(map(_packed, parts)), digest_size=8).digest()
    run = int.from_bytes(digest, "little", signed=True)
    noise = min(one.event.noise_multiplier, other.event.noise_multiplier)
    rate = max(one.event.sampling_rate, other.event.sampling_rate)
    clip = one.event.clip_norm if one.event.clip_norm == other.event.clip_norm else 0.0
    event = Event(noise, rate, max(one.event.truncation, other.event.truncation), clip)
    _MERGED[run] = tuple(parts)
    return Entry(run, 0, 0, 0, event, one.updates + other.updates)
