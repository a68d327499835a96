"""Operations that would not do the same if they ran a second time."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

# Stateful in name: reading, checking and printing; cuDNN's layers without dropout of their own.
_HARMLESS = {
    "Assert",
    "CudnnRNNV2",
    "CudnnRNNV3",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "PrintV2",
}
_CALLING = {"Case", "If", "StatefulPartitionedCall", "While"}
_VARIABLES = ("ReadVariable", "Assign", "Resource", "VarHandle", "VarIsInitialized")
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncated", "Stateful", "Rng")

_ASSIGNING = ("Assign", "Resource", "LookupTableInsert", "LookupTableRemove")


def check_operations(name: str, operations: Iterable[tf.Operation]) -> None:
    """Refuses operations that draw, read or change something outside of Keras's variables.

    Args:
        name: What runs them, for the error.
        operations: The operations.

    Raises:
        ValueError: One was found. The message says what to write instead.
    """
    for operation in _stateful(operations):
        kind = operation.type
        if kind in _HARMLESS or kind.startswith(("Collective", "Nccl")):
            continue
        if any(word in kind for word in _VARIABLES):
            found = "uses a tf.Variable that Keras does not know, which may hold another value when it runs again"
            advice = "Make it with self.add_weight"
        elif any(word in kind for word in _RANDOM):
            found = "draws random numbers, and would draw others when it runs again"
            advice = "Draw with keras.random, with seed=a keras.random.SeedGenerator that is an attribute of the layer"
        else:
            found = "may not do the same when it runs again"
            advice = "Move it out of the layer"
        raise ValueError(
            f"{name!r} can't be recomputed: its operation {operation.name!r} ({kind}) {found}. {advice}, or leave the "
            "layer out of `layers`."
        )


def _stateful(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    for operation in operations:
        if not operation.op_def.is_stateful:
            continue
        if operation.type not in _CALLING:
            yield operation
            continue
        for body in _called(operation):
            yield from _stateful(body.get_operations())


def _called(operation: tf.Operation) -> Iterator[Any]:
    """The graphs of the functions that an operation calls."""
    for attribute in operation.node_def.attr.values():
        for function in [*([attribute.func] if attribute.HasField("func") else []), *attribute.list.func]:
            yield operation.graph._get_function(function.name).graph


def assigned_resources(graph: Any) -> list[tf.Tensor]:
    """The resources outside of a function's graph, such as variables, that it or a function that it calls assigns to.

    Random generators are not among them.
    """
    found = _assigned(graph, {internal.name: outer for outer, internal in graph.captures})
    return list({id(resource): resource for resource in found}.values())


def _assigned(graph: Any, outside: dict[str, tf.Tensor]) -> Iterator[tf.Tensor]:
    for operation in graph.get_operations():
        if not operation.op_def.is_stateful:
            continue
        if operation.type.startswith(_ASSIGNING):
            yield from (outside[each.name] for each in operation.inputs[:1] if each.name in outside)
        # Which branch is taken comes first.
        given = operation.inputs[1:] if operation.type in ("Case", "If") else operation.inputs
        for body in _called(operation):
            pairs = zip(body.inputs, given, strict=False)
            inner = {one.name: outside[each.name] for one, each in pairs if each.name in outside}
            yield from _assigned(body, inner)
