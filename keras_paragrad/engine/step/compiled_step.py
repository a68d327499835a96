"""A step of a model, compiled for the batches of an iterator."""

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from tensorflow.python.eager.polymorphic_function.attributes import NO_INLINE

from keras_paragrad.compat.collectives import of_first_replica
from keras_paragrad.engine.step.gradient_functions import releasing
from keras_paragrad.engine.step.indivisible import IndivisibleBatchGuard
from keras_paragrad.engine.step.stages import MeshRunner, Take

Step = Callable[[Any], dict]


class CompiledStep:
    """A step on all replicas, in a graph of its own.

    Not inlined in another, so that nothing in it, such as a counter, runs ahead of a batch that turns out not to exist.

    Args:
        model: The model that is trained; its `jit_compile` and `run_eagerly` hold.
        step: What runs on each replica.
        take: How batches are spread over replicas, or `None` for Keras's way.
        guard: How large batches may be, if there is a limit.
        by_xla: Whether XLA may compile the step, if the model is compiled by it.
        mesh: Runs the step on a mesh of devices, or `None` to run it on one.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Step,
        take: Take | None,
        guard: IndivisibleBatchGuard | None,
        by_xla: bool,
        mesh: MeshRunner | None,
    ):
        strategy = model.distribute_strategy

        def one_step(data: Any) -> dict:
            logs = strategy.run(step, args=(data,))
            return of_first_replica(strategy, logs) if take else reduce_per_replica(logs, strategy, reduction="auto")

        if not model.run_eagerly:
            one_step = tf.function(
                releasing(one_step),
                # DTensor knows static shapes only.
                reduce_retracing=mesh is None,
                # XLA can't compile collectives between these devices.
                jit_compile=by_xla and model.jit_compile and (take is None or strategy.num_replicas_in_sync == 1),
                autograph=False,
                experimental_attributes={NO_INLINE: True},
            )
        compiled = model._autoconvert_optionals(guard.watch(one_step) if guard else one_step)
        self._run = mesh.running(compiled) if mesh else compiled
        self._function: Any = one_step
        # TensorFlow can't pass a mesh's batches to a function.
        self._in_functions = mesh is None and not model.run_eagerly
        self._get_next = tf.function(lambda iterator: iterator.get_next(), reduce_retracing=True, autograph=False)
        self._take = tf.function(lambda iterator: self(iterator.get_next()), reduce_retracing=True, autograph=False)
        self._iterator: Any = lambda: None
        self._apart = True

    def __call__(self, data: Any) -> dict:
        return self._run(data)

    def run_next(self, iterator: Any) -> dict:
        """Runs the step on the next batch, in a graph for any batch of the iterator: a batch tells its own shape alone.

        A graph around the step that takes the batch would hold the graph of the step a second time: 5 kB an operation.
        """
        if not self._in_functions:
            return self(iterator.get_next())
        if self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            spec = keras.tree.map_structure(_without_optional, iterator.element_spec)
            # Of a part without rows that is handed to Python, TensorFlow loses the inner dimensions.
            self._apart = not any(map(_is_ragged, keras.tree.flatten(spec)))
            if self._apart:
                self._function.get_concrete_function(spec)
        return self(self._get_next(iterator)) if self._apart else self._take(iterator)


def _without_optional(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec


def _is_ragged(spec: Any) -> bool:
    return any(isinstance(part, tf.RaggedTensorSpec) for part in getattr(spec, "_value_specs", (spec,)))
