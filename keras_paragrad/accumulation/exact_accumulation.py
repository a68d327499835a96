"""`ExactAccumulation`: gives an accumulating optimizer the micro-batch weights and epoch ends of `fit`.

when `fit` begins: wrap the compiled optimizer, if `steps` is stated
for each micro-batch: weight it by what its loss divides by; the window's last one ends with an update
when an epoch ends: close its last window
when `fit` ends: unwrap the optimizer

A *window* is the micro-batches of one update. A `StepBuilder` makes the model's training step from *stages*; what a
component puts into a stage is its *filler*.
"""

import contextlib
import functools
from collections.abc import Generator, Iterable, Sequence

import keras

from keras_paragrad.accumulation.host import HostSchedule
from keras_paragrad.accumulation.optimizer import ACCUMULATOR, AccumulatingOptimizer
from keras_paragrad.accumulation.window import Steps, WindowOptions
from keras_paragrad.arguments import check_each, check_flag, check_instance
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.model import other_optimizers, overrides_train_step
from keras_paragrad.compat.optimizer import build_optimizer, find_accumulator, replace_optimizer, unwrap_loss_scale
from keras_paragrad.compat.state import replace_methods, restore_methods, warn
from keras_paragrad.compat.types import Config, Logs
from keras_paragrad.engine.losses.dividers import INSTEAD_OF_WINDOWS, Divider, warn_of_batch_statistics
from keras_paragrad.engine.losses.divisors import DivisorFunction
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.training.builder import StepBuilder

DIVIDER = Divider(
    configured_by="AccumulatingOptimizer",
    parts="micro-batches",
    for_equal_parts="write AccumulatingOptimizer(..., weighting='uniform')",
    to_train_anyway="write AccumulatingOptimizer(..., weighting='uniform')",
    for_any_loss=INSTEAD_OF_WINDOWS,
    divides_steps=True,
)


