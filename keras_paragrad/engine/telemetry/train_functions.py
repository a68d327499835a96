"""Looks into train functions: compiled functions, their traces, and how many examples they have seen."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.layers import override_attributes
from keras_paragrad.compat.model import optimizers_of, overrides_train_step
from keras_paragrad.compat.types import Batch, BatchIterator, Gradients, Specs
from keras_paragrad.compat.workers import local_replica_values
from keras_paragrad.engine.tracing.gradient_functions import closure_contents
from keras_paragrad.engine.tracing.untouched import trace_untouched

# The scope of the backward pass in the graph of `gradient_graph`.
BACKWARD = "backward_pass"
# The key of the telemetry's latest values in a step's logs. An output is free, while reading a variable takes time.
LATEST = "_keras_paragrad_latest"
# How many levels of functions within functions are searched for compiled ones.
_DEPTH = 8


def examples_seen(model: keras.Model) -> float | None:
    """This worker's number of examples in the epoch's mean loss so far; `None` without a loss tracker."""
    check_internals("models")
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        return None
    return float(sum(part.numpy() for part in local_replica_values(tracker.count.value)))


def compiled_functions(function: object) -> list[Any]:
    """Finds the `tf.function`s that a train function calls, through its closures."""
    functions: dict[int, Any] = {}
    seen: set[int] = set()
    level = [function]
    for _ in range(_DEPTH):
        level = [inner for outer in level for inner in _referred_to(outer) if id(inner) not in seen]
        seen.update(map(id, level))
        functions.update((id(value), value) for value in level if hasattr(value, "experimental_get_tracing_count"))
        # A `tf.function` that another one calls is traced with that one.
        level = [value for value in level if not hasattr(value, "experimental_get_tracing_count")]
    return list(functions.values())


def _referred_to(value: object) -> Iterator[object]:
    """The functions to which a function or a list refers; none for a `tf.function`."""
    if hasattr(value, "experimental_get_tracing_count"):
        return
    contents = value if isinstance(value, (list, tuple)) else closure_contents(value)
    yield from (content for content in contents if callable(content) or isinstance(content, (list, tuple)))


class TracedGraph(NamedTuple):
    """A traced graph: the name of the function, and the dtypes and shapes of its arguments."""

    function: str
    signature: str


def newest_trace(function: Any) -> TracedGraph:
    """The latest trace of a `tf.function`."""
    concrete = function._list_all_concrete_functions()[-1]
    arguments = concrete.structured_input_signature
    specs = [spec for leaf in tf.nest.flatten(arguments) for spec in _tensors(leaf)]
    return TracedGraph(function.__name__, ", ".join(f"{spec.dtype.name}{_shape(spec)}" for spec in specs))


def _tensors(spec: Specs) -> list[Any]:
    """The specs of the tensors in an argument, which may be an iterator. Of several replicas', the first one's."""
    elements = getattr(spec, "element_spec", None) or getattr(spec, "_element_spec", None)
    leaves = tf.nest.flatten(elements, expand_composites=True) if elements is not None else [spec]
    leaves = [part for leaf in leaves for part in getattr(leaf, "_value_specs", (leaf,))[:1]]
    return [leaf for leaf in tf.nest.flatten(leaves) if isinstance(leaf, tf.TensorSpec)]


def _shape(spec: tf.TensorSpec) -> str:
    if spec.shape.rank is None:
        return "[...]"
    return "[" + ",".join("?" if size is None else str(size) for size in spec.shape) + "]"


def batch_spec(iterator: BatchIterator) -> Specs:
    """The nested specs of a replica batch of an iterator, or `None` if unknown."""
    spec = getattr(iterator, "element_spec", None)
    if spec is None:
        return None
    return tf.nest.map_structure(lambda leaf: getattr(leaf, "_value_specs", (leaf,))[0], spec)


def gradient_graph(model: keras.Model, spec: Specs, examples: int) -> tf.Graph:
    """The graph of the forward and backward pass on `examples` rows of nested `tf.TensorSpec`.

    For a `train_step` of the model's own, it is the graph of the step without updates.
    """
    applied: list[Gradients] = []

    def gradients(*parts: Batch):
        batch = tf.nest.pack_sequence_as(spec, parts)
        if overrides_train_step(model):
            with contextlib.ExitStack() as patches:
                for optimizer in optimizers_of(model):
                    apply = lambda gradients, *_: applied.append(gradients)  # noqa: E731
                    patches.enter_context(override_attributes(optimizer, apply=apply))
                return model.train_step(batch), applied
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        with tf.name_scope(BACKWARD):
            return loss, [part for part in tape.gradient(loss, model.trainable_variables) if part is not None]

    sized = [tf.TensorSpec([examples, *leaf.shape[1:]], leaf.dtype) for leaf in tf.nest.flatten(spec)]
    return trace_untouched(model, gradients, *sized).graph
