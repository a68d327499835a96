"""Compares descriptions of the training between workers, with one error on all that names the difference."""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import place_of
from keras_paragrad.distribution.workers import from_chief, gather

SAME_CODE = (
    " Start the same script, with the same arguments and package versions, on every worker; nothing in it may depend "
    "on the worker."
)
_MOST_DIFFERENCES = 6
_LONGEST_VALUE = 160
_NOTHING = "nothing"


def check_alike(strategy: tf.distribute.Strategy, entries: Mapping[str, str]) -> None:
    """Raises the same error on every worker if what they are about to train differs.

    Costs one small all-reduce if nothing differs; only otherwise the workers exchange their entries.
    """
    if place_of(strategy).workers == 1:
        return
    text = json.dumps(dict(entries)).encode()
    digest = hashlib.sha256(json.dumps(dict(entries), sort_keys=True).encode()).digest()
    digests = gather(strategy, np.frombuffer(digest, np.int64))
    if (digests == digests[0]).all():
        return
    mine = place_of(strategy).worker
    of_chief = json.loads(from_chief(strategy, text if mine == 0 else None))
    reports = _texts(strategy, json.dumps(_differences(of_chief, entries)).encode())
    said = _in_words([json.loads(each) for each in reports])
    raise ValueError(f"The workers would train differently: {said}.{SAME_CODE}")


def _differences(of_chief: Mapping[str, str], mine: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = [*of_chief, *(name for name in mine if name not in of_chief)]
    pairs = [(name, of_chief.get(name, _NOTHING), mine.get(name, _NOTHING)) for name in names]
    differing = [(name, one[:_LONGEST_VALUE], other[:_LONGEST_VALUE]) for name, one, other in pairs if one != other]
    # An entry that one side lacks altogether follows from one that both have.
    both = [each for each in differing if _NOTHING not in each[1:]]
    chosen = both or differing
    more = len(chosen) - _MOST_DIFFERENCES
    return chosen[:_MOST_DIFFERENCES] + ([("", str(more), "")] if more > 0 else [])


def _texts(strategy: tf.distribute.Strategy, mine: bytes) -> list[bytes]:
    """Every worker's text on all workers."""
    lengths = gather(strategy, np.array([len(mine)], np.int64))[:, 0]
    padded = np.zeros(int(lengths.max()), np.int64)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    found = gather(strategy, padded)
    return [row[:length].astype(np.uint8).tobytes() for row, length in zip(found, lengths, strict=True)]


def _in_words(reports: list[list[list[str]]]) -> str:
    """The differences from worker 0, each with the workers that share it."""
    workers: dict[tuple[str, str, str], list[int]] = {}
    for worker, report in enumerate(reports):
        for name, one, other in report:
            workers.setdefault((name, one, other), []).append(worker)
    said = []
    for (name, one, other), those in workers.items():
        listed = f"worker{'s' if len(those) > 1 else ''} {', '.join(map(str, those[:8]))}"
        listed += f" and {len(those) - 8} more" if len(those) > 8 else ""
        said.append(f"{name} is {one} on worker 0 and {other} on {listed}" if name else f"{one} others on {listed}")
    return "; ".join(said[: 2 * _MOST_DIFFERENCES])