class ExactAccumulation(keras.callbacks.Callback):
    """Makes `fit` accumulate gradients, and take the steps that one device takes on whole batches.

    With `steps`, the optimizer that the model is compiled with is wrapped by an `AccumulatingOptimizer` while `fit`
    runs. Without, the model has to be compiled with one.

    Weights each micro-batch by its loss divisor, so uneven and weighted micro-batches are exact. Closes an epoch's
    last window according to the optimizer's `tail`, before validation and before any other callback's `on_epoch_end`.
    Compiles separate steps for accumulating and for updating, and picks one on the host, so steps without an update
    don't pay for one. Works with `jit_compile`, `steps_per_execution`, strategies and data of unknown length. The
    model's own training step is restored when `fit` ends.

    Args:
        steps: How many micro-batches an update takes, as in `AccumulatingOptimizer`; `None` for a model that is
            compiled with one.
        prove: Whether the first update's rows prove, before it and before each epoch, that parts of a batch give the
            gradient of the whole. What Keras itself defines, and is known to divide, isn't computed again.
        callbacks: Callbacks whose batches are updates: averages of weights, clips, rate finders. `on_train_batch_begin`
            and `on_train_batch_end` are called once an update, with its index and its logs, and `params["steps"]` is
            the number of updates in an epoch. `fit` shows those in its own `callbacks` every micro-batch.
        weighting, tail, accumulator_dtype, skip_nonfinite: With `steps`, as in `AccumulatingOptimizer`.

    Raises:
        ValueError: An argument can't be used, or one of `callbacks` belongs to `fit`. When `fit` begins: the model was
            compiled with an `AccumulatingOptimizer` and `steps` is stated too, or neither. In the first step: the
            weight of its micro-batches is unknown, or they don't add up to the whole, as its loss or a layer compares
            examples. The message says what to write. With one step on one replica such a model is trained anyway.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import ExactAccumulation
    >>> def trained(batch_size, callbacks):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("adam", loss="mse")
    ...     x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    ...     model.fit(x, x[:, :1], batch_size=batch_size, shuffle=False, callbacks=callbacks, verbose=0)
    ...     return model.get_weights()[0]
    >>> whole = trained(10, [])
    >>> parts = trained(3, [ExactAccumulation(steps=4)])  # 3 + 3 + 3 + 1 rows
    >>> bool(np.abs(whole - parts).max() < 1e-6)
    True
    """

    def __init__(
        self,
        steps: Steps | None = None,
        *,
        prove: bool = True,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        weighting: str | DivisorFunction = "auto",
        tail: str = "flush",
        accumulator_dtype: str | None = "float32",
        skip_nonfinite: bool = False,
    ):
        super().__init__()
        check_flag("prove", prove)
        check_internals("models", "steps")
        self._options = WindowOptions.checked(
            1 if steps is None else steps, weighting, tail, accumulator_dtype, skip_nonfinite
        )
        if steps is None and self._options != WindowOptions():
            raise ValueError(
                f"ExactAccumulation({self._options.described}) needs `steps`, as in ExactAccumulation(steps=4, ...). "
                "For a model that is compiled with an AccumulatingOptimizer, write it there."
            )
        self.steps = steps
        self.prove = prove
        self.callbacks = list(check_each("callbacks", callbacks, _check_of_updates, "Keras callbacks"))
        self._schedule: HostSchedule | None = None
        # Whether the callbacks of updates were told of an update's begin, how many of the epoch's updates they have
        # seen end, and the logs of the latest micro-batch.
        self._begun, self._seen, self._logs = False, 0, {}

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, of the callbacks of updates too, and wraps its optimizer before others look at it."""
        super().set_model(model)
        self._of_updates = keras.callbacks.CallbackList(self.callbacks, model=model)
        if self.steps is not None and model.optimizer is not None:
            self.wrap(model)

    def wrap(self, model: keras.Model) -> AccumulatingOptimizer:
        """Wraps the model's optimizer, until `unwrap`."""
        found = find_accumulator(model.optimizer)
        if isinstance(found, AccumulatingOptimizer) and found.options == self._options:
            return found
        if found is not None and not unwrap(model):
            raise ValueError(
                f"{model.name!r} is compiled with an AccumulatingOptimizer, and ExactAccumulation(steps=...) states "
                "`steps` as well. Write callbacks=[ExactAccumulation()], or compile with the inner optimizer."
            )
        inner = unwrap_loss_scale(model.optimizer)
        accumulator = ACCUMULATOR.of(inner)
        if accumulator is None or accumulator.options != self._options or not accumulator.trains(model):
            if accumulator is not None and accumulator.is_open:
                warn(
                    f"The last fit of {model.name!r} left a window open, which this ExactAccumulation can't continue, "
                    "as its arguments or the trainable weights are others. Its gradients are dropped."
                )
            with model.distribute_strategy.scope():
                accumulator = AccumulatingOptimizer(inner, **self._options.as_keywords())
                if inner.built:
                    build_optimizer(accumulator, model.trainable_variables)
            ACCUMULATOR.attach(inner, accumulator)
        replace_optimizer(model, inner, accumulator)
        replace_methods(model, get_compile_config=functools.partial(_compile_config, model))
        return accumulator

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Installs the weighting of micro-batches and the schedule of updates."""
        StepBuilder.of(self.model).begin_fit(self._fillers, functools.partial(unwrap, self.model))
        self._count_steps()
        self._of_updates.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts counting the epoch's batches."""
        if self._schedule:
            self._schedule.begin_epoch(self.params.get("steps"))
            self._begun, self._seen = False, 0
            self._count_steps()
        self._of_updates.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begins an update, unless the micro-batch continues its window."""
        if self._schedule and self.callbacks and not self._begun and not StepBuilder.of(self.model).batches_to_skip:
            self._begun, self._seen = True, self._schedule.count_skipped()
            self._of_updates.on_train_batch_begin(self._seen, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends an update, if the micro-batch was its window's last."""
        self._logs = logs
        self._end_update()

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Gives the model its own optimizer back, which `predict` doesn't need, unless `fit` runs."""
        if not self._schedule:
            unwrap(self.model)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Closes a window left open by an interrupted epoch, so that validation sees its update."""
        self.on_predict_begin()
        self._end_epoch()
        self._of_updates.on_test_begin(logs)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begins a batch of validation."""
        self._of_updates.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends a batch of validation."""
        self._of_updates.on_test_batch_end(batch, logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Ends validation."""
        self._of_updates.on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Closes a window left open by an interrupted epoch."""
        self._end_epoch()
        self._of_updates.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restores the model's own training step."""
        if self._schedule:
            StepBuilder.of(self.model).end_fit(self._fillers)
            self._schedule = None
        self._of_updates.on_train_end(logs)

    def _fillers(self) -> dict[str, object]:
        """The fillers by stage, for the optimizer that the model is compiled with now.

        `StepBuilder` calls this when `fit` begins, and again if a callback calls `compile`.
        """
        optimizer = accumulating_optimizer(self.model) if self.steps is None else self.wrap(self.model)
        loss_divisor = None if optimizer.weighting == "uniform" else LossDivisor(optimizer.weighting, DIVIDER)
        before, self._schedule = self._schedule, optimizer.host_schedule
        if before not in (None, self._schedule):
            # A callback has compiled the model with another optimizer in the middle of an epoch.
            self._schedule.begin_epoch(before.batches_left)
            self._schedule.updates = before.updates
        self._schedule.prove = self.prove
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        # Whole windows need no weights.
        always_whole = (
            loss_divisor is not None and optimizer.schedule.is_always_one and not optimizer.is_open and replicas == 1
        )
        self._schedule.always_whole = always_whole
        if always_whole:
            loss_divisor = None
        else:
            if loss_divisor:
                loss_divisor.check(self.model)
            warn_of_batch_statistics(self.model)
        return {"weigh": loss_divisor, "apply": self._schedule}

    def _count_steps(self) -> None:
        """Tells the callbacks of updates how many an epoch has."""
        steps = self._schedule.updates_in(self.params.get("steps")) if self._schedule else None
        self._of_updates.set_params({**self.params, "steps": steps})

    def _end_update(self) -> None:
        """Tells the callbacks of updates of those that ended since they were last told."""
        if self._schedule and self._schedule.updates > self._seen and self._begun:
            self._begun, self._seen = False, self._schedule.updates
            self._of_updates.on_train_batch_end(self._seen - 1, self._logs)

    def _end_epoch(self) -> None:
        if self._schedule:
            self._schedule.end_epoch()
            self._end_update()


