"""Gradient functions of `tf.custom_gradient`, kept as long as the graph that needs them, and no longer.

In a graph, TensorFlow registers the gradient function of each `tf.custom_gradient` under a new name, for ever. The
function holds tensors of the graph, and so the whole graph. The step of Keras has one, in the all-reduce of its
optimizer: this is why a process that makes many models grows by some MB with each.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

Result = TypeVar("Result")

_PREFIX = "CustomGradient-"
_KEPT = "_keras_paragrad_gradient_functions"


def releasing(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function to be traced, with whose graph all that was registered for its gradients goes.

    Args:
        function: What a `tf.function` of ours is to be made of.
    """

    @functools.wraps(function)
    def traced(*arguments: Any, **keywords: Any) -> Result:
        try:
            return function(*arguments, **keywords)
        finally:
            if not tf.executing_eagerly():
                keep_with_graphs([tf.compat.v1.get_default_graph()])

    return traced


def keep_with_graphs(graphs: Iterable[tf.Graph]) -> None:
    """Has graphs keep the gradient functions that were registered while they were traced, in place of the registry.

    What is differentiated finds them as before, as long as it is there. Other graphs' are left as they are.

    Args:
        graphs: Graphs of `tf.function`s. Those of the branches and loops in them belong to them.
    """
    wanted = {id(graph) for graph in graphs}
    if not wanted:
        return
    entries = gradient_registry._registry
    for name in [name for name in list(entries) if name.startswith(_PREFIX)]:
        function = entries[name]["type"]
        around = list(_around(_graph_of(function)))
        if wanted.intersection(map(id, around)):
            for graph in around:
                if not hasattr(graph, _KEPT):
                    setattr(graph, _KEPT, [])
                getattr(graph, _KEPT).append(function)
            entries[name] = {**entries[name], "type": _by_reference(weakref.ref(function))}
            weakref.finalize(function, entries.pop, name, None).atexit = False


def keep_with_graphs_of(owner: Any) -> Callable[[], None]:
    """For an object that is called in steps that others trace: their graphs' gradient functions, once it is gone.

    Args:
        owner: The object.

    Returns:
        To be called while a step is traced, to note its graph.
    """
    graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
    weakref.finalize(owner, keep_with_graphs, graphs).atexit = False

    def note() -> None:
        graphs.update(_around(tf.compat.v1.get_default_graph()))

    return note


def _graph_of(function: Callable[..., Any]) -> Any:
    """The graph in which a gradient function was made, found in what it refers to."""
    level = [function]
    for _ in range(2):
        contents = [content for each in level for content in _contents(each)]
        tensors = [leaf for content in contents for leaf in tf.nest.flatten(content) if hasattr(leaf, "graph")]
        if tensors:
            return tensors[0].graph
        level = [content for content in contents if callable(content)]
    return None


def _contents(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it any more
            continue


def _around(graph: Any) -> Iterator[tf.Graph]:
    """A function's graph, and those of the functions in which it was traced; none that lasts for ever."""
    while hasattr(graph, "outer_graph"):
        yield graph
        graph = graph.outer_graph


def _by_reference(reference: Callable[[], Any]) -> Callable[..., Any]:
    def gradient(*arguments):
        function = reference()
        if function is None:
            raise LookupError("The graph whose gradient is requested has been released.")
        return function(*arguments)

    return gradient
