"""Adds up the operations of a trace by layer and pass, and by kind."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from keras_paragrad.profiling.analysis.operations import LayerNames, Operation, in_steps
from keras_paragrad.profiling.analysis.trace import COLLECTIVE
from keras_paragrad.profiling.summary import COLLECTIVES, LOSS, OPTIMIZER, VARIANT, KindTime, LayerTime

# Scopes in operations' names: TensorFlow's for gradients, `engine/calls/recomputed.py`'s, and Keras's for losses and
# optimizers.
_BACKWARD = ("gradient_tape", "gradients")
_RECOMPUTED = re.compile(r"second_run(_\d+)?")
_LOSS = "compile_loss"
_UPDATE = re.compile(r"update_\d+(_\d+)*")
_NUMBER = re.compile(r"_\d+$")
_REST = "no layer named"


def layer_times(operations: Sequence[Operation], layers: Collection[str], optimizer: str = "") -> tuple[LayerTime, ...]:
    """Adds up the times of steps by layer and pass, longest first; empty if no operation is a layer's.

    Operations outside of layers have entries of their own.

    Args:
        operations: All operations.
        layers: The names of layers, or a mapping from these to the names of their classes.
        optimizer: The classes of the optimizer, as `RunInfo` has them, by which Keras names its scope.

    Example:

    >>> from keras_paragrad.profiling.analysis.operations import Operation
    >>> names = {"m/dense/MatMul": 1.0, "second_run/dense/MatMul": 2.0, "gradient_tape/m/dense/MatMul": 4.0}
    >>> operations = [Operation(name, "MatMul", 1, time, False) for name, time in names.items()]
    >>> layer_times(operations, ["dense"])
    (LayerTime(name='dense', forward=1.0, backward=4.0, recompute=2.0, other=0.0, is_layer=True, kind=''),)
    """
    chosen = in_steps(operations)
    optimizers = frozenset(re.findall(r"\w+", optimizer.lower()))
    names = LayerNames(layers, [operation.name for operation in chosen])
    times: dict[tuple[str, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operation in chosen:
        layer, scopes = names.of(operation.name), operation.name.split("/")[:-1]
        # A name, and whether it is a layer's.
        key = (layer, True) if layer else (_part_without_layer(operation, scopes, optimizers), False)
        times[key][_pass_of(scopes) if layer or key[0] == LOSS else "other"] += operation.milliseconds
    kinds: Mapping[str, str] = layers if isinstance(layers, Mapping) else {}
    found = [
        LayerTime(name, is_layer=is_layer, kind=kinds.get(name, "") if is_layer else "", **passes)
        for (name, is_layer), passes in times.items()
    ]
    if not any(layer.is_layer for layer in found):
        return ()
    return tuple(sorted(found, key=lambda layer: -layer.total))


def kind_times(operations: Sequence[Operation]) -> tuple[KindTime, ...]:
    """The time of each kind of operation, in descending order."""
    times: Mapping[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for operation in in_steps(operations):
        of_kind = times[VARIANT.sub("", operation.kind)]
        of_kind[0] += operation.milliseconds
        of_kind[1] += operation.times
    total = sum(time for time, _ in times.values()) or 1.0
    found = [KindTime(kind, int(count), time, time / total) for kind, (time, count) in times.items()]
    return tuple(sorted(found, key=lambda kind: -kind.milliseconds))


def _pass_of(scopes: Sequence[str]) -> str:
    """The pass that an operation belongs to, by the scopes in its name."""
    if any(scope in _BACKWARD for scope in scopes):
        return "backward"
    return "recompute" if any(_RECOMPUTED.fullmatch(scope) for scope in scopes) else "forward"


def _part_without_layer(operation: Operation, scopes: Sequence[str], optimizers: Collection[str]) -> str:
    """What an operation outside of layers belongs to; `optimizers` are lower-case names of optimizer classes."""
    if COLLECTIVE.search(operation.kind):
        return COLLECTIVES
    if _LOSS in scopes:
        return LOSS
    names = (_NUMBER.sub("", scope).replace("_", "") for scope in scopes)
    is_update = any(_UPDATE.fullmatch(scope) for scope in scopes) or any(name in optimizers for name in names)
    return OPTIMIZER if is_update else _REST
