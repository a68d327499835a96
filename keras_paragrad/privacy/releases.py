"""Keeps three things consistent: the ledger, the variables that save it with the weights, and the next update's key."""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.state import record_first
from keras_paragrad.per_example.units import layer_and_sublayers
from keras_paragrad.privacy.ledger import (
    LEDGERS,
    RELEASED,
    ROWS,
    WORDS,
    Entry,
    Event,
    Ledger,
    entries_of,
    table_of,
    unknown_entry,
    value_digest,
)
from keras_paragrad.storage.storage import any_divided

_log = logging.getLogger("keras_paragrad")
_LIVE: "weakref.WeakSet[Releases]" = weakref.WeakSet()
# What the weights depend on that `fit` or a file has changed since they were recorded. This keeps the model alive: when
# a file is loaded, the ledger comes before the values.
_UNRECORDED: "dict[Releases, Iterable[Entry]]" = {}
# Rounds of the hash between the secret and what is saved, so that a file helps little to guess a seed.
_ROUNDS = 100_000
# Values of configs that don't identify training: callbacks change learning rates, and names are numbered.
_VARYING = ("learning_rate", "name")


class Releases:
    """What a private model releases: a ledger entry for each run, and a key by which its updates sample and add noise.

    A run is an epoch: updates with one key, which is a keyed hash of all that they depend on. So a key belongs to one
    sequence of updates, and only the same training has the same key. The position is the number of updates that the
    current run has made.

    Loading weights overwrites the ledger's variables, perhaps by older ones. Their entries are added to the ledger in
    memory and never replace it. Key and position are in no file, and loading never resets them, so that no noise is
    used twice.

    Args:
        model: The private model.
        updates: Number of updates of its weights, an int64 scalar.
        table: The ledger, as `table_of` writes it; int64 `(ROWS, WORDS)`.
    """

    def __init__(self, model: keras.Model, updates: keras.Variable, table: keras.Variable):
        self._model, self._updates, self._table = model, updates, table
        self.layer: keras.Model = model.per_example.layer
        self.ledger = Ledger()
        self.seed: int | None = None
        self._secret: tf.Variable | None = None
        # The current run, the one that weights were last loaded from, and how many this model has begun.
        self._run: Entry | None = None
        self._resumable_run: Entry | None = None
        self._begun = 0
        # Whether `fit` is running, which changes the weights.
        self._fitting = False
        # Digests of the weights when they were last read, by the `id` of the variable.
        self._digests: dict[int, bytes] = {}
        # What `_write` has last written: the table, the number of updates, and the position at that time.
        self._written = np.zeros((ROWS, WORDS), np.int64), 0, 0
        _LIVE.add(self)
        self.entries()

    def set_seed(self, seed: int | None) -> None:
        """Sets the seed. It takes effect when the next epoch begins."""
        self.sync()
        self.seed, self._secret, self._run = seed, None, None
        self._write()

    @property
    def secret(self) -> np.ndarray:
        """Four 64-bit words, the same on every worker."""
        if self._secret is None:
            words = [secrets.randbits(64) for _ in range(4)]
            if self.seed is not None:
                words = np.random.SeedSequence(self.seed).generate_state(4, np.uint64)
            # With several workers, TensorFlow broadcasts the chief's value to a new variable.
            self._secret = self._variable(np.array(words, np.uint64).astype(np.int64))
        return np.asarray(self._secret.numpy())

    @functools.cached_property
    def key(self) -> tf.Variable:
        """The current run's key, int64 `(4,)`."""
        return self._variable(np.zeros(4, np.int64))

    @functools.cached_property
    def position(self) -> tf.Variable:
        """Number of updates that the current run has made, an int64 scalar; each update increments it."""
        return self._variable(np.zeros((), np.int64))

    @property
    def _updates_made(self) -> int:
        return 0 if self._run is None else int(self.position.numpy())

    def entries(self) -> list[Entry]:
        """All that was released up to now."""
        # Workers gather divided weights together, and one of them alone may ask.
        workers = isinstance(self._model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if workers and any(any_divided(each.layer.weights) for each in _LIVE):
            self.sync()
        else:
            self._read()
        return list(self.ledger)

    def replace_unknown(self, entries: Iterable[Entry]) -> None:
        """Replaces the unknown entry by the entries that the user states."""
        stated = list(entries)
        ledgers = [*self._read(), *(RELEASED[digest] for digest in self._digests.values() if digest in RELEASED)]
        for ledger in [self.ledger, *(ledger for ledger in ledgers if ledger.has_unknown)]:
            ledger.replace_unknown(stated)
        self._write()

    def sync(self) -> None:
        """Adds the releases of updates and loaded weights to the ledger, and writes it to the variables."""
        table, updates, updates_made = self._table.numpy(), int(self._updates.numpy()), self._updates_made
        # Training raises both counts alike, and leaves the table alone. Otherwise, weights were loaded.
        written, written_updates, written_made = self._written
        if updates - written_updates != updates_made - written_made or not np.array_equal(table, written):
            loaded = entries_of(np.asarray(table), updates)
            self.ledger.add(loaded)
            self._resumable_run = loaded[-1] if loaded else None
            if not self._fitting:
                _UNRECORDED[self] = [*_UNRECORDED.get(self, ()), *loaded]
            self._warn_of_unknown("the loaded weights")
        self._write()

    def _write(self) -> None:
        """Writes the ledger to the variables, with the current run last.

        `entries_of` adds updates that are counted, but not in the table, to the last entry.
        """
        if self._run is not None:
            self.ledger.add([self._run.with_updates(self._updates_made)])
        entries = list(self.ledger)
        table, updates = table_of(entries), sum(entry.updates for entry in entries)
        if not np.array_equal(self._table.numpy(), table):
            self._assign(self._table, table)
        if int(self._updates.numpy()) != updates:
            self._assign(self._updates, np.int64(updates))
        self._written = table, updates, self._updates_made

    def _read(self) -> list[Ledger]:
        """Adds what all weights depend on, frozen or not, and an unknown entry for other values; returns ledgers."""
        if self._fitting:
            self.sync()
            return []
        for each in list(_LIVE):
            each.sync()
            if each in _UNRECORDED:
                each.record()
        digests = self._digests = self._compute_digests()
        ledgers: list[Ledger] = []
        unchanged: set[int] = set()
        changed: dict[str, list[keras.layers.Layer]] = {}
        for layer in self._layers():
            if (ledger := LEDGERS.get(layer)) is None:
                continue
            ledgers.append(ledger)
            for variable in layer.weights:
                digest, known = digests[id(variable)], ledger.values.get(variable.path, ())
                if digest in known:
                    unchanged.add(id(variable))
                elif known and digest not in RELEASED:
                    changed.setdefault(variable.path, []).append(layer)
        ledgers += [RELEASED[digest] for key, digest in digests.items() if key not in unchanged and digest in RELEASED]
        self.ledger.add(itertools.chain(*ledgers))
        weights = "some weights of another private model"
        if changed:
            self.ledger.add([unknown_entry(0)])
            self._set_ledgers(itertools.chain(*changed.values()), self.ledger)
            weights = f"{', '.join(changed)}, which were changed outside of fit,"
        self._warn_of_unknown(weights)
        self._write()
        return ledgers

    def record(self) -> None:
        """Remembers what the weights depend on that `fit` or a file has changed."""
        entries = list(_UNRECORDED[self])
        if not self._fitting:
            del _UNRECORDED[self]
        before, self._digests = self._digests, self._compute_digests()
        changed = {key: digest for key, digest in self._digests.items() if digest != before.get(key)}
        self._set_ledgers(
            (layer for layer in self._layers() if any(id(weight) in changed for weight in layer.weights)), entries
        )
        ledger = Ledger(entries)
        for digest in filter(None, changed.values()):
            known = RELEASED.setdefault(digest, ledger)
            # Known values that `fit` leaves were assigned within it. Those of files may have cost more than is known.
            if not self._fitting and (further := [entry for entry in entries if not (entry.is_unknown and any(known))]):
                RELEASED[digest] = Ledger([*known, *further])

    def _set_ledgers(self, layers: Iterable[keras.layers.Layer], entries: Iterable[Entry]) -> None:
        """Adds entries to what layers depend on, with their weights as they are now."""
        values: dict[str, set[bytes]] = {}
        for variable in self.layer.weights:
            values.setdefault(variable.path, set()).add(self._digests[id(variable)])
        for layer in layers:
            if total := [*LEDGERS.get(layer, ()), *entries]:
                LEDGERS[layer] = Ledger(total, values)

    def _layers(self) -> Iterator[keras.layers.Layer]:
        """The layers whose weights the model reads, the inner model among them."""
        return layer_and_sublayers(self.layer)

    def _compute_digests(self) -> dict[int, bytes]:
        return {id(variable): value_digest(variable) for variable in self.layer.weights}

    def begin_fit(self) -> None:
        """Adds the releases that the weights depend on."""
        self._read()
        known = {id(weight) for layer in self._layers() if layer in LEDGERS for weight in layer.weights}
        # Nothing that private training left. Whoever assigns the same values again assigns nothing unknown.
        for key, digest in self._digests.items():
            if key not in known:
                RELEASED.setdefault(digest, Ledger())
        self._fitting = True
        _UNRECORDED[self] = self.ledger

    def end_fit(self) -> None:
        """Records what the weights that were trained depend on."""
        self.sync()
        self.record()
        self._fitting = False
        del _UNRECORDED[self]

    def begin_epoch(self, event: Event, digest_of_data: Callable[[], bytes], skipped: int) -> None:
        """Begins a run of updates with the noise and sampling of an event, or resumes one that was interrupted.

        `skipped` is how many batches of the epoch an interrupted training has seen.
        """
        self.sync()
        secret, resumable = self.secret, self._resumable_run
        iterations = int(keras.ops.convert_to_numpy(self._model.optimizer.iterations))
        # Without a seed, no other model has this secret, and none of this one's runs is repeated.
        context = "" if self.seed is None else f"{digest_of_data()}{_describe_compile(self._model)}"

        def key_id_of(salt: int, iterations: int) -> int:
            return _keyed_hash(secret, "run", salt, event, context, iterations)

        # In the middle of an epoch, what it began with is gone, and the hash alone tells which epoch it is.
        if (
            skipped
            and self.seed is not None
            and self._run is None
            and resumable is not None
            and resumable.key_id == key_id_of(resumable.salt, iterations - resumable.updates)
        ):
            self._run = resumable
        else:
            self._begun += 1
            state = self._begun if self.seed is None else _digest_of_state(self._model)
            salt = _keyed_hash(secret, "salt", state, skipped)
            self._run = Entry(key_id_of(salt, iterations), salt, event, 0)
        self._resumable_run = None
        # Two 64-bit words for the run's samples, and two for its noise.
        key = hashlib.blake2b(str(self._run.key_id).encode(), key=secret.tobytes(), digest_size=32).digest()
        self._assign(self.key, np.frombuffer(key, np.int64))
        self._assign(self.position, np.int64(self._run.updates))
        self._write()

    def _warn_of_unknown(self, weights: str) -> None:
        """Warns once that weights were trained in an unknown way."""
        if self.ledger.has_unknown and record_first(self, "unknown"):
            _log.warning(
                "How %s were trained isn't known, so epsilon is infinite. If you know it, write private.privacy."
                "replace_unknown((noise_multiplier, sampling_rate, updates), ...), with one of these for each kind of "
                "updates, or with none if no private example had a part in them.",
                weights,
            )

    def _variable(self, value: np.ndarray) -> tf.Variable:
        """Creates a variable that is in no file: Keras doesn't track it."""
        only_first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with tf.init_scope(), self._scope():
            return tf.Variable(tf.constant(value), trainable=False, aggregation=only_first)

    def _assign(self, variable: tf.Variable | keras.Variable, value: np.ndarray | np.int64) -> None:
        with self._scope():
            variable.assign(value)

    def _scope(self) -> contextlib.AbstractContextManager[object]:
        """The scope of the model's strategy, or none if that is entered already."""
        strategy = self._model.distribute_strategy
        inside = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
        return contextlib.nullcontext() if inside else strategy.scope()


def _keyed_hash(secret: np.ndarray, *parts: Any) -> int:
    """A 64-bit hash that reveals nothing of the parts without the secret."""
    digest = hashlib.blake2b(key=_stretch(secret.tobytes()), digest_size=8)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(digest.digest(), "little", signed=True)


@functools.lru_cache(maxsize=64)
def _stretch(secret: bytes) -> bytes:
    """A key that takes long to compute from a guessed secret."""
    return hashlib.pbkdf2_hmac("sha256", secret, b"keras_paragrad.privacy", _ROUNDS)


def _digest_of_state(model: keras.Model) -> bytes:
    """A digest of what the gradients and the noise of the next update depend on, data and loss aside."""
    digest = hashlib.blake2b(digest_size=16)
    layer = model.per_example
    digest.update(repr((layer.clip, layer.expected_batch_size)).encode())
    digest.update(bytes(weight.trainable for weight in layer.layer.weights))
    # The variables have the seeds of dropout, too.
    norm = 0.0 if layer.state is None else layer.state.norm
    for value in [*layer.layer.variables, norm, model.optimizer.learning_rate]:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(value)).tobytes())
    return digest.digest()


def _describe_compile(model: keras.Model) -> list[str]:
    """The optimizer and the losses as text that is the same in all processes."""
    return [_describe(component) for component in (model.optimizer, *keras.tree.flatten(model.loss))]


def _describe(component: Any) -> str:
    """The name and the config of an optimizer or a loss, which may also be a function or a name."""
    config = component.get_config() if hasattr(component, "get_config") else {}
    is_name = isinstance(component, str | None)
    name = str(component) if is_name else getattr(component, "__name__", type(component).__name__)
    identifying = {key: value for key, value in config.items() if key not in _VARYING}
    return name + json.dumps(identifying, sort_keys=True, default=lambda value: type(value).__name__)
