"""Shows gradients to an `Observe`, and updates to a `Watcher`, from within the optimizer."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.model import optimizers_of, overrides_train_step
from keras_paragrad.compat.optimizer import (
    REDUCTION,
    accumulation_steps,
    find_accumulator,
    held_optimizers,
    innermost_optimizer,
    reduces_gradients,
    updating_optimizers,
)
from keras_paragrad.compat.state import MethodPatch, patch_of, patched
from keras_paragrad.compat.types import Gradients, GradientTensor, Scalar
from keras_paragrad.storage.row_gradients import scale_gradient
from keras_paragrad.storage.storage import gather_gradients

_ADDITIONS = ("AssignAddVariableOp", "AssignSubVariableOp")
# In other dtypes, the weight is rounded, so it doesn't change by the tensor that is added.
_PRECISE_DTYPES = ("float32", "float64")


class Observe(Protocol):
    """Receives gradients within the step, on each replica, without loss scale."""

    def gradient(self, gradients: Gradients, rows: tf.Tensor) -> None:
        """Receives a replica batch's gradients (`None` for a weight without one) and number of examples."""
        ...

    def update(self, gradients: Gradients) -> None:
        """Receives an update's gradients, over the window and all replicas (`None` for a weight without one)."""
        ...


@contextlib.contextmanager
def observing_gradients(model: keras.Model, observe: Observe | None, rows: tf.Tensor) -> Generator[None]:
    """Context in which a traced step shows gradients to an observer. Each replica enters it, with its row count."""
    if observe is None:
        yield
        return
    with patched(innermost_optimizer(model.optimizer), lambda: Observation(model.optimizer, observe)) as observation:
        observation.rows[replica_index()] = rows
        yield


def observe_gradient(optimizer: keras.optimizers.Optimizer, gradients: Gradients) -> None:
    """Passes the gradients of a replica's micro-batch, without loss scale, to the step's observer, if any."""
    observation = patch_of(innermost_optimizer(optimizer), Observation)
    if observation is not None:
        observation.observe_gradient(gradients)


def observe_before_all_reduce(model: keras.Model, gradients: Gradients, factor: tf.Tensor) -> None:
    """Passes a replica's gradients, times the loss scale and `factor`, to the step's observer, if any."""
    observation = patch_of(innermost_optimizer(model.optimizer), Observation)
    if observation is not None:
        factor = factor * tf.cast(model.optimizer.scale_loss(tf.constant(1.0)), "float32")
        observation.before_optimizer = True
        observation.observe_gradient(
            [scale_gradient(gradient, tf.math.reciprocal_no_nan(factor)) for gradient in gradients]
        )


class Observation(MethodPatch):
    """The observer of the step that is being traced, attached to the innermost optimizer."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, observe: Observe):
        super().__init__()
        self.optimizer, self.observer = innermost_optimizer(optimizer), observe
        self.rows: dict[int, tf.Tensor] = {}
        # Whether gradients of replica batches are observed before the innermost optimizer gets them.
        self.before_optimizer = find_accumulator(optimizer) is not None

    def patch_all(self) -> None:
        # Keras sums the gradients of replicas within `apply`.
        if replica_count() > 1 and not self.before_optimizer:
            self.replace(self.optimizer, REDUCTION, self._sum)

    def observe_gradient(self, gradients: Gradients) -> None:
        """Passes on the gradients of this replica's batch."""
        self.observer.gradient(gradients, self.rows[replica_index()])

    def observe_update(self, gradients: Gradients) -> None:
        """Passes on the gradients of an update, before it is applied."""
        if not self.before_optimizer:
            self.observe_gradient(gradients)
        # In the other case, `_sum` passes the update on.
        if self.before_optimizer or replica_count() == 1:
            self.observer.update(gradients)

    def _sum(self, grads_and_vars: Iterable[tuple[GradientTensor, keras.Variable]]) -> list[tf.Tensor]:
        """Replaces Keras's sum of gradients over the replicas, and shows the result to the observer."""
        optimizer: keras.optimizers.Optimizer = self.optimizer
        summed = list(type(optimizer)._all_reduce_sum_gradients(optimizer, grads_and_vars))
        self.observer.update([gradient for gradient, _ in summed])
        return summed


