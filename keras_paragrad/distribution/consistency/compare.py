"""Compares descriptions of the training between workers, with one error on all that names the path that differs."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.distribution.workers import from_chief, gather

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
    reports = [json.loads(each) for each in _gather_texts(strategy, json.dumps(named).encode())]
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
        for index, (each, another) in enumerate(zip(one, other, strict=True)):
            yield from differences(each, another, f"{path}[{index}]")
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
    for (path, one, other), those in workers.items():
        listed = f"worker{'s' if len(those) > 1 else ''} {', '.join(map(str, those[:8]))}"
        listed += f" and {len(those) - 8} more" if len(those) > 8 else ""
        sentences.append(f"{path}: {one} on worker 0, {other} on {listed}")
    return "; ".join(sentences[: 2 * _MOST_DIFFERENCES])
