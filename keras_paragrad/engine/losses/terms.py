"""Records the terms of a compiled loss as the model computes them. A term is a call of an output's loss."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.private import apply_mask, get_keras_mask
from keras_paragrad.compat.state import MethodPatch, patched
from keras_paragrad.compat.types import Array, Batch, LossArguments, Structure
from keras_paragrad.engine.tracing.untouched import untouched, without_assignments

MEANS = ("sum_over_batch_size", "mean")


@dataclasses.dataclass
class LossTerm:
    """One call of one of the compiled losses.

    Attributes:
        loss: The loss.
        y_true, y_pred, sample_weight: Its arguments.
        result: Its result.
        computed: The loss of every element, if the call has computed it.
    """

    loss: keras.losses.Loss
    y_true: Structure
    y_pred: Structure
    sample_weight: Array | None
    result: Any = None
    computed: tf.Tensor | None = None

    @property
    def reduces_itself(self) -> bool:
        """Whether the loss overrides `__call__`, so that its reduction is unknown."""
        return type(self.loss).__call__ is not keras.losses.Loss.__call__

    @property
    def is_sum(self) -> bool:
        """Whether the loss has no divisor."""
        return self.loss.reduction in ("sum", "none", None)

    @functools.cached_property
    def values(self) -> tf.Tensor:
        """The loss of every element, before the reduction."""
        if self.computed is not None:
            return self.computed

        def convert(tensor: Array):
            return keras.ops.convert_to_tensor(tensor, dtype=self.loss.dtype)

        arguments = (keras.tree.map_structure(convert, tensors) for tensors in (self.y_true, self.y_pred))
        with untouched(self.loss, without_assignments()):
            return tf.convert_to_tensor(self.loss.call(*arguments))

    @property
    def masks(self) -> list[tf.Tensor]:
        """The masks of the model's output and of the loss's values: none, one or both."""
        return [mask for mask in map(get_keras_mask, (self.y_pred, self.values)) if mask is not None]

    @functools.cached_property
    def mask(self) -> tf.Tensor | None:
        """Selects the values that count; `None` if all count."""
        return functools.reduce(tf.logical_and, self.masks) if self.masks else None

    @property
    def weights(self) -> Any:
        """The sample weights times the mask, as the reduction applies them, or `None`."""
        dtype = self.loss.dtype
        weight, mask = (
            None if tensor is None else keras.ops.convert_to_tensor(tensor, dtype=dtype)
            for tensor in (self.sample_weight, self.mask)
        )
        return apply_mask(weight, mask, dtype=dtype, reduction=self.loss.reduction)


def is_summed(model: keras.Model) -> bool:
    """Whether a model's built loss is a sum over the examples, and not a mean."""
    flat = model._compile_loss._flat_losses if model._compile_loss else None
    return bool(flat) and all(loss.loss is None or loss.loss.reduction == "sum" for loss in flat)


def loss_weights_of(model: keras.Model) -> list[Any]:
    """The weights of the compiled losses, once built: numbers, or variables that training may change."""
    flat = model._compile_loss._flat_losses
    return [1.0 if loss.loss_weights is None else loss.loss_weights for loss in flat]


class _Listener(NamedTuple):
    """An open `recorded_terms` context: its replica, its list, and whether trackers are left alone."""

    replica: int
    terms: list[LossTerm]
    untracked: bool