def _check_of_updates(name: str, callback: object) -> keras.callbacks.Callback:
    checked = check_instance(name, callback, keras.callbacks.Callback, "a Keras callback")
    if any(base.__module__.startswith("keras_paragrad.") for base in type(checked).__mro__):
        raise ValueError(
            f"`{name}` is {type(checked).__name__}, which counts micro-batches itself. Pass it to fit() beside "
            "ExactAccumulation(...): callbacks=[ExactAccumulation(...), this]."
        )
    return checked


def with_those_of_updates(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Callbacks of `fit`, and those that an `ExactAccumulation` among them calls."""
    return [
        each
        for callback in callbacks
        for each in (callback, *(callback.callbacks if isinstance(callback, ExactAccumulation) else ()))
    ]


def unwrap(model: keras.Model) -> bool:
    """Gives a model its own optimizer back; returns whether an `ExactAccumulation` had wrapped it."""
    found = find_accumulator(model.optimizer)
    if not isinstance(found, AccumulatingOptimizer) or not found.in_fit_alone:
        return False
    replace_optimizer(model, found, found.inner_optimizer)
    restore_methods(model, "get_compile_config")
    return True


@contextlib.contextmanager
def wrapping(model: keras.Model, callbacks: Iterable[keras.callbacks.Callback]) -> Generator[None]:
    """Context of a `fit` with these callbacks and of what prepares it, in which the model's optimizer accumulates."""
    for callback in callbacks:
        if isinstance(callback, ExactAccumulation) and callback.steps is not None and model.optimizer is not None:
            callback.wrap(model)
    try:
        yield
    finally:
        unwrap(model)


def _compile_config(model: keras.Model) -> Config:
    """What a file needs to compile the model: as the user did, or in the middle of a window with what has it."""
    config, accumulator = type(model).get_compile_config(model), find_accumulator(model.optimizer)
    if isinstance(accumulator, AccumulatingOptimizer) and accumulator.is_open and "optimizer" in config:
        config = {**config, "optimizer": keras.saving.serialize_keras_object(accumulator)}
    return config


def accumulating_optimizer(model: keras.Model) -> AccumulatingOptimizer:
    """The `AccumulatingOptimizer` that a model was compiled with, unwrapped.

    Raises:
        ValueError: It was compiled with another optimizer, or has several. The message ends with the code to write.
    """
    optimizer = find_accumulator(model.optimizer)
    if isinstance(optimizer, AccumulatingOptimizer):
        return optimizer
    compiled = "no optimizer" if model.optimizer is None else type(model.optimizer).__name__
    problem = (
        f"{model.name!r} is compiled with {compiled}, and ExactAccumulation() doesn't say how many micro-batches an "
        "update takes."
    )
    if overrides_train_step(model) and other_optimizers(model):
        raise ValueError(
            f"{problem} Its train_step updates weights with other optimizers, whose updates may follow each other, so "
            "its micro-batches can't be accumulated one after the other. Leave ExactAccumulation() out, give fit() the "
            "batch_size of an update, and write this before fit(), with the number of rows that fit into memory:\n"
            "keras_paragrad.microbatch(model, size=4)"
        )
    if model.optimizer is None:
        raise ValueError(f"{problem} Write model.compile('adam', loss=...), and ExactAccumulation(steps=4).")
    # What its own step divides by has to be stated, and nearly all divide by the number of examples.
    stated = ", weighting='examples'" if overrides_train_step(model) else ""
    raise ValueError(f"{problem} Write callbacks=[keras_paragrad.ExactAccumulation(steps=4{stated})].")
