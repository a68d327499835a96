"""Maps operations to layers, by name."""

import re
from collections.abc import Collection, Iterable

_COUNTED = re.compile(r"(.+)_\d+$")


class LayerNames:
    """Finds layers in the scopes of operations' names.

    TensorFlow appends a number to a repeated scope, and Keras numbers layers in the same way. Which of the two a number
    means is inferred from the unambiguous scopes.

    Args:
        layers: The names of the model's layers, at every depth.
        operations: The names of all operations in the trace.

    Example:

    >>> from keras_paragrad.profiling.analysis.layers import LayerNames
    >>> names = ["model_1/dense_1/MatMul", "model_1/dense_1_1/MatMul", "gradient_tape/model_1/dense_1_1/Sum"]
    >>> layers = LayerNames(["dense", "dense_1"], names)
    >>> [layers.of(name) for name in [*names, "adam/truediv_5"]]
    ['dense', 'dense_1', 'dense_1', '']
    """

    def __init__(self, layers: Collection[str], operations: Iterable[str]):
        self.layers = frozenset(layers)
        scopes = {scope for name in operations for scope in name.split("/")[:-1]}
        self._is_counted = any(self._without_count(scope) in self.layers for scope in scopes - self.layers)

    def of(self, operation: str) -> str:
        """The innermost layer that an operation belongs to, or `""`."""
        for scope in reversed(operation.split("/")[:-1]):
            uncounted = self._without_count(scope)
            for name in (uncounted, scope) if self._is_counted else (scope,):
                if name in self.layers:
                    return name
        return ""

    @staticmethod
    def _without_count(scope: str) -> str:
        found = _COUNTED.match(scope)
        return found[1] if found else ""
