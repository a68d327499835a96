"""A part of a model that XLA compiles by itself."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import called_for_training, copy_mask, mask_of, with_mask
from keras_paragrad.compat.model import losses_added_by
from keras_paragrad.engine.step.reads import Reads, reads_here
from keras_paragrad.engine.step.segments import Part

_COMPILED = "_keras_paragrad_compiled_parts"


class _Made(NamedTuple):
    """What was found out while a part was traced.

    Attributes:
        places: Which of the part's outputs it gives.
        unmasked: The places of the inputs that have no mask after the call.
        assigned: The variables that it assigns to, where they are on another device.
    """

    places: list[int]
    unmasked: list[int]
    assigned: list[keras.Variable]


class CompiledPart:
    """Runs a part of a Functional model as a function that XLA compiles, once for all calls in a graph.

    Args:
        part: The part.
        run: Runs it.
        name: What the function is called. XLA names its program so, by which a profile tells stages apart.
    """

    def __init__(self, part: Part, run: Callable[..., dict[int, Any]], name: str):
        self.part, self.run, self.name = part, run, name

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
        # What is compiled for a device can't reach variables on another.
        reads = reads_here()
        given = reads.values if reads else []
        if key not in functions:
            functions[key] = self._function(tuple(known), [variable for variable, _ in given], operation_fn)
        function, made = functions[key]
        masks = [mask_of(value) for value in known.values()]
        values, masks, assigned = function(list(known.values()), masks, [value for _, value in given])
        for place in made.unmasked:
            copy_mask(None, known[place])
        for update in zip(made.assigned, assigned, strict=True):
            assert reads is not None
            reads.add_update(update)
        return {place: with_mask(*pair) for place, *pair in zip(made.places, values, masks, strict=True)}

    def _function(
        self, inputs: tuple[int, ...], variables: list[keras.Variable], operation_fn: Callable[..., Any]
    ) -> tuple[Any, _Made]:
        made = _Made([], [], [])

        def compiled(values, masks, weights):
            known = dict(zip(inputs, map(with_mask, values, masks), strict=True))
            around = reads_here()
            own = around and Reads(around.name, list(zip(variables, weights, strict=True)), around.why, once=True)
            before = len(losses_added_by(self.part.layers))
            with own or contextlib.nullcontext():
                found = self.run(known, operation_fn=operation_fn)
            self._check(len(losses_added_by(self.part.layers)) > before, own)
            updates = own.updates if own else []
            made.places[:] = found
            made.unmasked[:] = [place for place, value in known.items() if mask_of(value) is None]
            made.assigned[:] = [variable for variable, _ in updates]
            return list(found.values()), [mask_of(value) for value in found.values()], [value for _, value in updates]

        compiled.__name__ = self.name
        return tf.function(compiled, jit_compile=True, autograph=False), made

    def _check(self, adds_losses: bool, reads: Reads | None) -> None:
        if adds_losses or (reads and reads.losses):
            raise ValueError(
                f"A layer of the stage {self.part.name} adds a loss when it is called, which can't leave what XLA "
                "compiles. Write DistributedFit(Pipeline(...), jit=False)."
            )
        if reads and reads.missing:
            paths = [variable.path for variable in reads.missing.values()]
            raise ValueError(
                f"A layer of the stage {self.part.name} uses {paths}, which is none of the stage's variables, and what "
                "XLA compiles for one device can't reach a variable on another. Write DistributedFit(Pipeline(...), "
                "jit=False), or make it an attribute of the layer."
            )
        operations = tf.compat.v1.get_default_graph().get_operations()
        if any(operation.type in ("While", "StatelessWhile") for operation in operations):
            raise ValueError(
                f"A layer of the stage {self.part.name} computes in a loop, as recurrent ones do, and XLA can't "
                "keep what a loop's backward pass needs of it. Write DistributedFit(Pipeline(...), jit=False), or "
                "give a recurrent layer unroll=True."
            )
