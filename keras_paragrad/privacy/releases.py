"""Keeps three things consistent: the ledger, the variables that save it with the weights, and the next update's key."""

import contextlib
import functools
import hashlib
import itertools
import logging
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

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
# Updates that each run has made in this process; and, with a seed, the state before the update at which an epoch began.
_UPDATES_MADE: dict[int, int] = {}
_STATE_BEFORE: dict[tuple[int, int], bytes] = {}
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

    A run is a sequence of updates with one key, which is derived from a secret and the run's salt. The position is the
    number of updates that the current run has made.

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
        self._key: tf.Variable | None = None
        self._position: tf.Variable | None = None
        # The current run, and the one that weights were last loaded from.
        self._run: Entry | None = None
        self._loaded: Entry | None = None
        # Whether `fit` is running, which changes the weights.
        self._fitting = False
        self._warned = False
        # Digests of the weights when they were last read, by the `id` of the variable.
        self._digests: dict[int, bytes] = {}
        # What `_write` has last written: the table, the number of updates, and the position at that time.
        self._written = np.zeros((ROWS, WORDS), np.int64), 0, 0
        _LIVE.add(self)
        self.entries()

    def set_seed(self, seed: int | None) -> None:
        """Derives keys from another secret from the next epoch on."""
        self.sync()
        if self._run is not None:
            # With the same seed, the run may continue.
            self._loaded = self._run.with_updates(self._updates_made)
        self.seed, self._secret, self._run = seed, None, None

    @property
    def secret(self) -> np.ndarray:
        """Four 64-bit words, the same on every worker."""
        if self._secret is None:
            # With several workers, TensorFlow broadcasts the chief's value to a new variable.
            self._secret = self._variable(_secret_words(self.seed))
        return np.asarray(self._secret.numpy())

    @property
    def key(self) -> tf.Variable:
        """The current run's key, int64 `(4,)`."""
        if self._key is None:
            self._key = self._variable(np.zeros(4, np.int64))
        return self._key

    @property
    def position(self) -> tf.Variable:
        """Number of updates that the current run has made, an int64 scalar; each update increments it."""
        if self._position is None:
            self._position = self._variable(np.zeros((), np.int64))
        return self._position

    @property
    def _updates_made(self) -> int:
        return 0 if self._position is None else int(self._position.numpy())

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
        if (run := self._run) is not None:
            if updates_made > 0:
                self.ledger.add([run.with_updates(updates_made)])
            _UPDATES_MADE[run.run] = max(updates_made, _UPDATES_MADE.get(run.run, 0))
        # Training raises both counts alike, and leaves the table alone. Otherwise, weights were loaded.
        written, written_updates, written_made = self._written
        if updates - written_updates != updates_made - written_made or not np.array_equal(table, written):
            loaded = entries_of(np.asarray(table), updates)
            self.ledger.add(loaded)
            self._loaded = loaded[-1] if loaded else None
            if not self._fitting:
                _UNRECORDED[self] = [*_UNRECORDED.get(self, ()), *loaded]
            self._warn_of_unknown("the loaded weights")
        self._write()

    def _write(self) -> None:
        """Writes the ledger to the variables, with the current run last, or else the run that weights were loaded from.

        `entries_of` adds updates that are counted, but not in the table, to the last entry.
        """
        known = {entry.run: entry for entry in self.ledger}
        last = self._run and self._run.with_updates(self._updates_made)
        if last is None and self._loaded is not None:
            last = known.get(self._loaded.run)
        entries = [entry for entry in known.values() if last is None or entry.run != last.run]
        entries += [last] if last is not None else []
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

    def begin_epoch(self, event: Event, digest_of_data: Callable[[], bytes]) -> tuple[int, int]:
        """Continues the current run, or starts one, for updates with the noise and sampling of an event.

        Returns the number of the run's next update, and how many from there on are in the ledger already, as this model
        has made the same ones before.
        """
        self.sync()
        secret = self.secret
        # Without a seed, no other model has this secret, so none can repeat updates of its runs.
        context, state = 0, None
        if self.seed is not None:
            context = _keyed_hash(secret, "context", digest_of_data(), _describe_compile(self._model))
            state = _digest_of_state(self._model)
        iterations = int(keras.ops.convert_to_numpy(self._model.optimizer.iterations))
        for run in self._candidates(iterations):
            if self._continues(run, event, context, state):
                break
        else:
            run = self._new_run(event, context, iterations, state)
        self._begin(run)
        if state is not None:
            _STATE_BEFORE.setdefault((run.run, run.updates), state)
        accounted = max((entry.updates for entry in self.ledger if entry.run == run.run), default=0)
        return run.updates, max(0, accounted - run.updates)

    def _candidates(self, iterations: int) -> Iterator[Entry]:
        """Runs that may continue: the one that weights and optimizer were loaded from, or the current one."""
        loaded = self._loaded
        if loaded is not None and loaded.iterations + loaded.updates == iterations:
            yield loaded
        if self._run is not None:
            yield self._run.with_updates(self._updates_made)

    def _continues(self, run: Entry, event: Event, context: int, state: bytes | None) -> bool:
        """Whether the next update may belong to a run: its settings and secret are the same, and its key is unused."""
        if (run.event, run.context) != (event, context) or run.run != _keyed_hash(self.secret, "run", run.salt):
            return False
        if self._run is None and state is not None:
            # An interrupted run to which this model has added no update.
            return _STATE_BEFORE.get((run.run, run.updates), state) == state
        return _is_unused(run.run, run.updates, state)

    def _new_run(self, event: Event, context: int, iterations: int, state: bytes | None) -> Entry:
        """A run whose key is derived from all that training depends on: only the same training has the same key."""
        released = [tuple(entry) for entry in self.ledger if entry.updates]
        attempt = 0
        while True:
            salt = _keyed_hash(self.secret, "salt", event, context, iterations, released, state, attempt)
            number = _keyed_hash(self.secret, "run", salt)
            if _is_unused(number, 0, state):
                return Entry(number, salt, context, iterations, event, 0)
            attempt += 1

    def _begin(self, run: Entry) -> None:
        """Makes a run the current one, with its key and position."""
        self._loaded = None
        if self._run is not None and (self._run.run, self._updates_made) == (run.run, run.updates):
            return
        self._run = run
        self._assign(self.key, _derive_key(self.secret, run.salt))
        self._assign(self.position, np.int64(run.updates))
        self._write()

    def _warn_of_unknown(self, weights: str) -> None:
        """Warns once that weights were trained in an unknown way."""
        if self.ledger.has_unknown and not self._warned:
            self._warned = True
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


