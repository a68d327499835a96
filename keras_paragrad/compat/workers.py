"""Several workers, each with the devices that it names."""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context

# Workers leave a collective together, but for the time that the last part takes to arrive.
_PATIENCE_MS = 10_000


def has_joined_a_cluster() -> bool:
    """Whether a strategy for several workers has been made in this process, by whomever."""
    return context().coordination_service is not None


def barrier() -> None:
    """Returns once every worker has called this, or is lost.

    A worker that has received its part of a collective may still be read from. If its process ended then, the others
    would fail, so whatever may be a program's last collective is followed by this. It takes less than 1 ms.
    """
    # An error means that others have ended, or will never come: the next collective says so, if there is one.
    with contextlib.suppress(tf.errors.OpError):
        context().wait_at_barrier("keras_paragrad", _PATIENCE_MS)


class NamedDevicesStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` with replicas on named devices of each worker.

    TensorFlow's own takes all GPUs, or else one CPU device.

    Args:
        devices: Names such as `CPU:0`; every worker needs equally many, of the same kind.
        communication_options: As in TensorFlow's own.
    """

    def __init__(self, devices: Sequence[str], communication_options: Any):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        extended = _NamedDevices(self, resolver, communication_options, devices)
        tf.distribute.Strategy.__init__(self, extended)


class BesideMesh(NamedDevicesStrategy):
    """One by which workers talk to each other that hold a mesh together, whose own collectives are numbered from 1."""

    _collective_key_base = 2**20


class _NamedDevices(CollectiveAllReduceExtended):
    def __init__(self, strategy: Any, resolver: Any, communication_options: Any, devices: Sequence[str]):
        self._named = tuple(devices)
        super().__init__(strategy, resolver, communication_options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        kind = self._named[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in self._named), kind
