"""Tensors that a replica reads, and assignments that it records, in place of sharded variables."""

import contextlib
import threading
from collections.abc import Generator, Mapping
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.types import TensorVariable


class Reading(threading.local):
    """The tensors that replace sharded variables on this replica, whose code runs in its own thread.

    Attributes:
        values: Tensors to read instead of gathering, by the `id` of the variable.
        cast: The same, already cast to the dtype that a layer computes in.
        zeros: Whether all others read as zeros, in a graph that never runs.
        assigned: Recorded assignments by the `id` of the variable, or `None` if assignments are carried out.
    """

    def __init__(self) -> None:
        self.values: Mapping[int, tf.Tensor] = {}
        self.cast: Mapping[int, tf.Tensor] = {}
        self.zeros = False
        self.assigned: dict[int, tuple[TensorVariable, tf.Tensor]] | None = None


READING = Reading()


class AssignmentRecorder:
    """Takes the place of a variable and records its assignments."""

    def __init__(self, variable: TensorVariable, assigned: dict[int, tuple[TensorVariable, tf.Tensor]]):
        self._variable, self._assigned = variable, assigned

    def assign(self, value: tf.Tensor, **_: Any) -> None:
        self._assigned[id(self._variable)] = self._variable, value

    def assign_add(self, value: tf.Tensor, **_: Any) -> None:
        self.assign(tf.convert_to_tensor(self._variable) + value)

    def assign_sub(self, value: tf.Tensor, **_: Any) -> None:
        self.assign(tf.convert_to_tensor(self._variable) - value)

    # Lookups have been made dense.
    scatter_add, scatter_sub = assign_add, assign_sub


@contextlib.contextmanager
def assigning_whole() -> Generator[None]:
    """Context in which this replica assigns whole values to sharded variables; its shards are stored at the end."""
    READING.assigned = {}
    try:
        yield
        for variable, value in READING.assigned.values():
            variable.shard.assign(variable.partition.copy_shard(tf.cast(value, variable.dtype), replica_index()))
    finally:
        READING.assigned = None


@contextlib.contextmanager
def read_as(tensors: Mapping[int, tf.Tensor], cast: Mapping[int, tf.Tensor] | None = None) -> Generator[None]:
    """Context in which this replica reads whole values in place of sharded variables, by the variables' `id`.

    Those in `cast` are read where Keras casts the variable to their dtype.
    """
    before = READING.values, READING.cast
    READING.values, READING.cast = {**before[0], **tensors}, {**before[1], **(cast or {})}
    try:
        yield
    finally:
        READING.values, READING.cast = before


@contextlib.contextmanager
def zeros_in_place_of_shards() -> Generator[None]:
    """Context of a graph that never runs, in which replicas don't wait for each other to gather."""
    before, READING.zeros = READING.zeros, True
    try:
        yield
    finally:
        READING.zeros = before
