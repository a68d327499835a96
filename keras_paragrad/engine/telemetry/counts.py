"""Counters of a train function: examples fed to it, and graphs traced for it."""

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_objects
from keras_paragrad.compat.local import local_parts
from keras_paragrad.engine.probes.untouched import never_run, untouched
from keras_paragrad.engine.step.gradient_functions import releasing

_DEPTH = 8


def examples_seen(model: Any) -> float | None:
    """How many examples this worker's part of the model's mean loss counts in this epoch; `None` without that."""
    check_objects()
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        return None
    return float(sum(part.numpy() for part in local_parts(tracker.count.value)))


def compiled_functions(function: Any) -> list[Any]:
    """The `tf.function`s that a train function calls, found in what it refers to."""
    check_objects()
    found: dict[int, Any] = {}
    seen: set[int] = set()
    level = [function]
    for _ in range(_DEPTH):
        level = [each for outer in level for each in _referred_to(outer) if id(each) not in seen]
        seen.update(map(id, level))
        found.update((id(each), each) for each in level if hasattr(each, "experimental_get_tracing_count"))
        # What a tf.function calls is traced with it.
        level = [each for each in level if not hasattr(each, "experimental_get_tracing_count")]
    return list(found.values())


def _referred_to(value: Any) -> Iterator[Any]:
    if hasattr(value, "experimental_get_tracing_count"):
        return
    if isinstance(value, (list, tuple)):
        yield from value
        return
    for cell in getattr(value, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if callable(content) or isinstance(content, (list, tuple)):
            yield content


def graphs_of(function: Any) -> Sized:
    """The graphs that were traced for a `tf.function` so far; it grows with each.

    `experimental_get_tracing_count` is its length, and takes some microseconds in a step.
    """
    return function._function_cache._primary


class TracedGraph(NamedTuple):
    """A graph that was traced.

    Attributes:
        function: The name of the function.
        signature: The dtypes and shapes of what it takes.
    """

    function: str
    signature: str


def newest_trace(function: Any) -> TracedGraph:
    """The graph of a `tf.function` that was traced last."""
    concrete = function._list_all_concrete_functions()[-1]
    arguments = concrete.structured_input_signature
    specs = [spec for leaf in tf.nest.flatten(arguments) for spec in _tensors(leaf)]
    return TracedGraph(function.__name__, ", ".join(f"{spec.dtype.name}{_shape(spec)}" for spec in specs))


def _tensors(spec: Any) -> list[Any]:
    """The tensors in what a function takes, those that an iterator gives among them."""
    elements = getattr(spec, "element_spec", None) or getattr(spec, "_element_spec", None)
    leaves = tf.nest.flatten(elements, expand_composites=True) if elements is not None else [spec]
    leaves = [part for leaf in leaves for part in getattr(leaf, "_value_specs", (leaf,))[:1]]
    return [leaf for leaf in tf.nest.flatten(leaves) if isinstance(leaf, tf.TensorSpec)]


def _shape(spec: tf.TensorSpec) -> str:
    if spec.shape.rank is None:
        return "[...]"
    return "[" + ",".join("?" if size is None else str(size) for size in spec.shape) + "]"


def batch_spec(iterator: Any) -> Any:
    """What one replica's part of a batch looks like, as nested `tf.TensorSpec`, or `None` if that isn't known."""
    spec = getattr(iterator, "element_spec", None)
    if spec is None:
        return None
    return tf.nest.map_structure(lambda each: getattr(each, "_value_specs", (each,))[0], spec)


def gradient_graph(model: Any, spec: Any, examples: int) -> tf.Graph:
    """The graph of the forward and backward pass on a batch.

    Args:
        model: A built and compiled model.
        spec: A batch, as nested `tf.TensorSpec`.
        examples: How many examples it has.
    """

    def gradients(*parts):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tf.nest.pack_sequence_as(spec, parts))
        with untouched(model, never_run()):
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True)
                loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            return [each for each in tape.gradient(loss, model.trainable_variables) if each is not None]

    sized = [tf.TensorSpec([examples, *leaf.shape[1:]], leaf.dtype) for leaf in tf.nest.flatten(spec)]
    return tf.function(releasing(gradients), autograph=False).get_concrete_function(*sized).graph
