"""`AccumulatingOptimizer`: any Keras optimizer, with one update for several micro-batches, which are a *window*."""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.accumulation.host import HostSchedule
from keras_paragrad.accumulation.window import GradientWindow, Steps, StepsSchedule, WindowOptions
from keras_paragrad.arguments import check_text, refusal
from keras_paragrad.compat.collectives import OnReplicas, cross_replica, first_replica_values, replica_count, run_if
from keras_paragrad.compat.optimizer import (
    WrappingOptimizer,
    accumulation_steps,
    build_optimizer,
    find_accumulator,
    warn_of_summed_rows,
)
from keras_paragrad.compat.state import Slot, warn
from keras_paragrad.compat.types import Config, Gradients
from keras_paragrad.engine.losses.divisors import DivisorFunction
from keras_paragrad.engine.step.apply import apply_everywhere
from keras_paragrad.engine.step.interception import installed_transform
from keras_paragrad.engine.telemetry.watch import observe_gradient
from keras_paragrad.engine.tracing.gradient_functions import releasing
from keras_paragrad.storage.storage import mesh_of, on_mesh_of
from keras_paragrad.storage.updating import install_storages, squared_norms

# What accumulates in an optimizer's place while `fit` runs with `ExactAccumulation(steps=...)`. It is kept with the
# optimizer, so that the next `fit` compiles nothing and continues an open window.
ACCUMULATOR = Slot["AccumulatingOptimizer | None"]("accumulator", None)


