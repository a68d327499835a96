"""Places a pipeline's variables on devices, and the operations outside of its stages."""

import contextlib
import math
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.optimizer import UnreducedOptimizers, held_optimizers, updating_optimizers
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.storage.model_variables import following_keys, replace_value, variables_of

# Operations inside these are placed one by one.
_CALLS = {
    *("Case", "If", "While", "PartitionedCall", "StatefulPartitionedCall"),
    *("StatefulCase", "StatelessCase", "StatelessIf", "StatelessWhile"),
}


@contextlib.contextmanager
def placing_by_inputs(model: keras.Model) -> Generator[None]:
    """Context in which a graph's unplaced operations run on the device of their largest input.

    So the loss runs on the last stage's device. A gradient is summed, clipped and applied on the device of the
    variable, as are all operations on a variable.
    """
    if tf.executing_eagerly():
        yield
        return
    # Keras's sum over the single replica would pass all gradients through one device.
    unreduced = UnreducedOptimizers()
    for inner in updating_optimizers(model.optimizer):
        unreduced.add(inner)
    try:
        with tf.compat.v1.get_default_graph().device(_device_function()):
            yield
    finally:
        unreduced.restore()


def _device_function() -> Callable[[tf.Operation], str]:
    """A device function, for `tf.Graph.device`, that maps an operation to its device."""
    captures: weakref.WeakKeyDictionary[tf.Graph, dict[str, tf.Tensor | None]] = weakref.WeakKeyDictionary()

    def captured(tensor: tf.Tensor) -> tf.Tensor | None:
        """The outer tensor captured by a function's placeholder, or `None`."""
        by_name = captures.setdefault(tensor.graph, {})
        if tensor.op.name not in by_name:
            by_name.update((inner.op.name, outer) for outer, inner in getattr(tensor.graph, "captures", ()))
        return by_name.setdefault(tensor.op.name, None)

    def device_of_tensor(tensor: tf.Tensor) -> str:
        """The device on which a tensor is computed, or `""` if it isn't placed."""
        if not tf.is_symbolic_tensor(tensor):
            return tensor.device
        operation = tensor.op
        if operation.type == "Placeholder" and not operation.device:
            outer = captured(tensor)
            return "" if outer is None else device_of_tensor(outer)
        if operation.type == "ReadVariableOp" and not operation.device:
            # TensorFlow creates reads outside of all device contexts, and runs them on the variable's device.
            return device_of_tensor(operation.inputs[0])
        return operation.device

    def device_of(operation: tf.Operation) -> str:
        if operation.type in _CALLS:
            return operation.device
        inputs = [(tensor, device) for tensor in operation.inputs if (device := device_of_tensor(tensor))]
        resources = [device for tensor, device in inputs if tensor.dtype == tf.resource]
        if resources:
            return resources[0]
        if operation.device or not inputs:
            return operation.device
        return max(inputs, key=lambda pair: _size(pair[0]))[1]

    return device_of


def _size(tensor: tf.Tensor) -> int:
    """The bytes of a tensor; of one example, if the number of examples is unknown."""
    sizes = tensor.shape.as_list() if tensor.shape.rank else []
    return math.prod(size or 1 for size in sizes) * max(tensor.dtype.size or 0, 1)


def device_of_variable(variable: keras.Variable) -> str:
    """The device that stores a variable, such as `"CPU:0"`."""
    spec: Any = tf.DeviceSpec.from_string(variable.value.device)
    return f"{spec.device_type}:{spec.device_index}"


def slot_bytes_by_device(optimizer: keras.optimizers.Optimizer | None) -> dict[str, int]:
    """The bytes on each device of an optimizer's variables, including the optimizers that it wraps."""
    by_device: dict[str, int] = {}
    for variable in {
        id(variable): variable for inner in held_optimizers(optimizer) for variable in variables_of(inner)
    }.values():
        device = device_of_variable(variable)
        by_device[device] = by_device.get(device, 0) + variable_bytes(variable)
    return by_device


def _move(variable: keras.Variable, device: str) -> None:
    if device_of_variable(variable) != device:
        with tf.device(device):
            replace_value(variable, tf.convert_to_tensor(variable.value))


def move_with_slots(variables: dict[str, list[keras.Variable]], optimizer: keras.optimizers.Optimizer | None) -> None:
    """Moves variables to devices, and with them their slots in an optimizer, if one is built."""
    pairs = [(device, variable) for device, group in variables.items() for variable in group]
    devices = {variable.path.replace("/", "_"): device for device, variable in pairs}
    with following_keys(optimizer, [variable for _, variable in pairs]):
        for device, variable in pairs:
            _move(variable, device)
    for slot in [variable for inner in held_optimizers(optimizer) for variable in variables_of(inner)]:
        # Keras names a slot after its variable.
        device = next((devices[stem] for stem in name_stems(slot.name) if stem in devices), None)
        if device is not None:
            _move(slot, device)


def name_stems(name: str) -> Iterator[str]:
    """The prefixes of a slot's name that may be its variable's path, longest first."""
    words = name.split("_")
    return ("_".join(words[:count]) for count in range(len(words) - 1, 0, -1))
