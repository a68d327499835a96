"""The ledger: what was released of the examples, in entries that travel with the weights and are never taken back."""

import hashlib
import math
import struct
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.privacy.accounting.accountants import Updates
from keras_paragrad.privacy.accounting.composition import composed_epsilon

# Entries that a file has room for, and the words of 64 bits of each.
ROWS, WORDS = 32, 10
_FORM = "<4q4dq"
_UNKNOWN = 1


class Event(NamedTuple):
    """What an update releases.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in units of the clip norm.
        sampling_rate: Probability of each example to be drawn.
        truncation: What `truncation_probability` says of an update.
        clip_norm: What gradients are clipped to, or 0 if that is not one number.
    """

    noise_multiplier: float
    sampling_rate: float
    truncation: float = 0.0
    clip_norm: float = 0.0


class Entry(NamedTuple):
    """The updates of one run: a key takes each of them once, in order.

    Attributes:
        run: A public number of the key.
        salt: What the key was derived with, by the secret of the model.
        context: A keyed hash of the data, the optimizer and the loss; 0 without a seed.
        iterations: The optimizer's count when the run began.
        event: What each update released.
        updates: How many were made.
    """

    run: int
    salt: int
    context: int
    iterations: int
    event: Event
    updates: int

    @property
    def is_unknown(self) -> bool:
        """Whether nothing is known of these updates."""
        return self.run == _UNKNOWN

    def with_updates(self, updates: int) -> "Entry":
        """The same run, with another number of updates."""
        return Entry(*self[:-1], updates)


def unknown(updates: int) -> Entry:
    """An entry for weights that nothing is known of."""
    return Entry(_UNKNOWN, 0, 0, 0, Event(0.0, 1.0), updates)


class Ledger:
    """What the weights of a model have released. It only grows.

    Attributes:
        left: Digests of the trainable variables as the last `fit` left them, by `id`, or `None` before one.
    """

    def __init__(self):
        self._entries: dict[int, Entry] = {}
        self.left: dict[int, bytes] | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entries: Iterable[Entry]) -> None:
        """Adds what isn't known yet: of a run that is, updates beyond those that are counted."""
        for entry in entries:
            for each in _FOLDED.get(entry.run, (entry,)):
                known = self._entries.get(each.run)
                if known is None or known.updates < each.updates:
                    self._entries[each.run] = each

    @property
    def unknown(self) -> Entry | None:
        """The entry for weights that nothing is known of, if there are any."""
        return self._entries.get(_UNKNOWN)

    def replace_unknown(self, entries: Iterable[Entry]) -> None:
        """Replaces what nothing was known of by what the user states."""
        self._entries.pop(_UNKNOWN, None)
        self.add(entries)


# The ledger of a model's weights, which several private models may train.
_LEDGERS: "weakref.WeakKeyDictionary[keras.Model, Ledger]" = weakref.WeakKeyDictionary()
# What weights had released when a private fit first met them, or left them, in this process; by a digest of each.
_KNOWN: dict[bytes, tuple[Entry, ...]] = {}
# Entries that one row of a file stands for, by its run.
_FOLDED: dict[int, tuple[Entry, ...]] = {}


def ledger_of(model: keras.Model) -> Ledger:
    """The ledger of the model's weights."""
    return _LEDGERS.setdefault(model, Ledger())


def digest_of(variable: keras.Variable) -> bytes:
    """A digest of a variable's value and shape."""
    value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
    return hashlib.blake2b(value.tobytes(), digest_size=16, salt=str(value.shape).encode()[-16:]).digest()


def remember(digests: Iterable[bytes], entries: Iterable[Entry]) -> None:
    """Notes what variables have released, for when they are met in another model."""
    released = tuple(entries)
    for digest in digests:
        _KNOWN.setdefault(digest, released)


def known_entries(digest: bytes) -> tuple[Entry, ...] | None:
    """What a variable with this digest has released, or `None` if that isn't known."""
    return _KNOWN.get(digest)


