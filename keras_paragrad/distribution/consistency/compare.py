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
from keras_paragrad.distribution.workers import from_chief
from keras_paragrad.storage.storage import storage_of

SAME_SCRIPT = (
    " Start the same script, with the same arguments and package versions, on every worker; nothing in it may depend "
    "on the worker."
)
_MOST_DIFFERENCES = 6
_LONGEST_VALUE = 160
_MISSING = object()


def check_same_training(strategy: tf.distribute.Strategy, description: Mapping[str, object]) -> None:
    """Raises the same error on every worker if their descriptions differ; costs one small all-reduce if none does.

    Args:
        strategy: The strategy whose workers all call this.
        description: This worker's, in JSON; see `describe_training`.
    """
    placement = replica_placement(strategy)
    if placement.workers == 1:
        return
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
    digests = gather(strategy, np.frombuffer(digest, np.int64))
    if (digests == digests[0]).all():
        return
    mine = json.dumps(description)
    of_chief = json.loads(from_chief(strategy, mine.encode() if placement.worker == 0 else None))
    named = list(itertools.islice(differences(of_chief, json.loads(mine)), _MOST_DIFFERENCES))
    reports = [json.loads(text) for text in _gather_texts(strategy, json.dumps(named).encode())]
    raise ValueError(f"The workers would train differently: {_in_words(reports)}.{SAME_SCRIPT}")


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
    """A JSON value as text, abbreviated."""
    if value is _MISSING:
        return "nothing"
    if isinstance(value, list):
        text = f"[{', '.join(map(_text, value))}]"
        return text if len(text) <= _LONGEST_VALUE else f"{len(value)} items"
    text = value.get("class_name", "given") if isinstance(value, dict) else repr(value)
    return text[:_LONGEST_VALUE]


def _gather_texts(strategy: tf.distribute.Strategy, mine: bytes) -> list[bytes]:
    """Every worker's text on all workers."""
    lengths = gather(strategy, np.array([len(mine)], np.int64))[:, 0]
    padded = np.zeros(int(lengths.max()), np.int64)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = gather(strategy, padded)
    return [row[:length].astype(np.uint8).tobytes() for row, length in zip(rows, lengths, strict=True)]


def _in_words(reports: list[list[list[str]]]) -> str:
    """The differences from worker 0, each with the workers that share it."""
    workers: dict[tuple[str, ...], list[int]] = {}
    for worker, report in enumerate(reports):
        for difference in report:
            workers.setdefault(tuple(difference), []).append(worker)
    sentences = []
    for (path, one, other), different in workers.items():
        listed = f"worker{'s' if len(different) > 1 else ''} {', '.join(map(str, different[:8]))}"
        listed += f" and {len(different) - 8} more" if len(different) > 8 else ""
        sentences.append(f"{path}: {one} on worker 0, {other} on {listed}")
    return "; ".join(sentences[: 2 * _MOST_DIFFERENCES])


# On different processors rounding differs, and weights diverge slowly: by some 1e-5 over 10^5 steps.
TOLERANCE = 1e-4
_SIGNS = np.where(np.random.default_rng(20240229).integers(0, 2, 1 << 16), 1.0, -1.0).astype(np.float32)


def sketches(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> np.ndarray:
    """Two numbers per variable: its norm, and its dot product with fixed random signs.

    A change of relative size `d` in almost any direction changes the product by about as much, so the product shows
    what the norm doesn't: values in another order, or a step in another direction.

    Args:
        strategy: The strategy that they were created under.
        variables: Keras variables; only this worker's values are read.

    Returns:
        Shape `(len(variables), 2)`, float64.
    """
    return np.array([_sketch(value) for value in local_values(strategy, variables)], np.float64).reshape(-1, 2)


def _sketch(value: np.ndarray) -> tuple[float, float]:
    """A value's norm, and its dot product with the signs.

    In a large variable the signs repeat, and each repetition is multiplied by another sign.
    """
    flat = np.asarray(value).reshape(-1).astype(np.float32, copy=False)
    size = len(_SIGNS)
    whole = len(flat) // size * size
    rows = flat[:whole].reshape(-1, size) @ _SIGNS
    product = float(np.dot(rows, _SIGNS[: len(rows)])) if len(rows) <= size else float(rows.sum())
    product += float(np.dot(flat[whole:], _SIGNS[: len(flat) - whole]))
    return float(np.sqrt(np.dot(flat, flat))), product


def first_difference(of_workers: np.ndarray) -> tuple[int, int] | None:
    """The first variable that differs between workers.

    Args:
        of_workers: Every worker's sketches: shape `(workers, variables, 2)`.

    Returns:
        The indices of the variable and of the worker, or `None` if all are the same.
    """
    norms, products = of_workers[..., 0], of_workers[..., 1]
    scale = np.where(np.isfinite(norms[:1]), norms[:1], 1.0)
    close = np.isclose(norms, norms[:1], rtol=TOLERANCE, atol=1e-12, equal_nan=True)
    close &= (np.abs(products - products[:1]) <= TOLERANCE * scale + 1e-12) | ~np.isfinite(products[:1])
    indices = np.argwhere(~close.T)
    return (int(indices[0][0]), int(indices[0][1])) if len(indices) else None


def check_same_weights(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Raises the same error on every worker if a weight or a variable of the optimizer differs between them.

    Weights created within `scope()` are the same; loading and assigning weights is up to each worker.

    Args:
        strategy: The strategy whose workers all call this, with models of the same structure.
        model: This worker's model.

    Raises:
        ValueError: A weight differs. The message gives its path, the worker, and both norms.
    """
    if replica_placement(strategy).workers == 1:
        return
    variables = variables_to_compare(model)
    of_workers = gather(strategy, sketches(strategy, variables).reshape(-1)).reshape(
        replica_placement(strategy).workers, -1, 2
    )
    refuse_if_differing(of_workers, variables)


def refuse_if_differing(
    of_workers: np.ndarray, variables: Sequence[keras.Variable], when: str = "before the first step"
) -> None:
    """Raises if a worker's sketches differ from the first worker's; `when` is the time to name in the error."""
    where = first_difference(of_workers)
    if where is None:
        return
    variable, worker = where
    (norm, product), (other_norm, other_product) = of_workers[0, variable], of_workers[worker, variable]
    details = f"norm {norm:.7g}, checksum {product:.7g}", f"norm {other_norm:.7g}, checksum {other_product:.7g}"
    path = variables[variable].path
    raise ValueError(
        f"The workers hold different weights {when}: {path} has {details[0]} on worker 0, and {details[1]} on worker "
        f"{worker}. Load or assign the same weights on every worker, and don't change the training on one of them only."
    )


def variables_to_compare(model: keras.Model) -> list[keras.Variable]:
    """The weights and the optimizer's variables that have to be the same on all workers.

    Weights that are not trained are compared before the first update only: some, such as the moving means of an
    unsynchronized `BatchNormalization`, differ afterwards. Each worker holds different shards, which aren't compared.
    """
    optimizer = model.optimizer
    fresh = optimizer is None or not optimizer.built or int(optimizer.iterations.numpy()) == 0
    variables = [*(model.variables if fresh else model.trainable_variables)]
    if optimizer is not None:
        variables += list(optimizer.variables)
    return [variable for variable in variables if _has_to_be_the_same(variable)]


def _has_to_be_the_same(variable: keras.Variable) -> bool:
    """Whether every replica holds all of a variable, and its values are floats."""
    return storage_of(variable).is_replicated() and tf.as_dtype(variable.dtype).is_floating
