"""Operations that would not do the same if they ran a second time."""

from collections.abc import Iterable, Iterator

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
        for attribute in operation.node_def.attr.values():
            called = [*([attribute.func] if attribute.HasField("func") else []), *attribute.list.func]
            for function in called:
                body = operation.graph._get_function(function.name)
                yield from _stateful(body.graph.get_operations())