def epsilon_of(
    entries: Iterable[Entry], delta: float, accountant: str, further: tuple[Event, int] | None = None
) -> float:
    """Epsilon of entries together, and of further updates; infinite if nothing is known of some."""
    counts: dict[tuple[float, ...], int] = {}
    for entry in entries:
        if entry.is_unknown:
            return math.inf
        counts[entry.event[:3]] = counts.get(entry.event[:3], 0) + entry.updates
    if further is not None:
        event, updates = further
        counts[event[:3]] = counts.get(event[:3], 0) + updates
    parts = [Updates(noise, rate, updates, cut) for (noise, rate, cut), updates in counts.items()]
    return composed_epsilon(parts, delta, accountant)


def dp_event(entries: Iterable[Entry]) -> Any:
    """Entries as an event of dp-accounting."""
    import dp_accounting as dp  # pyright: ignore[reportMissingImports]

    def of(entry: Entry) -> Any:
        if entry.is_unknown:
            return dp.NonPrivateDpEvent()
        update = dp.PoissonSampledDpEvent(entry.event.sampling_rate, dp.GaussianDpEvent(entry.event.noise_multiplier))
        return dp.SelfComposedDpEvent(update, entry.updates)

    return dp.ComposedDpEvent([of(entry) for entry in entries if entry.updates or entry.is_unknown])


def table_of(entries: Iterable[Entry]) -> np.ndarray:
    """Entries as int64 `(ROWS, WORDS)`, the last of which is that of the run that goes on."""
    table = np.zeros((ROWS, WORDS), np.int64)
    for row, entry in enumerate(_folded(list(entries))):
        table[row] = _words(entry)
    return table


def entries_of(table: np.ndarray, updates: int) -> list[Entry]:
    """The entries of a table.

    Args:
        table: What `table_of` returned, or what has become of it.
        updates: How many updates the weights have behind them. Those that the table lacks are of its last entry, or
            unknown if it has none.
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
        return [unknown(max(0, further)), *(entry for entry in entries if not entry.is_unknown)]
    if further > 0:
        entries[-1] = entries[-1].with_updates(entries[-1].updates + further)
    return entries


def _words(entry: Entry) -> np.ndarray:
    packed = _packed(entry)
    return np.frombuffer(hashlib.blake2b(packed, digest_size=8).digest() + packed, np.int64)


def _packed(entry: Entry) -> bytes:
    run, salt, context, iterations, event, updates = entry
    return struct.pack(_FORM, run, salt, context, iterations, *event, updates)


def _entry(row: np.ndarray) -> Entry:
    run, salt, context, iterations, *event, updates = struct.unpack(_FORM, row[1:].tobytes())
    return Entry(run, salt, context, iterations, Event(*event), updates)


def _folded(entries: list[Entry]) -> list[Entry]:
    """As many entries as there is room for: those of equal updates are put together, or else the first ones."""
    while len(entries) > ROWS:
        *others, last = entries
        events = [entry.event for entry in others]
        first = next((place for place, event in enumerate(events) if event in events[place + 1 :]), 0)
        second = events.index(events[first], first + 1) if events[first] in events[first + 1 :] else 1
        one, other = others[first], others[second]
        entries = [entry for entry in others if entry not in (one, other)]
        entries = [_together(one, other), *entries, last]
    return entries


def _together(one: Entry, other: Entry) -> Entry:
    """One entry for two, which costs no less."""
    parts = [each for entry in (one, other) for each in _FOLDED.get(entry.run, (entry,))]
    number = hashlib.blake2b(b"".join(map(_packed, parts)), digest_size=8).digest()
    run = int.from_bytes(number, "little", signed=True)
    noise = min(one.event.noise_multiplier, other.event.noise_multiplier)
    rate = max(one.event.sampling_rate, other.event.sampling_rate)
    clip = one.event.clip_norm if one.event.clip_norm == other.event.clip_norm else 0.0
    event = Event(noise, rate, max(one.event.truncation, other.event.truncation), clip)
    _FOLDED[run] = tuple(parts)
    return Entry(run, 0, 0, 0, event, one.updates + other.updates)