class _Recordings(MethodPatch):
    """Patches a compiled loss so that this replica's listeners get its terms.

    The traces of replicas may be interleaved. Each records its own terms.
    """

    def __init__(self, compiled: Any):
        super().__init__()
        self.compiled, self.listeners = compiled, list[_Listener]()

    @property
    def listeners_here(self) -> list[_Listener]:
        here = replica_index()
        return [listener for listener in self.listeners if listener.replica == here]

    def patch_all(self) -> None:
        # Keras builds the compiled loss on its first call, which may come in this context.
        if self.compiled.built:
            self._record()
        self.replace(self.compiled, "build", functools.partial(self._build, self.compiled.build))

    def restore(self) -> None:
        super().restore()
        flat = self.compiled._flat_losses or []
        self._set([entry.loss.loss if isinstance(entry.loss, _Recording) else entry.loss for entry in flat])

    def _build(self, build: Callable[..., None], *arguments: Structure) -> None:
        build(*arguments)
        self._record()

    def _record(self) -> None:
        self._set([_Recording(entry.loss, self) for entry in self.compiled._flat_losses])
        for tracker in self.compiled.metrics:
            self.replace(tracker, "update_state", functools.partial(self._track, tracker.update_state))

    def _set(self, losses: list[Any]) -> None:
        """Replaces the losses in the compiled loss's entries, in order."""
        if losses:
            pairs = zip(self.compiled._flat_losses, losses, strict=True)
            self.compiled._flat_losses = [flat._replace(loss=loss) for flat, loss in pairs]

    def _track(self, update_state: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        if not any(listener.untracked for listener in self.listeners_here):
            update_state(*arguments, **keywords)


class _Recording:
    """Proxy of a compiled loss that passes its calls to all listeners on this replica."""

    def __init__(self, loss: keras.losses.Loss, recordings: _Recordings):
        self.loss, self.recordings = loss, recordings

    def __call__(self, y_true: Structure, y_pred: Structure, sample_weight: Array | None = None):
        with _noted_values(self.loss) as values:
            result = self.loss(y_true, y_pred, sample_weight)
        term = LossTerm(self.loss, y_true, y_pred, sample_weight, result)
        if len(values) == 1 and not term.reduces_itself:
            # Keeps the values, so that the loss isn't traced twice.
            term.computed = tf.convert_to_tensor(values[0])
        for listener in self.recordings.listeners_here:
            listener.terms.append(term)
        return result


class _NotedCall:
    """The `call` of a loss, which records its results."""

    def __init__(self, call: Callable[..., Any]):
        self.call, self.values = call, list[Any]()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.values.append(self.call(*arguments, **keywords))
        return self.values[-1]


@contextlib.contextmanager
def _noted_values(loss: keras.losses.Loss) -> Generator[list[Any]]:
    """Context in which a loss appends the results of its `call` to the yielded list."""
    call: Any = loss.call
    # The traces of replicas are interleaved: this may be the recorder of another replica, which waits for this one.
    noted = _NotedCall(call.call if isinstance(call, _NotedCall) else call)
    replaced = vars(loss).get("call")
    vars(loss)["call"] = noted
    try:
        yield noted.values
    finally:
        if replaced is None or isinstance(replaced, _NotedCall):
            vars(loss).pop("call", None)
        else:
            vars(loss)["call"] = replaced


@contextlib.contextmanager
def recorded_terms(model: keras.Model, *, untracked: bool = False) -> Generator[list[LossTerm]]:
    """Context in which `model.compute_loss` appends the terms of the compiled loss to the yielded list.

    Several contexts may be open at a time, and close in any order. If `untracked`, Keras's trackers of outputs' losses
    aren't updated.
    """
    check_internals("models")
    terms: list[LossTerm] = []
    compiled = model._compile_loss
    if compiled is None:
        yield terms
        return
    with patched(compiled, lambda: _Recordings(compiled)) as recordings:
        recordings.listeners.append(_Listener(replica_index(), terms, untracked))
        try:
            yield terms
        finally:
            recordings.listeners[:] = [other for other in recordings.listeners if other.terms is not terms]


def arguments_of(data: Batch, y_pred: Structure = None) -> LossArguments:
    """The arguments of `compute_loss` for the data of a step, and outputs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}


class ComputedLoss(NamedTuple):
    """A model's loss, the arguments of its `compute_loss`, and the terms of its compiled losses."""

    loss: tf.Tensor
    arguments: LossArguments
    terms: list[LossTerm]


def compute_loss(
    model: keras.Model, data: Batch, *, y_pred: Structure = None, training: bool = True, untracked: bool = True
) -> ComputedLoss:
    """Computes the loss of a batch, or of its outputs `y_pred`, as Keras does. `untracked`: see `recorded_terms`."""
    arguments = arguments_of(data, y_pred)
    if y_pred is None:
        arguments["y_pred"] = call_model(model, arguments["x"], training=training)
    with recorded_terms(model, untracked=untracked) as terms:
        return ComputedLoss(model._compute_loss(**arguments, training=training), arguments, terms)


def bound_arguments(loss_or_metric: keras.losses.Loss | keras.metrics.Metric) -> dict[str, Any]:
    """The keyword arguments, such as `delta`, of the function that a loss or metric wraps."""
    return dict(getattr(loss_or_metric, "_fn_kwargs", None) or {})
