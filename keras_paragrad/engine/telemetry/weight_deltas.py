"""What an update adds to weights, read off the graph that is traced, so that no copy of them has to be kept."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count

_ADDING = ("AssignAddVariableOp", "AssignSubVariableOp")
# In others, what is added and what becomes of the weight differ by more than their own last digits.
_PRECISE = ("float32", "float64")


class WeightDeltas:
    """The operations that come into the graph from here on, and what they add to weights.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: Sequence[Any]):
        self._weights = weights
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._known = len(self._graph.get_operations()) if self._graph else 0

    def read_off(self) -> list[tf.Tensor | None]:
        """For each weight what was added to it or taken from it.

        `None` where that isn't a single operation's doing, as with weight decay and constraints, or can't be seen.
        """
        graph: Any = self._graph
        if graph is None or graph is not tf.compat.v1.get_default_graph() or replica_count() > 1:
            return [None] * len(self._weights)
        changing: dict[str, list[Any]] = defaultdict(list)
        for operation in graph.get_operations()[self._known :]:
            for handle in operation.inputs:
                if handle.dtype == tf.resource and operation.type != "ReadVariableOp":
                    changing[handle.name].append(operation)
        return [_added(weight, changing[graph.capture(weight.value.handle).name]) for weight in self._weights]


def _added(weight: Any, changing: list[Any]) -> tf.Tensor | None:
    if len(changing) != 1 or changing[0].type not in _ADDING or weight.dtype not in _PRECISE:
        return None
    return changing[0].inputs[1]
