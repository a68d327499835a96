"""`AccumulatingOptimizer`: any Keras optimizer, updating once for several micro-batches."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.optimizer import WrappingOptimizer
from keras_paragrad._keras.replicas.collectives import (
    cross_replica,
    first_replica,
    replica_count,
    replica_index,
    run_if,
)
from keras_paragrad._keras.step.apply import apply_everywhere
from keras_paragrad._keras.step.forward import Normalizer
from keras_paragrad._keras.step.gradient_functions import releasing
from keras_paragrad._keras.step.transform import installed
from keras_paragrad.accumulation.advice import advise_the_callback
from keras_paragrad.accumulation.arguments import (
    ACCUMULATOR_DTYPES,
    TAILS,
    WEIGHTINGS,
    checked_inner,
)
from keras_paragrad.accumulation.host import HostSchedule
from keras_paragrad.accumulation.schedule import Steps, StepsSchedule
from keras_paragrad.accumulation.window import GradientWindow
from keras_paragrad.arguments import check_choice, check_flag, check_text


@keras.saving.register_keras_serializable(package="keras_paragrad")
class AccumulatingOptimizer(WrappingOptimizer):
    """Updates once for every `steps` micro-batches, with exactly the gradient of all of them.

    Learning-rate schedules, `iterations`, moving averages, weight decay, clipping, constraints and callbacks see
    updates and never micro-batches. Under a `tf.distribute` strategy each replica accumulates for itself; once an
    update the sums are all-reduced, and only then clipped. Pass `ExactAccumulation()` to `fit` as well, so that
    micro-batches of different sizes or weights count for what they hold and an epoch's last window is closed.

    In a training loop of your own, `flush()` updates with what an open window holds, and `discard()` empties it.

    Its state, settings and methods are the inner optimizer's: `learning_rate` and `clipnorm` read and set those of the
    inner optimizer, and a checkpoint of the inner optimizer alone can be loaded, or one of this loaded into it.

    Args:
        inner_optimizer: A Keras optimizer: its name, its config or an instance.
        steps: How many micro-batches an update takes: an integer; pairs `(first_update, steps)`; or a callable that
            takes the number of updates made, a scalar int64 tensor, and returns an integer.
        weighting: What a micro-batch counts for. `"auto"` is what its loss was divided by (examples, elements, the sum
            of the sample weights or of the mask), and `"uniform"` is the same for all. `"examples"`,
            `"sample_weight"` and `"mask"` are for a loss of your own, and say what it divides by; `"sum"`, that it
            divides by nothing. All but `"uniform"`
            need `ExactAccumulation()`, and are uniform without it.
        tail: What becomes of a window that is not full when an epoch ends: `"flush"` updates with what it holds,
            `"carry"` goes on with it in the next epoch, `"drop"` forgets it. Without `ExactAccumulation()` windows
            go on through the epochs, and this is for the end of `fit`.
        accumulator_dtype: The dtype of the sums, or `None` for that of each weight.
        skip_nonfinite: Whether a micro-batch with an infinite or NaN gradient counts for nothing, on the replica it
            was on. Under a `LossScaleOptimizer` that is so in any case.
        name: The optimizer's name.

    Raises:
        ValueError: An argument can't be used; the message says what to write instead.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import AccumulatingOptimizer, ExactAccumulation
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile(AccumulatingOptimizer("adam", steps=4), loss="mse")
    >>> x, y = np.ones((80, 8)), np.ones((80, 1))
    >>> history = model.fit(x, y, batch_size=8, callbacks=[ExactAccumulation()], verbose=0)
    >>> int(model.optimizer.iterations)  # ten micro-batches: windows of 4, 4 and 2
    3

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD (2017), https://arxiv.org/abs/1706.02677: section 3, on what a
        gradient that is computed in parts must be normalized by.
    """

    accumulates = True

    def __init__(
        self,
        inner_optimizer: Any,
        steps: Steps = 4,
        *,
        weighting: str = "auto",
        tail: str = "flush",
        accumulator_dtype: str | None = "float32",
        skip_nonfinite: bool = False,
        name: str | None = None,
    ):
        schedule = StepsSchedule(steps)
        weighting = check_choice("weighting", weighting, WEIGHTINGS)
        tail = check_choice("tail", tail, TAILS)
        accumulator_dtype = check_choice("accumulator_dtype", accumulator_dtype, ACCUMULATOR_DTYPES)
        skip_nonfinite = check_flag("skip_nonfinite", skip_nonfinite)
        super().__init__(checked_inner(inner_optimizer), name=check_text("name", name, optional=True))
        self.steps = schedule.steps
        self.schedule = schedule
        self.weighting = weighting
        self.tail = tail
        self.accumulator_dtype = accumulator_dtype
        self.skip_nonfinite = skip_nonfinite
        self._window: GradientWindow | None = None
        self._strategy = tf.distribute.get_strategy()
        self._gathers_only = False
        self._weights: dict[int, Normalizer | None] = {}
        self._with_gradient: set[int] = set()
        self._advised = False

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the accumulators and the inner optimizer's state for the model's trainable `variables`."""
        if self.built:
            return
        # Made while a function is traced, variables would be initialized in a branch, which several devices can't run.
        with tf.init_scope():
            super().build(variables)
            self._strategy = tf.distribute.get_strategy()
            self._window = GradientWindow(self, self.accumulator_dtype)

    @property
    def window(self) -> GradientWindow:
        """The gradients since the last update."""
        if self._window is None:
            raise ValueError(f"{self.name} has not been built. Write optimizer.build(model.trainable_variables) first.")
        return self._window

    def apply(self, grads: Sequence, trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        """Adds a micro-batch's gradients to the window, and updates the variables if that fills it.

        Args:
            grads: A gradient for each variable, dense or `tf.IndexedSlices`, or `None`.
            trainable_variables: The variables; those the optimizer was built with, in order, unless given.

        Raises:
            ValueError: There is no gradient at all, or a variable that the optimizer was not built with.
        """
        if len(grads) == 0:
            return
        if not self.built and trainable_variables is not None:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        window = self.window
        variables = self.trainable_variables if trainable_variables is None else trainable_variables
        given = [(self.index_of(v), g) for g, v in zip(grads, variables, strict=True) if g is not None]
        if not given:
            raise ValueError("No gradients provided for any variable: the loss depends on none of them.")
        indices, gradients = zip(*given, strict=True)
        self._with_gradient.update(indices)
        weight = self._weights.get(replica_index())
        # A counter must not run ahead of a batch that turns out not to exist, where the data's length is unknown.
        with tf.control_dependencies(None if tf.executing_eagerly() else gradients):
            window.add_gradients(indices, gradients, weight, drop_nonfinite=self._drops_nonfinite)
            if not self._gathers_only:
                if weight is None:
                    self._advise()
                self.end_micro_batch()

    @contextlib.contextmanager
    def gathering(self, weight: Normalizer | None = None) -> Iterator[None]:
        """Within it, `apply` only adds a gradient of this weight to the window; `end_micro_batch` has to follow."""
        self._gathers_only = True
        try:
            with self.weighed(weight):
                yield
        finally:
            self._gathers_only = False

    @contextlib.contextmanager
    def weighed(self, weight: Normalizer | None) -> Iterator[None]:
        """Within it, `apply` is given a gradient of this weight on this replica."""
        self._weights[replica_index()] = weight
        try:
            yield
        finally:
            self._weights.pop(replica_index(), None)

    def end_micro_batch(self, update: bool | None = None) -> None:
        """Counts the micro-batch, and updates if it is the window's last; called on every replica.

        Args:
            update: Whether it is the last; where it is `None`, the window's position says so, in the graph.
        """
        if not self.built:
            return  # The model has no trainable weights.

        def end(per_replica):
            position = self.window.position
            last = position + 1 >= self.schedule(self.iterations) if update is None else update
            position.assign_add(1)
            run_if(last, lambda: self._update(per_replica))

        cross_replica(end)

    def _update(self, per_replica) -> None:
        window, count = self.window, len(self.trainable_variables)
        # A window that was loaded, and not yet added to, does not know which variables get gradients.
        indices = sorted(self._with_gradient) or range(count)

        def mean():
            means, weight = window.mean(indices)
            gradients = dict(zip(indices, means, strict=True))
            return [gradients.get(index) for index in range(count)], weight

        gradients, weight = per_replica(mean)
        # A window in which nothing was finite makes no update, not even one with a gradient of zero.
        run_if(
            first_replica(weight) > 0 if self._drops_nonfinite else True,
            lambda: apply_everywhere(per_replica, self.inner_optimizer, gradients, self.trainable_variables),
        )
        per_replica(window.clear)
        window.position.assign(0)

    @property
    def _drops_nonfinite(self) -> bool:
        # A LossScaleOptimizer looks at the first replica's gradients alone.
        return self.skip_nonfinite or (self.loss_is_scaled_outside and replica_count() > 1)

    def flush(self) -> bool:
        """Updates with what the window holds, divided by what that counts for.

        Returns:
            Whether there was anything in the window.
        """
        if not self.built or int(self.window.position.numpy()) == 0:
            return False
        self._compiled_update()
        return True

    def discard(self) -> None:
        """Forgets what the window holds."""
        if self.built:
            self._compiled_clear()
            self.window.position.assign(0)

    def end_epoch(self) -> None:
        """Flushes, carries or drops the open window, as `tail` says."""
        if self.tail == "flush":
            self.flush()
        elif self.tail == "drop":
            self.discard()

    @functools.cached_property
    def host_schedule(self) -> HostSchedule:
        """The host's count of micro-batches, which `ExactAccumulation` goes by."""
        return HostSchedule(self)

    @property
    def _compiled_update(self) -> Callable[[], None]:
        transform = installed(self.inner_optimizer)
        traced_with, update = self.__dict__.get("_compiled_updates", (None, None))
        if update is None or traced_with is not transform:
            update = tf.function(
                releasing(lambda: self._strategy.run(self.end_micro_batch, args=(True,))), autograph=False
            )
            # Straight into `__dict__`: Keras tracks and saves what is assigned as an attribute.
            self.__dict__["_compiled_updates"] = transform, update
        return update

    @functools.cached_property
    def _compiled_clear(self):
        return tf.function(lambda: self._strategy.run(self.window.clear), autograph=False)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Closes the last window, then does what the inner optimizer does when training ends."""
        self.end_epoch()
        self.inner_optimizer.finalize_variable_values(var_list)

    def _advise(self) -> None:
        if self.weighting != "uniform" and not self._advised:
            self._advised = True
            advise_the_callback(self.name)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serialized."""
        return {
            **super().get_config(),
            "steps": keras.saving.serialize_keras_object(self.steps) if callable(self.steps) else self.steps,
            "weighting": self.weighting,
            "tail": self.tail,
            "accumulator_dtype": self.accumulator_dtype,
            "skip_nonfinite": self.skip_nonfinite,
        }
