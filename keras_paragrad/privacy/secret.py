"""What a seed, or the operating system's randomness, makes: the keys of runs, and their public numbers."""

import functools
import hashlib
import secrets
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.privacy.rows import Rows

# Rounds of the hash between the secret and what is saved, so that a file helps little to guess a seed.
_ROUNDS = 100_000
# Rows of the data that tell them from others.
_LOOKED_AT = 8
# In configurations: callbacks change learning rates, and names are numbered.
_CHANGES = ("learning_rate", "name")


def seed_words(seed: int | None) -> np.ndarray:
    """Four words of 64 bits, of a seed or of the operating system's randomness."""
    if seed is None:
        return np.array([secrets.randbits(64) for _ in range(4)], np.uint64).astype(np.int64)
    return np.random.SeedSequence(seed).generate_state(4, np.uint64).astype(np.int64)


def key_words(secret: np.ndarray, salt: int) -> np.ndarray:
    """The key of a run: two words of 64 bits for its samples, and two for its noise."""
    digest = hashlib.blake2b(str(salt).encode(), key=secret.tobytes(), digest_size=32).digest()
    return np.frombuffer(digest, np.int64)


def public_number(secret: np.ndarray, *parts: Any) -> int:
    """A number of 64 bits of the parts, which tells nothing of them to those who don't know the secret."""
    hashed = hashlib.blake2b(key=_slowly_hashed(secret.tobytes()), digest_size=8)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        hashed.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(hashed.digest(), "little", signed=True)


@functools.lru_cache(maxsize=64)
def _slowly_hashed(secret: bytes) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", secret, b"keras_paragrad.privacy", _ROUNDS)


def digest_of_state(model: Any) -> bytes:
    """A digest of what the next update goes by: weights, the optimizer's count, and the learning rate."""
    hashed = hashlib.blake2b(digest_size=16)
    optimizer = model.optimizer
    for each in [*model.per_example.layer.weights, optimizer.iterations, optimizer.learning_rate]:
        hashed.update(np.ascontiguousarray(keras.ops.convert_to_numpy(each)).tobytes())
    return hashed.digest()


def described(model: Any) -> list[Any]:
    """What a model was compiled with, as far as it is plain values, in all processes the same."""
    return [_described(each) for each in (model.optimizer, *keras.tree.flatten(model.loss))]


def _described(part: Any) -> list[Any]:
    config = part.get_config() if hasattr(part, "get_config") else {}
    name = str(part) if isinstance(part, str | None) else getattr(part, "__name__", type(part).__name__)
    return [name, _plain({name: each for name, each in config.items() if name not in _CHANGES})]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [(str(name), _plain(each)) for name, each in sorted(value.items(), key=lambda item: str(item[0]))]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def digest_of_rows(rows: Rows) -> bytes:
    """A digest of some of the examples, evenly spread. Only a keyed hash of it may be saved."""
    numbers = np.unique(np.linspace(0, rows.count - 1, _LOOKED_AT).astype(np.int64))
    draws = tf.data.Dataset.from_tensors((numbers, np.ones(len(numbers), bool)))
    hashed = hashlib.blake2b(digest_size=16)
    for batch, _ in rows.taken(draws):
        for each in tf.nest.flatten(batch, expand_composites=True):
            if each is not None:
                value = keras.ops.convert_to_numpy(each)
                hashed.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return hashed.digest()
