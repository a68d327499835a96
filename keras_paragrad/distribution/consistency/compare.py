"""Compares descriptions of the training, and weights, between workers; an error on all workers says what differs."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import local_values
from keras_paragrad.compat.workers import gather, replica_placement
from keras_paragrad.distribution.workers import broadcast_bytes
from keras_paragrad.storage.storage import storage_of

SAME_SCRIPT = (
    " Start the same script, with the same arguments and package versions, on every worker; nothing in it may depend "
    "on the worker."
)
_MOST_DIFFERENCES = 6
_LONGEST_VALUE = 160
_MISSING = object()
# On different processors rounding differs, and weights diverge slowly: by some 1e-5 over 10^5 steps.
TOLERANCE = 1e-4
_SIGNS = np.where(np.random.default_rng(20240229).integers(0, 2, 1 << 16), 1.0, -1.0).astype(np.float32)


def check_same(
    strategy: tf.distribute.Strategy,
    description: Mapping[str, object],
    says: str = "The workers would train differently",
    advice: str = SAME_SCRIPT,
) -> None:
    """Raises the same error on every worker if their descriptions, in JSON, differ; costs one all-reduce if none does.

    The error begins with `says`, has the differences of the first worker that differs from worker 0, and ends with
    `advice`.
    """
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
    digests = gather(strategy, np.frombuffer(digest, np.int64))
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if not others:
        return
    text, worker = json.dumps(description).encode(), replica_placement(strategy).worker
    pair = [broadcast_bytes(strategy, text if worker == each else None, each) for each in (0, others[0])]
    differing = itertools.islice(differences(*map(json.loads, pair)), _MOST_DIFFERENCES)
    listed = "; ".join(f"{path}: {one} on worker 0, {other} on worker {others[0]}" for path, one, other in differing)
    also = f" Workers {', '.join(map(str, others))} differ from worker 0." if len(others) > 1 else ""
    raise ValueError(f"{says}: {listed}.{also}{advice}")


def differences(one: object, other: object, path: str = "") -> Iterator[tuple[str, str, str]]:
    """The paths at which two JSON values differ, such as `layers[2].config.units`, each with both values as text.

    Of two objects of different classes, and of two lists of different lengths, the items are not compared.
    """
    if isinstance(one, dict) and isinstance(other, dict) and one.get("class_name") == other.get("class_name"):
        for key in {**one, **other}:
            inner = f"{path}.{key}" if path else key
            yield from differences(one.get(key, _MISSING), other.get(key, _MISSING), inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (item, another) in enumerate(zip(one, other, strict=True)):
            yield from differences(item, another, f"{path}[{index}]")
    elif repr(one) != repr(other):
        yield path, _text(one), _text(other)


def _text(value: object) -> str:
    if value is _MISSING:
        return "nothing"
    if isinstance(value, list):
        text = f"[{', '.join(map(_text, value))}]"
        return text if len(text) <= _LONGEST_VALUE else f"{len(value)} items"
    return str(value.get("class_name", "given") if isinstance(value, dict) else repr(value))[:_LONGEST_VALUE]


def check_same_weights(
    strategy: tf.distribute.Strategy, model: keras.Model, when: str = "before the first step"
) -> None:
    """Raises the same error on every worker if a weight or a variable of the optimizer differs between them.

    The models must have the same structure.
    """
    variables = variables_to_compare(model)
    of_workers = gather(strategy, sketches(strategy, variables))
    where = first_difference(of_workers)
    if where is None:
        return
    variable, worker = where
    one, other = ("norm {:.7g}, checksum {:.7g}".format(*of_workers[each, variable]) for each in (0, worker))
    raise ValueError(
        f"The workers hold different weights {when}: {variables[variable].path} has {one} on worker 0, and {other} on "
        f"worker {worker}. Load or assign the same weights on every worker, and don't change the training on one of "
        "them only."
    )


def variables_to_compare(model: keras.Model) -> list[keras.Variable]:
    """The weights and the optimizer's variables that have to be the same on all workers: floats that aren't in shards.

    Weights that are not trained are compared before the first update only: some, such as the moving means of an
    unsynchronized `BatchNormalization`, differ afterwards.
    """
    optimizer = model.optimizer
    fresh = optimizer is None or not optimizer.built or int(optimizer.iterations.numpy()) == 0
    variables = list(model.variables if fresh else model.trainable_variables)
    variables += optimizer.variables if optimizer is not None else []
    return [each for each in variables if storage_of(each).is_replicated() and tf.as_dtype(each.dtype).is_floating]


def sketches(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> np.ndarray:
    """Two numbers for each variable's values on this worker: the norm, and the dot product with fixed random signs.

    The product shows what the norm doesn't: values in another order, or a step in another direction.
    """
    rows = []
    for value in local_values(strategy, variables):
        flat = np.ravel(value).astype(np.float32, copy=False)
        parts = [flat[start : start + len(_SIGNS)] for start in range(0, len(flat), len(_SIGNS))]
        # In a large variable the signs repeat, and each repetition is multiplied by another sign.
        products = [np.dot(part, _SIGNS[: len(part)]) for part in parts]
        rows.append((np.sqrt(np.dot(flat, flat)), np.dot(products, np.resize(_SIGNS, len(products)))))
    return np.array(rows, np.float64).reshape(-1, 2)


def first_difference(of_workers: np.ndarray) -> tuple[int, int] | None:
    """The indices of the first variable and worker that differ in sketches, `(workers, variables, 2)`, if any does."""
    # Not a number equals itself.
    with np.errstate(invalid="ignore"):
        relative = of_workers / (of_workers[:1, :, :1] + 1e-8)
    close = np.isclose(relative, relative[:1], rtol=0, atol=TOLERANCE, equal_nan=True).all(-1)
    indices = np.argwhere(~close.T).tolist()
    return (indices[0][0], indices[0][1]) if indices else None
