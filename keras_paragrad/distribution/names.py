"""Names of devices and kinds of strategies, as in the plan."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.arguments import check_each, quote, refusal

_DEVICE = re.compile(r"(?:/?device:|/)?(CPU|GPU|TPU):([0-9]{1,9})", re.IGNORECASE)
_CLASSES = {
    "one_device": (tf.distribute.OneDeviceStrategy,),
    "mirrored": (tf.distribute.MirroredStrategy,),
    "multi_worker": (tf.distribute.MultiWorkerMirroredStrategy,),
    "tpu": (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    "parameter_server": (tf.distribute.ParameterServerStrategy,),
}


def canonical_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Device names in their shortest form, `CPU:0`."""
    names = check_each("devices", devices, _canonical_device, "names of devices", example="['CPU:0', 'CPU:1']")
    if not names:
        raise ValueError("`devices` is empty. Name one or more, such as ['GPU:0'], or leave it out.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"`devices` names {quote(repeated)} more than once. A device takes one replica.")
    if len({kind_of_device(name) for name in names}) > 1:
        raise ValueError(
            f"`devices` is {quote(names)}, of several kinds. Name devices of one kind: replicas take equal replica "
            "batches, and all wait for the slowest."
        )
    return names


def kind_of_device(name: str) -> str:
    """`CPU`, `GPU` or `TPU`."""
    return name.partition(":")[0]


def kind_of_strategy(strategy: tf.distribute.Strategy) -> str:
    """The plan's name for a strategy."""
    for kind, classes in _CLASSES.items():
        if isinstance(strategy, classes):
            return kind
    # Outside any scope, TensorFlow returns its default strategy, which distributes nothing.
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return "none"
    central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    reason = " Under it, Keras's metrics are wrong." if central else ""
    raise ValueError(
        f"strategy is a {type(strategy).__name__}, which DistributedFit doesn't support.{reason} Pass a "
        "OneDeviceStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy or ParameterServerStrategy, or "
        'write strategy="auto".'
    )


def _canonical_device(argument: str, name: Any) -> str:
    match = _DEVICE.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        raise refusal(argument, name, "the name of a device, such as 'CPU:0' or 'GPU:1'")
    return f"{match[1].upper()}:{int(match[2])}"
