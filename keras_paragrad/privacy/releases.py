"""Keeps the ledger, the variables that carry it with the weights, and the key of the next update in step."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.privacy.ledger import (
    ROWS,
    WORDS,
    Entry,
    Event,
    digest_of,
    entries_of,
    known_entries,
    ledger_of,
    remember,
    table_of,
    unknown,
)
from keras_paragrad.privacy.secret import described, digest_of_state, key_words, public_number, seed_words

_log = logging.getLogger("keras_paragrad")
# How many updates a run has made in this process, and what each epoch of it began with, if it has a seed.
_MADE: dict[int, int] = {}
_BEGUN: dict[tuple[int, int], bytes] = {}


class Releases:
    """What a private model releases: an entry for each run, of which each update has noise of its own.

    The ledger's variables are replaced whenever weights are loaded, and by older ones if the weights are. What they say
    is then added to what is known, and never takes its place. Sampling and noise go by a key and a position that no
    file holds, and that no load takes back.

    Args:
        model: The private model.
        updates: How many updates its weights have behind them: an int64 scalar, counted by each update.
        table: The ledger, as `table_of` writes it; an int64 `(ROWS, WORDS)`.

    Attributes:
        key: The words of the run's key, int64 `(4,)`.
        position: How many updates of the run were made, an int64 scalar, counted by each update.
    """

    def __init__(self, model: Any, updates: keras.Variable, table: keras.Variable):
        self._model, self._updates, self._table = model, updates, table
        self.ledger = ledger_of(model.per_example.layer)
        self.ledger.add(self._known_of_weights())
        self.seed: int | None = None
        self._secret: tf.Variable | None = None
        self._key: tf.Variable | None = None
        self._position: tf.Variable | None = None
        # The run that goes on, and what the weights were last taken from.
        self._run: Entry | None = None
        self._loaded: Entry | None = None
        self._foreign = self._warned = False
        self._at_begin: dict[int, bytes] = {}
        self._written = np.zeros((ROWS, WORDS), np.int64), 0, 0

    def set_seed(self, seed: int | None) -> None:
        """Draws keys by another secret from the next epoch on."""
        self.sync()
        if self._run is not None:
            self._loaded = self._run.with_updates(self._made)
        self.seed, self._secret, self._run = seed, None, None

    @property
    def secret(self) -> np.ndarray:
        """Four words of 64 bits, the same on every worker."""
        if self._secret is None:
            # With several workers, TensorFlow gives a new variable the chief's value everywhere.
            self._secret = self._variable(seed_words(self.seed))
        return np.asarray(self._secret.numpy())

    @property
    def key(self) -> tf.Variable:
        """The words of the run's key."""
        if self._key is None:
            self._key = self._variable(np.zeros(4, np.int64))
        return self._key

    @property
    def position(self) -> tf.Variable:
        """How many updates of the run were made."""
        if self._position is None:
            self._position = self._variable(np.zeros((), np.int64))
        return self._position

    @property
    def _made(self) -> int:
        return 0 if self._position is None else int(self._position.numpy())

    def entries(self) -> list[Entry]:
        """All that was released, up to now."""
        self.sync()
        return list(self.ledger)

    def replace_unknown(self, entries: Iterable[Entry]) -> None:
        """Replaces what nothing is known of by what the user states."""
        self.sync()
        self.ledger.replace_unknown(entries)
        self._write()

    def sync(self) -> None:
        """Adds what updates and loaded weights have brought to the ledger, and writes it to the variables."""
        table, updates, made = self._table.numpy(), int(self._updates.numpy()), self._made
        if self._run is not None:
            self._count(made)
        written, at_updates, at_made = self._written
        if updates - at_updates != made - at_made or not np.array_equal(table, written):
            loaded = entries_of(np.asarray(table), updates)
            self.ledger.add(loaded)
            self._loaded, self._foreign = loaded[-1] if loaded else None, True
            self._warn_of_unknown("the loaded weights")
        self._write()

    def _count(self, made: int) -> None:
        assert self._run is not None, "asked for within a run"
        if made > 0:
            self.ledger.add([self._run.with_updates(made)])
        _MADE[self._run.run] = max(made, _MADE.get(self._run.run, 0))

    def _write(self) -> None:
        """Has the variables say what the ledger does, with the run that goes on last."""
        known = {entry.run: entry for entry in self.ledger}
        last = self._run and self._run.with_updates(self._made)
        if last is None and self._loaded is not None:
            last = known.get(self._loaded.run)
        entries = [entry for entry in known.values() if last is None or entry.run != last.run]
        entries += [last] if last is not None else []
        table, updates = table_of(entries), sum(entry.updates for entry in entries)
        if not np.array_equal(self._table.numpy(), table):
            self._assign(self._table, table)
        if int(self._updates.numpy()) != updates:
            self._assign(self._updates, np.int64(updates))
        self._written = table, updates, self._made

    def begin_fit(self) -> None:
        """Looks for weights that were changed since the last `fit`, and for what is known of them."""
        self.sync()
        left, digests = self.ledger.left, self._digests()
        self._at_begin = digests
        changed = {key: each for key, each in digests.items() if left is None or left.get(key, each) != each}
        known = {key: known_entries(each) for key, each in changed.items()}
        for entries in known.values():
            self.ledger.add(entries or ())
        if left is not None and None in known.values() and not self._foreign:
            self.ledger.add([unknown(0)])
            variables = self._model.per_example.layer.trainable_variables
            names = [each.path for each in variables if known.get(id(each), ()) is None]
            self._warn_of_unknown(f"{', '.join(names)}, which were changed outside of fit,")
        if left is None:
            remember(digests.values(), self.ledger)
        self._write()

    def end_fit(self) -> None:
        """Notes what the weights are now, so that they are known where they are found."""
        self.sync()
        before, self.ledger.left, self._foreign = self._at_begin, self._digests(), False
        remember([each for key, each in self.ledger.left.items() if each != before.get(key)], self.ledger)

    def _digests(self) -> dict[int, bytes]:
        variables = self._model.per_example.layer.trainable_variables
        return {id(variable): digest_of(variable) for variable in variables}

    def begin_epoch(self, event: Event, digest_of_data: Callable[[], bytes]) -> tuple[int, int]:
        """Goes on with a run, or begins one.

        Args:
            event: What an update will release.
            digest_of_data: Returns what tells the data from others.

        Returns:
            The number of the run's next update, and how many from there on are counted, as this model has made the same
            before.
        """
        self.sync()
        secret = self.secret
        # Without a seed, the secret is this model's alone, and no other can take updates of its runs.
        context, state = 0, None
        if self.seed is not None:
            context = public_number(secret, "context", digest_of_data(), described(self._model))
            state = digest_of_state(self._model)
        iterations = int(keras.ops.convert_to_numpy(self._model.optimizer.iterations))
        for run in self._candidates(iterations):
            if self._goes_on(run, event, context, state):
                break
        else:
            run = self._new_run(event, context, iterations, state)
        self._begin(run)
        if state is not None:
            _BEGUN.setdefault((run.run, run.updates), state)
        counted = max((entry.updates for entry in self.ledger if entry.run == run.run), default=0)
        return run.updates, max(0, counted - run.updates)

    def _candidates(self, iterations: int) -> Iterator[Entry]:
        """The runs that may go on: what loaded weights were taken from, with the optimizer's state, or that before."""
        loaded = self._loaded
        if loaded is not None and loaded.iterations + loaded.updates == iterations:
            yield loaded
        if self._run is not None:
            yield self._run.with_updates(self._made)

    def _goes_on(self, run: Entry, event: Event, context: int, state: bytes | None) -> bool:
        """Whether the next update may be the run's."""
        if (run.event, run.context) != (event, context) or run.run != public_number(self.secret, "run", run.salt):
            return False
        if self._run is None and state is not None:
            # Of a run that was broken off, this model has made none of the updates yet.
            return _BEGUN.get((run.run, run.updates), state) == state
        return _is_free(run.run, run.updates, state)

    def _new_run(self, event: Event, context: int, iterations: int, state: bytes | None) -> Entry:
        """A run that is derived from all that it goes by, so that the same training has the same key, and no other."""
        released = [tuple(entry) for entry in self.ledger if entry.updates]
        attempt = 0
        while True:
            salt = public_number(self.secret, "salt", event, context, iterations, released, state, attempt)
            number = public_number(self.secret, "run", salt)
            if _is_free(number, 0, state):
                return Entry(number, salt, context, iterations, event, 0)
            attempt += 1

    def _begin(self, run: Entry) -> None:
        self._loaded = None
        if self._run is not None and (self._run.run, self._made) == (run.run, run.updates):
            return
        self._run = run
        self._assign(self.key, key_words(self.secret, run.salt))
        self._assign(self.position, np.int64(run.updates))
        self._write()

    def _known_of_weights(self) -> list[Entry]:
        return [entry for digest in self._digests().values() for entry in known_entries(digest) or ()]

    def _warn_of_unknown(self, what: str) -> None:
        if self.ledger.unknown is not None and not self._warned:
            self._warned = True
            _log.warning(
                "How %s were trained isn't known, so epsilon is infinite. If you know it, write private.privacy."
                "replace_unknown((noise_multiplier, sampling_rate, updates), ...), with one of these for each kind of "
                "updates, or with none if no private example had a part in them.",
                what,
            )

    def _variable(self, value: np.ndarray) -> tf.Variable:
        """A variable of no file: outside of Keras's tracking."""
        only_first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with tf.init_scope(), self._scope():
            return tf.Variable(tf.constant(value), trainable=False, aggregation=only_first)

    def _assign(self, variable: Any, value: Any) -> None:
        with self._scope():
            variable.assign(value)

    def _scope(self) -> Any:
        strategy = self._model.distribute_strategy
        inside = tf.distribute.has_strategy() or strategy is tf.distribute.get_strategy()
        return contextlib.nullcontext() if inside else strategy.scope()


def _is_free(run: int, update: int, state: bytes | None) -> bool:
    """Whether an update of a run wasn't made in this process, but by the same training, begun anew."""
    return update >= _MADE.get(run, 0) or (state is not None and _BEGUN.get((run, update)) == state)
