"""Finds side effects of a graph's operations: which can't be repeated, and which variables they assign."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

# The attributes that name an operation's functions, in a fixed order.
_FUNCTIONS = ("f", "cond", "body", "then_branch", "else_branch", "branches")


def called_graphs(operation: tf.Operation) -> list[tf.Graph]:
    """The graphs of the functions that an operation calls."""
    graphs = []
    for name in _FUNCTIONS:
        try:
            functions = operation.get_attr(name)
        except ValueError:
            continue
        for function in functions if isinstance(functions, list) else [functions]:
            called: Any = operation.graph._get_function(function.name) if hasattr(function, "name") else None
            # Functions that TensorFlow's own losses define, such as CTC's, have no graph here.
            if hasattr(called, "graph"):
                graphs.append(called.graph)
    return graphs


# TensorFlow marks these as stateful, but they only read, check or print. Keras calls cuDNN's layers without dropout.
_REPEATABLE = {"Assert", "CudnnRNNV2", "CudnnRNNV3", "LookupTableFindV2", "LookupTableSizeV2", "PrintV2"}
_CALLING = {"Case", "If", "StatefulPartitionedCall", "While"}
_VARIABLES = ("ReadVariable", "Assign", "Resource", "VarHandle", "VarIsInitialized")
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncated", "Stateful", "Rng")

_ASSIGNING = (
    *("Assign", "LookupTableInsert", "LookupTableRemove", "ResourceApply", "ResourceCountUpTo", "ResourceScatter"),
    *("ResourceSparseApply", "ResourceStridedSliceAssign"),
)
# Operations of a `tf.random.Generator`. The generator's state is their first input.
_DRAWING = ("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulRandomBinomial")


class HiddenState(NamedTuple):
    """An operation that can't be repeated, why (a clause after its name), and advice."""

    operation: tf.Operation
    problem: str
    advice: str


def find_unrepeatable(operations: Iterable[tf.Operation], *, but_random: bool = False) -> HiddenState | None:
    """Finds the first operation whose second run may differ, or `None`. `but_random` ignores random numbers."""
    for operation in _stateful(operations):
        kind = operation.type
        random = any(word in kind for word in _RANDOM)
        if kind in _REPEATABLE or kind.startswith(("Collective", "Nccl")) or (random and but_random):
            continue
        if any(word in kind for word in _VARIABLES):
            problem = "uses a tf.Variable that Keras does not know, which may hold another value when it runs again"
            return HiddenState(operation, problem, "Make it with self.add_weight")
        if random:
            advice = "Draw with keras.random, with seed=a keras.random.SeedGenerator that is an attribute of the layer"
            return HiddenState(operation, "draws random numbers, and would draw others when it runs again", advice)
        return HiddenState(operation, "may not do the same when it runs again", "Move it out of the layer")
    return None


def check_repeatable(name: str, operations: Iterable[tf.Operation]) -> None:
    """Refuses operations whose second run may differ."""
    if found := find_unrepeatable(operations):
        operation, problem, advice = found
        raise ValueError(
            f"{name!r} can't be recomputed: its operation {operation.name!r} ({operation.type}) {problem}. {advice}, "
            "or leave the layer out of `layers`."
        )


def find_hidden_state(operations: Iterable[tf.Operation]) -> HiddenState | None:
    """Finds the first operation that draws random numbers, or assigns to what Keras doesn't know."""
    for operation in _stateful(operations):
        if any(word in operation.type for word in _RANDOM):
            advice = "Draw with keras.random, with seed=a keras.random.SeedGenerator that is an attribute of the layer"
            return HiddenState(operation, "draws random numbers", advice)
        if operation.type.startswith(_ASSIGNING):
            advice = "Make it with self.add_weight, as an attribute of the layer"
            return HiddenState(operation, "assigns to a tf.Variable that Keras does not know", advice)
    return None


def draws_from_graph(operations: Iterable[tf.Operation]) -> bool:
    """Whether operations draw from states of their graph, as those of `tf.random` do."""
    return any(any(word in operation.type for word in _RANDOM[:4]) for operation in _stateful(operations))


def _stateful(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields the stateful operations, including operations of called functions."""
    for operation in operations:
        if not operation.op_def.is_stateful:
            continue
        if operation.type not in _CALLING:
            yield operation
            continue
        for body in called_graphs(operation):
            yield from _stateful(body.get_operations())


def assigned_resources(graph: tf.Graph) -> list[tf.Tensor]:
    """The outer resources, such as variables, that a function's graph assigns. Leaves out random generators."""
    return _resources_of(graph, _ASSIGNING)


def random_generators(graph: tf.Graph) -> list[tf.Tensor]:
    """The outer resources of each `tf.random.Generator` from which a function's graph draws."""
    return _resources_of(graph, _DRAWING)


def _resources_of(graph: tf.Graph, types: tuple[str, ...]) -> list[tf.Tensor]:
    resources = _used(graph, {inner.name: outer for outer, inner in graph.captures}, types)
    return list({id(resource): resource for resource in resources}.values())


def _used(graph: tf.Graph, outside: dict[str, tf.Tensor], types: tuple[str, ...]) -> Iterator[tf.Tensor]:
    """Yields the resources that operations of these types use. `outside` maps names of inputs to resources."""
    for operation in graph.get_operations():
        if not operation.op_def.is_stateful:
            continue
        if operation.type.startswith(types):
            yield from (outside[tensor.name] for tensor in operation.inputs[:1] if tensor.name in outside)
        # The first input of a condition selects the branch.
        arguments = operation.inputs[1:] if operation.type in ("Case", "If") else operation.inputs
        for body in called_graphs(operation):
            pairs = zip(body.inputs, arguments, strict=False)
            inner = {within.name: outside[passed.name] for within, passed in pairs if passed.name in outside}
            yield from _used(body, inner, types)
