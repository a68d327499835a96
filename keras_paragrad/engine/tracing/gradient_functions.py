"""Releases the gradient functions of `tf.custom_gradient` with the graph that needs them.

In a graph, TensorFlow registers the gradient function of each `tf.custom_gradient` under a new name, forever. The
function holds tensors of the graph, and so the whole graph. The optimizer's all-reduce in Keras's step has one, so a
process that makes many models leaks some MB with each.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from keras_paragrad.compat.private import gradient_registry
from keras_paragrad.compat.types import Structure

Result = TypeVar("Result")

_PREFIX = "CustomGradient-"
_FUNCTIONS = "_keras_paragrad_gradient_functions"


def releasing(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps a function for `tf.function`, so that its gradient functions are released with its graph."""

    @functools.wraps(function)
    def traced(*arguments: Any, **keywords: Any) -> Result:
        try:
            return function(*arguments, **keywords)
        finally:
            if not tf.executing_eagerly():
                keep_with_graphs([tf.compat.v1.get_default_graph()])

    # TensorFlow warns of functions with the same code that are often traced. A partial has no code, so none is shared.
    alone = functools.partial(traced)
    vars(alone)["__name__"] = getattr(function, "__name__", "traced")
    return alone


def keep_with_graphs(graphs: Iterable[tf.Graph]) -> None:
    """Moves gradient functions from the registry to the graphs that use them.

    The registry keeps weak references, which are valid as long as the graph exists.
    """
    wanted = {id(graph) for graph in graphs}
    if not wanted:
        return
    entries = gradient_registry._registry
    for name in [name for name in list(entries) if name.startswith(_PREFIX)]:
        entry = entries.get(name)
        if entry is None:
            # The function has been freed meanwhile.
            continue
        function = entry["type"]
        enclosing = list(_enclosing_graphs(_graph_of(function)))
        if wanted.intersection(map(id, enclosing)):
            for graph in enclosing:
                if not hasattr(graph, _FUNCTIONS):
                    setattr(graph, _FUNCTIONS, [])
                getattr(graph, _FUNCTIONS).append(function)
            entries[name] = {**entry, "type": _by_reference(weakref.ref(function))}
            weakref.finalize(function, entries.pop, name, None).atexit = False


def keep_with_graphs_of(owner: object) -> Callable[[], None]:
    """Calls `keep_with_graphs` for the graphs that called an object, when the object is deleted.

    Returns a function to call while a step is traced, which records its graph.
    """
    graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
    weakref.finalize(owner, keep_with_graphs, graphs).atexit = False

    def note() -> None:
        graphs.update(_enclosing_graphs(tf.compat.v1.get_default_graph()))

    return note


def _graph_of(function: Callable[..., object]) -> tf.Graph | None:
    """The graph of a gradient function, found through its closures."""
    level = [function]
    # From TensorFlow 2.22 on, the registered function holds no results, but the user's function may hold tensors.
    for _ in range(3):
        contents = [content for function in level for content in closure_contents(function)]
        tensors = [leaf for content in contents for leaf in tf.nest.flatten(content) if hasattr(leaf, "graph")]
        if tensors:
            return tensors[0].graph
        level = [content for content in contents if callable(content)]
    return None


def closure_contents(function: object) -> Iterator[object]:
    """The objects that a function refers to through its closure."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _enclosing_graphs(graph: Any) -> Iterator[tf.Graph]:
    """A function's graph, and those of the functions around it. Graphs that are never deleted are left out."""
    while hasattr(graph, "outer_graph"):
        yield graph
        graph = graph.outer_graph


def _by_reference(reference: Callable[[], Callable[..., Structure] | None]) -> Callable[..., Structure]:
    """A gradient function for the registry, which calls a weakly referenced one."""

    def gradient(*arguments: tf.Tensor):
        function = reference()
        if function is None:
            raise LookupError("The graph whose gradient is requested has been released.")
        return function(*arguments)

    return gradient