def _is_unused(run: int, update: int, state: bytes | None) -> bool:
    """Whether this process hasn't made an update of a run, or made it from the same state, which repeats it exactly."""
    return update >= _UPDATES_MADE.get(run, 0) or (state is not None and _STATE_BEFORE.get((run, update)) == state)


def _secret_words(seed: int | None) -> np.ndarray:
    """Four 64-bit words, from a seed or the operating system's randomness."""
    if seed is None:
        return np.array([secrets.randbits(64) for _ in range(4)], np.uint64).astype(np.int64)
    return np.random.SeedSequence(seed).generate_state(4, np.uint64).astype(np.int64)


def _derive_key(secret: np.ndarray, salt: int) -> np.ndarray:
    """A run's key: two 64-bit words for its samples, and two for its noise."""
    digest = hashlib.blake2b(str(salt).encode(), key=secret.tobytes(), digest_size=32).digest()
    return np.frombuffer(digest, np.int64)


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
    """A digest of what gradients and noise of the next update depend on, data and loss aside; variables have seeds."""
    digest = hashlib.blake2b(digest_size=16)
    layer, optimizer = model.per_example, model.optimizer
    digest.update(repr((layer.clip, layer.expected_batch_size)).encode())
    digest.update(bytes(weight.trainable for weight in layer.layer.weights))
    norm = 0.0 if layer.state is None else layer.state.norm
    for value in [*layer.layer.variables, norm, optimizer.iterations, optimizer.learning_rate]:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(value)).tobytes())
    return digest.digest()


def _describe_compile(model: keras.Model) -> list[object]:
    """The optimizer and the losses as plain values, equal in all processes."""
    return [_describe(component) for component in (model.optimizer, *keras.tree.flatten(model.loss))]


def _describe(component: Any) -> list[object]:
    """The name and the config of an optimizer or a loss, which may also be a function or a name."""
    config = component.get_config() if hasattr(component, "get_config") else {}
    is_name = isinstance(component, str | None)
    name = str(component) if is_name else getattr(component, "__name__", type(component).__name__)
    return [name, _plain({name: value for name, value in config.items() if name not in _VARYING})]


def _plain(value: object) -> object:
    """A value of a config as plain values: dictionaries as sorted pairs, objects as the names of their classes."""
    if isinstance(value, dict):
        return [(str(name), _plain(item)) for name, item in sorted(value.items(), key=lambda item: str(item[0]))]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
