"""An update of the weights, watched from within the optimizer that makes it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad._keras.additions import Additions
from keras_paragrad._keras.apply import parts, unscaled
from keras_paragrad._keras.optimizer import WrappingOptimizer
from keras_paragrad._keras.replaced import Replacement, replaced
from keras_paragrad._keras.replicas import replica_count, replica_index, sum_over_replicas

_WATCH = "_keras_paragrad_watch"
_REDUCE = "_all_reduce_sum_gradients"


class Update(NamedTuple):
    """An update as a step is traced, on one replica; lists have an item for each of the model's trainable weights.

    Attributes:
        number: Which of the optimizer's updates it is, counted from 1.
        gradients: The gradients of all replicas before they are clipped, without loss scale; `None` where there is
            none, and where Keras assigns the weight its gradient as it is.
        clipped: The same after clipping, as the optimizer's update rule gets them.
        before: The weights before the update.
        change: What the update added to the weights or took from them.
        learning_rate: As the update rule gets it.
        loss_scale: What the loss was multiplied with.
    """

    number: tf.Tensor
    gradients: list[tf.Tensor | None]
    clipped: list[tf.Tensor | None]
    before: list[tf.Tensor]
    change: list[tf.Tensor]
    learning_rate: tf.Tensor
    loss_scale: tf.Tensor


@contextlib.contextmanager
def watched(model: Any, show: Callable[[Update], None] | None) -> Iterator[None]:
    """While a step is traced in it, shows the updates that it makes; entered on every replica.

    Args:
        model: A compiled model.
        show: Called on each replica, right after the update and in the same branch; nothing happens, if `None`.
    """
    if show is None:
        yield
        return
    optimizer = updating(model.optimizer)
    with replaced(optimizer, _WATCH, lambda: _Watch(model, optimizer, show)):
        yield


def updating(optimizer: keras.optimizers.Optimizer) -> Any:
    """The optimizer whose `apply` updates the weights: the one inside those that scale the loss or accumulate."""
    optimizer = unscaled(optimizer)
    return optimizer.inner_optimizer if isinstance(optimizer, WrappingOptimizer) else optimizer


def updates_each_batch(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer makes an update whenever it gets a gradient."""
    inside = unscaled(optimizer)
    accumulates = isinstance(inside, WrappingOptimizer) or any(
        part.gradient_accumulation_steps for part in parts(inside)
    )
    return not accumulates


def clips(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer clips gradients."""
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    return any(getattr(part, name) for part in parts(updating(optimizer)) for name in names)


def _difference(weight: Any, before: tf.Tensor) -> tf.Tensor:
    return tf.cast(weight.value, "float32") - tf.cast(before, "float32")


class _Seen:
    """What has been seen of one replica's update."""

    def __init__(self, weights: list[Any]):
        self.weights = weights
        # Identities, for a variable that is read and updated in one step.
        self.before = [tf.identity(weight.value) for weight in weights]
        self.additions = Additions(weights)
        self.unclipped: list[Any] = []
        self.gradients: list[tf.Tensor | None] = [None] * len(weights)
        self.clipped: list[tf.Tensor | None] = [None] * len(weights)
        self.learning_rate: Any = 0.0

    def change(self) -> list[tf.Tensor]:
        """What the update has added to the weights or taken from them."""
        seen = zip(self.additions.read_off(), self.weights, self.before, strict=True)
        return [_difference(weight, before) if added is None else added for added, weight, before in seen]


class _Watch(Replacement):
    """An optimizer's methods, replaced by ones that take note of what they are called with."""

    def __init__(self, model: Any, optimizer: Any, show: Callable[[Update], None]):
        super().__init__()
        self.model, self.optimizer, self.show = model, optimizer, show
        self.weights = list(model.trainable_variables)
        self.places = {id(weight): place for place, weight in enumerate(self.weights)}
        self.seen: dict[int, _Seen] = {}

    def replace_all(self) -> None:
        for part in parts(self.optimizer):
            self.replace(part, "_clip_gradients", self._clipping(part, part._clip_gradients))
            self.replace(part, "_backend_update_step", self._stepping(part, part._backend_update_step))
        self.replace(self.optimizer, "apply", self._applying(self.optimizer, self.optimizer.apply))

    def _applying(self, optimizer: Any, original: Callable) -> Callable:
        def apply(*arguments, **keywords):
            seen = self.seen[replica_index()] = _Seen(self.weights)
            result = original(*arguments, **keywords)
            if not optimizer.gradient_accumulation_steps:
                self._finish(seen, optimizer.iterations)
            return result

        return apply

    def _clipping(self, optimizer: Any, original: Callable) -> Callable:
        def clip(gradients):
            self.seen[replica_index()].unclipped = list(gradients)
            return original(gradients)

        return clip

    def _stepping(self, optimizer: Any, original: Callable) -> Callable:
        def step(gradients, variables, learning_rate):
            seen = self.seen[replica_index()]
            seen.learning_rate = learning_rate
            places = [self.places[id(variable)] for variable in variables]
            both = self._of_all_replicas(optimizer, places, [*seen.unclipped, *gradients])
            for index, place in enumerate(places):
                seen.gradients[place], seen.clipped[place] = both[index], both[index + len(places)]
            result = original(gradients, variables, learning_rate)
            if optimizer.gradient_accumulation_steps:
                # Here, as Keras's own accumulation has its update in a branch.
                self._finish(seen, optimizer.iterations + 1)
            return result

        return step

    def _of_all_replicas(self, optimizer: Any, places: list[int], gradients: Sequence[Any]) -> list[tf.Tensor]:
        dense = [self._dense(places[index % len(places)], gradient) for index, gradient in enumerate(gradients)]
        summed_already = optimizer.__dict__.get(_REDUCE) is list
        return dense if summed_already or replica_count() == 1 else sum_over_replicas(dense)

    def _dense(self, place: int, gradient: Any) -> tf.Tensor:
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        rows = self.weights[place].shape[0]
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)

    def _finish(self, seen: _Seen, number: Any) -> None:
        scale = self.model.optimizer.scale_loss(tf.constant(1.0))
        self.show(
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
