"""What a replica reads and assigns in place of variables in shards."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index


class Reading(threading.local):
    """What reading a variable gives on this replica, whose code runs in a thread of its own.

    Attributes:
        values: By the `id` of variables, tensors to read instead of gathering them.
        cast: The same, cast to the dtype that a layer computes in.
        assigned: Where assignments are noted instead of being made, or `None`.
    """

    def __init__(self) -> None:
        self.values: dict[int, tf.Tensor] = {}
        self.cast: dict[int, tf.Tensor] = {}
        self.assigned: dict[int, tuple[Any, tf.Tensor]] | None = None


READING = Reading()


class Noted:
    """Stands for a variable whose assignments are noted."""

    def __init__(self, variable: Any, assigned: dict[int, tuple[Any, tf.Tensor]]):
        self._variable, self._assigned = variable, assigned

    def assign(self, value: tf.Tensor, **_: Any) -> None:
        self._assigned[id(self._variable)] = self._variable, value

    def assign_add(self, value: tf.Tensor, **_: Any) -> None:
        self.assign(tf.convert_to_tensor(self._variable) + value)

    def assign_sub(self, value: tf.Tensor, **_: Any) -> None:
        self.assign(tf.convert_to_tensor(self._variable) - value)


@contextlib.contextmanager
def updated_whole() -> Iterator[None]:
    """Context in which this replica computes with whole variables; its shards of what is assigned are kept."""
    READING.assigned = {}
    try:
        yield
        for variable, value in READING.assigned.values():
            variable.shard.assign(variable.partition.kept_shard(tf.cast(value, variable.dtype), replica_index()))
    finally:
        READING.assigned = None


@contextlib.contextmanager
def read_as(tensors: Mapping[int, tf.Tensor], cast: Mapping[int, tf.Tensor] | None = None) -> Iterator[None]:
    """Context in which this replica reads variables as given tensors, by the `id` of their storage.

    Args:
        tensors: Whole variables.
        cast: Others, to be read only where Keras casts them to this dtype anyway.
    """
    before = READING.values, READING.cast
    READING.values, READING.cast = {**before[0], **tensors}, {**before[1], **(cast or {})}
    try:
        yield
    finally:
        READING.values, READING.cast = before


def known() -> dict[int, tf.Tensor]:
    """What this replica reads without gathering, by the `id` of storage."""
    return READING.values


def known_cast() -> dict[int, tf.Tensor]:
    """What it reads where Keras casts it."""
    return READING.cast
