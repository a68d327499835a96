"""Observes updates of the weights from within the optimizer."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import accumulating, accumulation_steps, parts, updating
from keras_paragrad.compat.collectives import replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.method_patch import MethodPatch, patched
from keras_paragrad.storage.gradients import gather_gradients

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


_REDUCE = "_all_reduce_sum_gradients"


class Update(NamedTuple):
    """An update as a step is traced, on one replica; lists have an item for each weight that is watched.

    Attributes:
        number: Which of the optimizer's updates it is, counted from 1.
        gradients: The gradients of all replicas before they are clipped, without loss scale; `None` where there is
            none, and where Keras assigns the weight its gradient as it is.
        clipped: The same after clipping, as the optimizer's update rule gets them.
        before: The weights before the update.
        change: What the update added to the weights or took from them.
        learning_rate: As the update rule gets it.
        loss_scale: The factor of the loss.
    """

    number: tf.Tensor
    gradients: list[tf.Tensor | None]
    clipped: list[tf.Tensor | None]
    before: list[tf.Tensor]
    change: list[tf.Tensor]
    learning_rate: tf.Tensor
    loss_scale: tf.Tensor


class Watcher(Protocol):
    """Looks at updates of the weights, while a step is traced."""

    def watch(self, updated: Sequence[keras.Variable], known: Sequence[keras.Variable]) -> Sequence[keras.Variable]:
        """The weights to look at, in order; called on each replica before each update.

        Args:
            updated: The weights that the update is for.
            known: All that the optimizer was built for.
        """
        ...

    def show(self, update: Update) -> None:
        """Records an update; called on each replica, right after the update and in the same branch."""
        ...


@contextlib.contextmanager
def watched(model: Any, watcher: Watcher | None) -> Iterator[None]:
    """While a step is traced in it, shows the updates that it makes; entered on every replica.

    Args:
        model: A compiled model. It may get its weights in that step.
        watcher: Who looks at the updates; nothing happens, if `None`.
    """
    if watcher is None:
        yield
        return
    optimizer = updating(model.optimizer)
    with patched(optimizer, lambda: Watch(model, optimizer, watcher)):
        yield


def updates_each_batch(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer makes an update whenever it gets a gradient."""
    return accumulating(optimizer) is None and accumulation_steps(optimizer) == 1


def _difference(weight: Any, before: tf.Tensor) -> tf.Tensor:
    return tf.cast(weight.value, "float32") - tf.cast(before, "float32")


def _dense(gradient: Any, variable: Any) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


class _Seen:
    """What has been seen of one replica's update."""

    def __init__(self, weights: Sequence[Any]):
        self.weights = weights
        self.places = {id(weight): place for place, weight in enumerate(weights)}
        # Identities, for a variable that is read and updated in one step.
        self.before = [tf.identity(weight.value) for weight in weights]
        self.additions = WeightDeltas(weights)
        self.unclipped: list[Any] = []
        self.gradients: list[tf.Tensor | None] = [None] * len(weights)
        self.clipped: list[tf.Tensor | None] = [None] * len(weights)
        self.learning_rate: Any = 0.0

    def change(self) -> list[tf.Tensor]:
        """What the update has added to the weights or taken from them."""
        seen = zip(self.additions.read_off(), self.weights, self.before, strict=True)
        return [_difference(weight, before) if added is None else added for added, weight, before in seen]


class Watch(MethodPatch):
    """Who watches the updates of the step that is being traced; kept by the innermost optimizer."""

    def __init__(self, model: Any, optimizer: Any, watcher: Watcher):
        super().__init__()
        self.model, self.optimizer, self.watcher = model, optimizer, watcher
        self.seen: dict[int, _Seen] = {}

    def patch_all(self) -> None:
        for part in parts(self.optimizer):
            self.replace(part, "_clip_gradients", self._clipping(part, part._clip_gradients))
            self.replace(part, "_backend_update_step", self._stepping(part, part._backend_update_step))

    def begin(self, given: Sequence[Any] | None) -> None:
        """Begins an update of the weights given, or of all, if `None`; called on each replica."""
        # Asked here and not earlier: an unbuilt model gets its weights in the forward pass of this step.
        known = list(self.optimizer._trainable_variables) if self.optimizer.built else given or []
        self.seen[replica_index()] = _Seen(self.watcher.watch(known if given is None else given, known))

    def end(self) -> None:
        """Shows the update that `begin` began, if Keras's own accumulation hasn't."""
        if not self.optimizer.gradient_accumulation_steps:
            self._finish(self.seen[replica_index()], self.optimizer.iterations)

    def _clipping(self, optimizer: Any, original: Callable) -> Callable:
        def clip(gradients):
            self.seen[replica_index()].unclipped = list(gradients)
            return original(gradients)

        return clip

    def _stepping(self, optimizer: Any, original: Callable) -> Callable:
        def step(gradients, variables, learning_rate):
            seen = self.seen[replica_index()]
            seen.learning_rate = learning_rate
            places = [seen.places[id(variable)] for variable in variables]
            found = gather_gradients([*seen.unclipped, *gradients], [*variables, *variables])
            both = self._of_all_replicas(optimizer, variables, found)
            for index, place in enumerate(places):
                seen.gradients[place], seen.clipped[place] = both[index], both[index + len(places)]
            result = original(gradients, variables, learning_rate)
            if optimizer.gradient_accumulation_steps:
                # Here, as Keras's own accumulation has its update in a branch.
                self._finish(seen, optimizer.iterations + 1)
            return result

        return step

    def _of_all_replicas(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]) -> list[tf.Tensor]:
        dense = [_dense(gradient, variables[index % len(variables)]) for index, gradient in enumerate(gradients)]
        summed_already = optimizer.__dict__.get(_REDUCE) is list
        return dense if summed_already or replica_count() == 1 else sum_over_replicas(dense)

    def _finish(self, seen: _Seen, number: Any) -> None:
        scale = self.model.optimizer.scale_loss(tf.constant(1.0))
        self.watcher.show(
            Update(
                tf.cast(tf.convert_to_tensor(number), "int64"),
                seen.gradients,
                seen.clipped,
                seen.before,
                seen.change(),
                tf.cast(tf.convert_to_tensor(seen.learning_rate), "float32"),
                tf.cast(scale, "float32"),
            )
        )
