"""Several workers, each with the devices that it names."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context


def has_joined_a_cluster() -> bool:
    """Whether a strategy for several workers has been made in this process, by whomever."""
    return context().coordination_service is not None


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


class _NamedDevices(CollectiveAllReduceExtended):
    def __init__(self, strategy: Any, resolver: Any, communication_options: Any, devices: Sequence[str]):
        self._named = tuple(devices)
        super().__init__(strategy, resolver, communication_options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        kind = self._named[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in self._named), kind