class WeightDeltas:
    """Finds the tensors that operations traced from now on add to weights."""

    def __init__(self, weights: Sequence[keras.Variable]):
        self._weights = weights
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._start = len(self._graph.get_operations()) if self._graph else 0

    def read_off(self) -> list[tf.Tensor | None]:
        """The tensor added to or subtracted from each weight.

        `None` if several operations change the weight, as with weight decay or a constraint, or if there is no graph.
        """
        graph: Any = self._graph
        if graph is None or graph is not tf.compat.v1.get_default_graph() or replica_count() > 1:
            return [None] * len(self._weights)
        changing: dict[str, list[tf.Operation]] = defaultdict(list)
        for operation in graph.get_operations()[self._start :]:
            for handle in operation.inputs:
                if handle.dtype == tf.resource and operation.type != "ReadVariableOp":
                    changing[handle.name].append(operation)
        return [_delta(weight, changing[graph.capture(weight.value.handle).name]) for weight in self._weights]


def _delta(weight: keras.Variable, changing: list[tf.Operation]) -> tf.Tensor | None:
    """The tensor added to or subtracted from a weight, if one operation changes it; else `None`."""
    if len(changing) != 1 or changing[0].type not in _ADDITIONS or weight.dtype not in _PRECISE_DTYPES:
        return None
    return changing[0].inputs[1]


class Update(NamedTuple):
    """An update on one replica while a step is traced. Lists have an item for each watched weight.

    Attributes:
        number: The number of the optimizer's update, from 1.
        gradients: The gradients of all replicas before clipping, without loss scale; `None` for a weight without one,
            or that Keras overwrites with its gradient.
        clipped: The gradients after clipping, as in the update rule.
        before, change: The weights before the update, and the tensors that it adds to them.
    """

    number: tf.Tensor
    gradients: list[tf.Tensor | None]
    clipped: list[tf.Tensor | None]
    before: list[tf.Tensor]
    change: list[tf.Tensor]
    learning_rate: tf.Tensor
    loss_scale: tf.Tensor
    weights: Sequence[keras.Variable]
    optimizer: keras.optimizers.Optimizer


class Watcher(Protocol):
    """Receives updates of the weights while a step is traced."""

    def watch(self, updated: Sequence[keras.Variable], known: Sequence[keras.Variable]) -> Sequence[keras.Variable]:
        """Chooses the weights to watch among the `updated` and `known` ones; called on each replica."""
        ...

    def show(self, update: Update) -> None:
        """Records an update; called on each replica, right after the update and in the same branch."""
        ...


class Telemetry(Watcher, Protocol):
    """Watches some of the updates."""

    def wants(self, updates: int | None) -> bool:
        """Whether to watch the next call. It has at most `updates` updates, or an unknown number if `None`."""
        ...

    def latest(self) -> tf.Tensor:
        """The latest recorded values, while a step is traced. With one replica, `ran` gets them on the host."""
        ...

    def ran(self, watched: bool, batches: int, latest: tf.Tensor | None) -> None:
        """Called after the call has run, with the latest recorded values, if known."""
        ...


@contextlib.contextmanager
def watching_updates(optimizers: Sequence[keras.optimizers.Optimizer], watcher: Watcher | None) -> Generator[None]:
    """Context in which a traced step shows updates to a watcher. Each replica enters it."""
    with contextlib.ExitStack() as watched:
        if watcher is not None:
            for outer in optimizers:
                make = functools.partial(UpdateWatch, outer, innermost_optimizer(outer), watcher)
                watched.enter_context(patched(innermost_optimizer(outer), make))
        yield