@keras.saving.register_keras_serializable(package="keras_paragrad")
class AccumulatingOptimizer(WrappingOptimizer):
    """Updates once every `steps` micro-batches, with exactly the gradient of the batch they make up.

    Learning-rate schedules, `iterations`, moving averages, weight decay, clipping and constraints see updates, never
    micro-batches, and so do the callbacks in `ExactAccumulation(callbacks=[...])`. Under a `tf.distribute` strategy
    each replica accumulates locally; the sums are all-reduced once per update, and clipped after that. Also pass
    `ExactAccumulation()` to `fit`: it weights micro-batches of different sizes or sample weights correctly, and closes
    an epoch's last window.

    In a custom training loop, `flush()` updates with the gradients of an open window, and `discard()` empties it.

    Optimizer wrapper that delegates state, settings and methods to `inner_optimizer`: `learning_rate` and `clipnorm`
    read and set the inner optimizer's. Checkpoints of the wrapper and of the inner optimizer alone are
    interchangeable.

    Args:
        inner_optimizer: A Keras optimizer: its name, its config or an instance.
        steps: How many micro-batches an update takes: an integer, or pairs `(first_update, steps)`.
        weighting: The weight of a micro-batch. `"auto"` reads it off Keras's losses: the number of examples or
            elements, the sum of the sample weights or of the mask. A custom `compute_loss`, a loss of one number and
            losses that layers add need it stated: `"examples"`, `"sample_weight"` and `"mask"` name it, `"sum"` says
            that the loss has none, and a function maps `(x, y, y_pred, sample_weight)` of a micro-batch to it. If
            another name fits the first update's rows and the stated one doesn't, it raises. `"uniform"` weights all
            equally: it needs micro-batches of one size, a mean, and nothing that happens once per update. All but
            `"uniform"` need `ExactAccumulation()`, and are uniform without it.
        tail: What to do with a partial window at the end of an epoch: `"flush"` updates with it, `"carry"` continues
            it in the next epoch, `"drop"` discards it. Without `ExactAccumulation()`, windows continue across epochs
            and this applies at the end of `fit`.
        accumulator_dtype: The dtype of the accumulators, or `None` for each weight's dtype.
        skip_nonfinite: Whether a replica skips micro-batches with an infinite or NaN gradient. Always so under a
            `LossScaleOptimizer`.
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
        Goyal et al., Accurate, Large Minibatch SGD (2017), https://arxiv.org/abs/1706.02677: section 3, on
        normalizing a gradient that is computed in parts.
    """

    accumulates = True
    _with_gradient: dict[int, bool]

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | Config,
        steps: Steps = 4,
        *,
        weighting: str | DivisorFunction = "auto",
        tail: str = "flush",
        accumulator_dtype: str | None = "float32",
        skip_nonfinite: bool = False,
        name: str | None = None,
    ):
        options = WindowOptions.checked(steps, weighting, tail, accumulator_dtype, skip_nonfinite)
        super().__init__(_check_inner(inner_optimizer), name=check_text("name", name, optional=True))
        self.steps, self.weighting, self.tail, self.accumulator_dtype, self.skip_nonfinite = options
        self.schedule = StepsSchedule(self.steps)
        self._window: GradientWindow | None = None
        self._strategy = tf.distribute.get_strategy()
        # How many `accumulate_only` contexts are open: replicas' traces are interleaved, so each opens one.
        self._accumulating_only = 0
        # By the index of each variable that has had a gradient: whether it was trainable then. Bypass Keras's tracking.
        self.__dict__["_with_gradient"] = {}
        # Whether `_advise` has warned.
        self._advised = False

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the accumulators and the inner optimizer's state for the model's trainable `variables`."""
        if self.built:
            return
        # Variables created in a trace are initialized inside a `tf.cond`, which fails on several devices.
        with tf.init_scope():
            super().build(variables)
            self._strategy = tf.distribute.get_strategy()
            self._window = GradientWindow(self, self.accumulator_dtype)
            install_storages(self.inner_optimizer, variables)

    @property
    def window(self) -> GradientWindow:
        """The gradients since the last update."""
        if self._window is None:
            raise ValueError(f"{self.name} has not been built. Write optimizer.build(model.trainable_variables) first.")
        return self._window

    def apply(self, grads: Gradients, trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        """Adds a micro-batch's gradients to the window, and updates the variables if the window is full.

        Args:
            grads: A gradient for each variable, dense or `tf.IndexedSlices`, or `None`.
            trainable_variables: The variables; by default all that the optimizer was built with, in order.

        Raises:
            ValueError: All gradients are `None`, or the optimizer was not built with one of the variables.
        """
        if len(grads) == 0:
            return
        if self.in_fit_alone and not self._accumulating_only:
            # A `fit` that failed has left it in the optimizer's place.
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        if trainable_variables is not None:
            build_optimizer(self, trainable_variables)
        window = self.window
        variables = self.trainable_variables if trainable_variables is None else trainable_variables
        observe_gradient(self, [g for g, v in zip(grads, variables, strict=True) if v is not self.gradient_weight])
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        contribution: Any = next((g for g, v in pairs if v is self.gradient_weight), None)
        pairs = [(g, v) for g, v in pairs if v is not self.gradient_weight]
        if not pairs:
            raise ValueError("No gradients provided for any variable: the loss depends on none of them.")
        indices, gradients = [self.index_of(v) for _, v in pairs], [g for g, _ in pairs]
        self._with_gradient.update({index: self.trainable_variables[index].trainable for index in indices})
        warn_of_summed_rows(self, gradients, [v for _, v in pairs])
        if tf.inside_function():
            # A step is traced anew. The settings may have changed since the functions of `_compiled` were traced.
            self.__dict__.pop("_compiled_functions", None)
        window.add_gradients(indices, gradients, contribution, drop_nonfinite=self._drops_nonfinite)
        # With data of unknown length, a counter must not advance for a batch that turns out not to exist.
        with tf.control_dependencies(None if tf.executing_eagerly() else gradients):
            if not self._accumulating_only:
                if contribution is None:
                    self._advise()
                self.end_micro_batch()

    @property
    def options(self) -> WindowOptions:
        """The arguments, beside the inner optimizer."""
        return WindowOptions(self.steps, self.weighting, self.tail, self.accumulator_dtype, self.skip_nonfinite)

    @property
    def in_fit_alone(self) -> bool:
        """Whether it wraps the inner optimizer while a `fit` with `ExactAccumulation(steps=...)` runs."""
        return ACCUMULATOR.of(self.inner_optimizer) is self

    @property
    def is_open(self) -> bool:
        """Whether the window holds gradients."""
        return self.built and int(self.window.position.numpy()) > 0

    def trains(self, model: keras.Model) -> bool:
        """Whether it is built for the model's trainable variables, or not built."""
        return not self.built or list(map(id, self.trainable_variables)) == list(map(id, model.trainable_variables))

    @property
    def gradient_weight(self) -> keras.Variable:
        """A dummy variable. Its "gradient", passed to `apply` with the others, is the micro-batch's `Contribution`."""
        return self.window.weight

    @contextlib.contextmanager
    def accumulate_only(self) -> Generator[None]:
        """Context in which `apply` only accumulates; `end_micro_batch` has to follow."""
        self._accumulating_only += 1
        try:
            yield
        finally:
            self._accumulating_only -= 1

    def end_micro_batch(self, update: bool | None = None) -> None:
        """Counts the micro-batch, and updates if it is the window's last. Call it on every replica.

        Args:
            update: Whether it is the last; if `None`, that is read from the window's position in the graph.
        """
        if not self.built:
            return  # The model has no trainable weights.

        def end(per_replica: OnReplicas) -> None:
            position = self.window.position
            last = position + 1 >= self.schedule(self.iterations) if update is None else update
            position.assign_add(1)
            run_if(last, lambda: self._update(per_replica))

        cross_replica(end)

    def _update(self, per_replica: OnReplicas) -> None:
        """Updates the variables with the window's mean gradient, and clears the window; runs once for all replicas.

        `per_replica(fn, *args)` calls `fn` on each replica, as in `cross_replica`.
        """
        window, all_variables = self.window, self.trainable_variables
        # A variable that was frozen after its last gradient gets no update, not even by its momentum.
        frozen = {index for index, was in self._with_gradient.items() if was and not all_variables[index].trainable}
        updated = [index for index in range(len(all_variables)) if index not in frozen]
        variables = [all_variables[index] for index in updated]
        # After a restore, it is unknown which variables get gradients: take all.
        indices = sorted(self._with_gradient.keys() - frozen) or updated

        def mean() -> Any:
            means, weight = window.mean(indices, [all_variables[index] for index in indices])
            gradients = dict(zip(indices, means, strict=True))
            present = [gradients.get(index) for index in updated]
            # Reduce here: TensorFlow can't run collectives in the branch below.
            return present, weight, squared_norms(self.inner_optimizer, present, variables)

        gradients, weight, norms = per_replica(mean)
        # A window without finite gradients makes no update, not even one with a zero gradient.
        run_if(
            first_replica_values(tf.distribute.get_strategy(), weight) != 0 if self._drops_nonfinite else True,
            lambda: apply_everywhere(per_replica, self.inner_optimizer, gradients, variables, norms),
        )
        per_replica(window.clear)
        window.position.assign(0)

    @property
    def _drops_nonfinite(self) -> bool:
        # A LossScaleOptimizer checks only the first replica's gradients for overflow.
        return self.skip_nonfinite or (self.loss_is_scaled_outside and replica_count() > 1)

    def flush(self) -> bool:
        """Updates with the weighted mean of the window's gradients.

        Returns:
            Whether the window held any gradients.
        """
        if not self.is_open:
            return False
        with on_mesh_of(self.trainable_variables):
            self._compiled("update", lambda: self._strategy.run(self.end_micro_batch, args=(True,)))()
        return True

    def discard(self) -> None:
        """Discards the accumulated gradients without updating."""
        if self.built:
            with on_mesh_of(self.trainable_variables):
                self._compiled("clear", lambda: self._strategy.run(self.window.clear))()
            self.window.position.assign(0)

    def end_epoch(self) -> bool:
        """Flushes, carries or drops the open window, according to `tail`; returns whether it held any to flush."""
        if self.tail == "drop":
            self.discard()
        return self.tail == "flush" and self.flush()

    @functools.cached_property
    def host_schedule(self) -> HostSchedule:
        """The host's count of micro-batches, used by `ExactAccumulation`."""
        return HostSchedule(self)

    def _compiled(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        """Compiles a function under a name, again if the gradient transform or the mesh of the weights has changed."""
        # Bypass `__setattr__`: Keras tracks and saves what is assigned as an attribute.
        functions = self.__dict__.setdefault("_compiled_functions", {})
        transform, mesh = installed_transform(self.inner_optimizer), mesh_of(self.trainable_variables)
        state, compiled = functions.get(name, (None, run))
        if state is None or state[0] != transform or state[1] is not mesh:
            compiled = tf.function(releasing(run), autograph=False)
            functions[name] = (transform, mesh), compiled
        return compiled

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Closes the last window, then finalizes the inner optimizer's variables."""
        self.end_epoch()
        self.inner_optimizer.finalize_variable_values(var_list)

    def _advise(self) -> None:
        """Warns once that `ExactAccumulation` is missing: the micro-batch came without a weight."""
        if self.weighting != "uniform" and not self.schedule.is_always_one and not self._advised:
            self._advised = True
            warn(
                f"{self.name} weights all micro-batches equally, and its windows continue across epochs, so uneven or "
                "weighted micro-batches and an epoch's last ones are not trained on as one batch. In fit(), pass "
                "callbacks=[keras_paragrad.ExactAccumulation()], which is faster as well. In a custom training loop, "
                "write weighting='uniform', and call optimizer.flush() to close the last window.",
            )

    def get_config(self) -> Config:
        """The constructor's arguments, serialized."""
        return {
            **super().get_config(),
            "steps": self.steps,
            "weighting": keras.saving.serialize_keras_object(self.weighting)
            if callable(self.weighting)
            else self.weighting,
            "tail": self.tail,
            "accumulator_dtype": self.accumulator_dtype,
            "skip_nonfinite": self.skip_nonfinite,
        }


def _check_inner(inner_optimizer: keras.optimizers.Optimizer | str | Config) -> keras.optimizers.Optimizer:
    """Resolves a name, config or instance to an optimizer that can accumulate."""
    expected = "a Keras optimizer: its name, its config or an instance"
    refused = refusal("inner_optimizer", inner_optimizer, expected, "keras.optimizers.Adam(1e-3)")
    try:
        inner = keras.optimizers.get(inner_optimizer)
    except Exception as error:  # Keras, or the class named in a config, may raise anything here
        raise refused from error
    if not issubclass(type(inner), keras.optimizers.Optimizer):
        raise refused
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` is a LossScaleOptimizer, which has to see every micro-batch, and so must be the outer "
            "one. Write LossScaleOptimizer(AccumulatingOptimizer(inner)), or leave it out: compile() adds it if the "
            "dtype policy needs it."
        )
    if find_accumulator(inner):
        raise ValueError(
            f"`inner_optimizer` is {type(inner).__name__}, which already accumulates. Wrap its inner optimizer: "
            "AccumulatingOptimizer(optimizer.inner_optimizer, steps=...)."
        )
    if accumulation_steps(inner) > 1:
        raise ValueError(
            f"`inner_optimizer` has gradient_accumulation_steps={accumulation_steps(inner)}, so gradients would be "
            "accumulated twice. Remove that, and write steps= here."
        )
    return inner
