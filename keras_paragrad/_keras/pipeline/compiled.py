"""A part of a model that XLA compiles by itself."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.objects.layers import called_for_training, copy_mask, mask_of, with_mask
from keras_paragrad._keras.objects.model import losses_added_by
from keras_paragrad._keras.step.segments import Part

_COMPILED = "_keras_paragrad_compiled_parts"


class CompiledPart:
    """Runs a part of a Functional model as a function that XLA compiles, once for all calls in a graph.

    Args:
        part: The part.
        run: Runs it.
    """

    def __init__(self, part: Part, run: Callable[..., dict[int, Any]]):
        self.part, self.run = part, run

    def __call__(self, known: dict[int, Any], operation_fn: Callable[..., Any]) -> dict[int, Any]:
        """Runs the part; see `OnDevice`."""
        if tf.executing_eagerly():
            return self.run(known, operation_fn=operation_fn)
        graph: Any = tf.compat.v1.get_default_graph()
        # Kept by the graph, as it belongs there: a micro-batch is computed by what was compiled for the first.
        if not hasattr(graph, _COMPILED):
            setattr(graph, _COMPILED, {})
        functions = getattr(graph, _COMPILED)
        key = (id(self), tuple(known), called_for_training())
        if key not in functions:
            functions[key] = self._function(tuple(known), operation_fn)
        function, places, unmasked = functions[key]
        values, masks = function(list(known.values()), [mask_of(value) for value in known.values()])
        for place in unmasked:
            copy_mask(None, known[place])
        return {place: with_mask(*pair) for place, *pair in zip(places, values, masks, strict=True)}

    def _function(self, inputs: tuple[int, ...], operation_fn: Callable[..., Any]) -> tuple[Any, list[int], list[int]]:
        places: list[int] = []
        unmasked: list[int] = []

        @tf.function(jit_compile=True, autograph=False)
        def compiled(values, masks):
            known = dict(zip(inputs, map(with_mask, values, masks), strict=True))
            before = len(losses_added_by(self.part.layers))
            found = self.run(known, operation_fn=operation_fn)
            if len(losses_added_by(self.part.layers)) > before:
                raise ValueError(
                    f"A layer of the stage {self.part.name} adds a loss when it is called, which can't leave what XLA "
                    "compiles. Write DistributedFit(Pipeline(...), jit=False)."
                )
            made = tf.compat.v1.get_default_graph().get_operations()
            if any(operation.type in ("While", "StatelessWhile") for operation in made):
                raise ValueError(
                    f"A layer of the stage {self.part.name} computes in a loop, as recurrent ones do, and XLA can't "
                    "keep what a loop's backward pass needs of it. Write DistributedFit(Pipeline(...), jit=False), or "
                    "give a recurrent layer unroll=True."
                )
            places[:] = found
            unmasked[:] = [place for place, value in known.items() if mask_of(value) is None]
            return list(found.values()), [mask_of(value) for value in found.values()]

        return compiled, places, unmasked
