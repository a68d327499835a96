"""Where variables live, and where operations run that no stage has put anywhere."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import parts
from keras_paragrad.compat.stand_ins import bytes_of
from keras_paragrad.storage.model_variables import nested_optimizers, rename_keys, replace_value, variables_of

_REDUCE = "_all_reduce_sum_gradients"
# Their operations are put on devices one by one.
_CALLS = {"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf", "StatelessWhile"}
_CALLS |= {"StatefulCase", "While"}


@contextlib.contextmanager
def placed_by_inputs(model: Any) -> Iterator[None]:
    """Context in which an operation of a graph, if nobody has put it on a device, runs where its largest input is.

    So what a pipeline's last stage gives is compared with the targets there, and each gradient is summed, clipped and
    applied where its variable is. An operation on a variable always runs where that is.

    Args:
        model: The model, compiled, whose steps are traced.
    """
    if tf.executing_eagerly():
        yield
        return
    # Keras sums gradients over replicas. There is one, but all gradients would pass a single operation on one device.
    alone = [part.__dict__ for part in parts(model.optimizer) if _REDUCE not in part.__dict__]
    for each in alone:
        each[_REDUCE] = list
    try:
        with tf.compat.v1.get_default_graph().device(_device_function()):
            yield
    finally:
        for each in alone:
            del each[_REDUCE]


def _device_function() -> Callable[[Any], str]:
    captured: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    def outside(tensor: Any) -> Any:
        """What a placeholder of a function stands for, if it is a tensor from around the function."""
        known = captured.setdefault(tensor.graph, {})
        if tensor.op.name not in known:
            known.update((inner.op.name, outer) for outer, inner in getattr(tensor.graph, "captures", ()))
        return known.setdefault(tensor.op.name, None)

    def where(tensor: Any) -> str:
        if not tf.is_symbolic_tensor(tensor):
            return tensor.device
        operation = tensor.op
        if operation.type == "Placeholder" and not operation.device:
            outer = outside(tensor)
            return "" if outer is None else where(outer)
        if operation.type == "ReadVariableOp" and not operation.device:
            # TensorFlow makes it outside of all device contexts, and runs it where the variable is.
            return where(operation.inputs[0])
        return operation.device

    def device_of(operation: Any) -> str:
        if operation.type in _CALLS:
            return operation.device
        inputs = [(tensor, device) for tensor in operation.inputs if (device := where(tensor))]
        resources = [device for tensor, device in inputs if tensor.dtype == tf.resource]
        if resources:
            return resources[0]
        if operation.device or not inputs:
            return operation.device
        return max(inputs, key=lambda each: _size(each[0]))[1]

    return device_of


def _size(tensor: tf.Tensor) -> int:
    """The bytes of a tensor, those of one example if the number of examples is open."""
    sizes = tensor.shape.as_list() if tensor.shape.rank else []
    return math.prod(size or 1 for size in sizes) * max(tensor.dtype.size or 0, 1)


def home_of(variable: Any) -> str:
    """The device that holds a variable, as `CPU:0`."""
    spec: Any = tf.DeviceSpec.from_string(variable.value.device)
    return f"{spec.device_type}:{spec.device_index}"


def slots_by_home(optimizer: Any) -> dict[str, int]:
    """The bytes that an optimizer, with all that it delegates to, has on each device."""
    held: dict[str, int] = {}
    for variable in {id(each): each for part in nested_optimizers(optimizer) for each in variables_of(part)}.values():
        held[home_of(variable)] = held.get(home_of(variable), 0) + bytes_of(variable)
    return held


def move(variable: Any, device: str) -> None:
    """Keeps a variable's value on another device. An optimizer that knows the variable has to be told."""
    if home_of(variable) != device:
        with tf.device(device):
            replace_value(variable, tf.convert_to_tensor(variable.value))


def move_with_slots(variables: dict[str, list[keras.Variable]], optimizer: Any) -> None:
    """Keeps variables on devices, and what an optimizer has for each of them beside it.

    Args:
        variables: The variables of each device, by its name.
        optimizer: An optimizer, built or not, or `None`. What it makes later for a variable, it makes beside it.
    """
    homes = {variable.path.replace("/", "_"): device for device, found in variables.items() for variable in found}
    each = [(device, variable) for device, found in variables.items() for variable in found]
    before = [optimizer._var_key(variable) for _, variable in each] if optimizer else []
    for device, variable in each:
        move(variable, device)
    after = [optimizer._var_key(variable) for _, variable in each] if optimizer else []
    rename_keys(optimizer, dict(zip(before, after, strict=True)))
    for slot in [variable for part in nested_optimizers(optimizer) for variable in variables_of(part)]:
        # Keras names a slot after its variable.
        home = next((homes[stem] for stem in name_stems(slot.name) if stem in homes), None)
        if home is not None:
            move(slot, home)


def name_stems(name: str) -> Iterator[str]:
    """What may be a variable's path in a slot's name, the longest first."""
    words = name.split("_")
    return ("_".join(words[:count]) for count in range(len(words) - 1, 0, -1))