def updates_each_batch(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer updates the weights with every gradient."""
    return find_accumulator(optimizer) is None and accumulation_steps(optimizer) == 1


def watched_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers to watch: `model.optimizer`, and then others that a custom `train_step` may call."""
    return optimizers_of(model) if overrides_train_step(model) else [model.optimizer]


def refuse_unwatched(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses updates by an optimizer that telemetry doesn't track."""
    watched = watched_optimizers(model)
    if not any(optimizer is inner for outer in watched for inner in held_optimizers(outer)):
        raise ValueError(
            f"The train_step of {type(model).__name__} updates weights with {optimizer.name!r}, which "
            "GradientTelemetry doesn't track. Make it an attribute of the model."
        )
    if len(watched) > 1 and not all(map(updates_each_batch, watched)):
        raise ValueError(
            f"GradientTelemetry can measure several optimizers of {type(model).__name__} only if each updates on every "
            "batch, but one of them accumulates gradients. Write microbatch(model, size) in its place."
        )


class _UpdateRecord:
    """Records one replica's update while it is traced."""

    def __init__(self, weights: Sequence[keras.Variable]):
        self.weights = weights
        self.positions = {id(weight): position for position, weight in enumerate(weights)}
        # Copies: the variables are read and updated in one step.
        self.before = [tf.identity(weight.value) for weight in weights]
        self.deltas = WeightDeltas(weights)
        self.unclipped: Sequence[GradientTensor] = []
        self.gradients: list[tf.Tensor | None] = [None] * len(weights)
        self.clipped: list[tf.Tensor | None] = [None] * len(weights)
        self.learning_rate: Scalar = 0.0

    def change(self) -> list[tf.Tensor]:
        """The difference between the weights after and before the update."""
        changes = zip(self.deltas.read_off(), self.weights, self.before, strict=True)
        return [
            tf.cast(weight.value, "float32") - tf.cast(before, "float32") if delta is None else delta
            for delta, weight, before in changes
        ]


def _dense(gradient: GradientTensor, variable: keras.Variable) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


class UpdateWatch(MethodPatch):
    """Patches the innermost optimizer so that its updates reach `watcher` while a step is traced."""

    def __init__(self, outermost: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer, watcher: Watcher):
        super().__init__()
        self.outermost, self.optimizer, self.watcher = outermost, optimizer, watcher
        self.records: dict[int, _UpdateRecord] = {}

    def patch_all(self) -> None:
        for inner in updating_optimizers(self.optimizer):
            self.replace(inner, "_clip_gradients", functools.partial(self._clip, inner._clip_gradients))
            step = functools.partial(self._step, inner, inner._backend_update_step)
            self.replace(inner, "_backend_update_step", step)

    def begin(self, weights: Sequence[keras.Variable] | None) -> None:
        """Begins an update of some weights, or of all if `None`; called on each replica."""
        # If the model is unbuilt, the forward pass of this step creates its weights.
        known = list(self.optimizer._trainable_variables) if self.optimizer.built else weights or []
        self.records[replica_index()] = _UpdateRecord(self.watcher.watch(known if weights is None else weights, known))

    def end(self) -> None:
        """Shows the update, unless Keras's own accumulation decides when there is one."""
        if not self.optimizer.gradient_accumulation_steps:
            self._show(self.records[replica_index()], self.optimizer.iterations)

    def _clip(self, original: Callable[..., Any], gradients: Sequence[GradientTensor]) -> Any:
        self.records[replica_index()].unclipped = list(gradients)
        return original(gradients)

    def _step(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[..., None],
        gradients: Sequence[GradientTensor],
        variables: Sequence[keras.Variable],
        learning_rate: Scalar,
    ) -> None:
        """Replaces an optimizer's update rule, which is `original`. Records gradients and learning rate first."""
        record = self.records[replica_index()]
        record.learning_rate = learning_rate
        positions = [record.positions[id(variable)] for variable in variables]
        # One call gathers sharded gradients, both before and after clipping.
        gathered = gather_gradients([*record.unclipped, *gradients], [*variables, *variables])
        both = [_dense(gradient, variables[index % len(variables)]) for index, gradient in enumerate(gathered)]
        # Other optimizers get gradients that are all-reduced.
        if replica_count() > 1 and reduces_gradients(optimizer):
            both = sum_over_replicas(both)
        for index, position in enumerate(positions):
            record.gradients[position], record.clipped[position] = both[index], both[index + len(positions)]
        original(gradients, variables, learning_rate)
        if optimizer.gradient_accumulation_steps:
            # This is the branch in which Keras's own accumulation updates.
            self._show(record, optimizer.iterations + 1)

    def _show(self, record: _UpdateRecord, number: Scalar) -> None:
        """Passes an update on to the watcher."""
        scale = self.outermost.scale_loss(tf.constant(1.0))
        self.watcher.show(
            Update(
                tf.cast(tf.convert_to_tensor(number), "int64"),
                record.gradients,
                record.clipped,
                record.before,
                record.change(),
                tf.cast(tf.convert_to_tensor(record.learning_rate), "float32"),
                tf.cast(scale, "float32"),
                record.weights,
                self.optimizer,
            )
        )
