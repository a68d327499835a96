"""Trainings whose gradients are transformed, and what a loop over whole batches makes of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.engine.training.builder import StepBuilder

ROWS, BATCH, MICRO_BATCH, EPOCHS = 23, 9, 3, 2


def negated(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> list[tf.Tensor]:
    return [-gradient for gradient in gradients]


def shifted(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> list[tf.Tensor]:
    return [gradient + 0.25 for gradient in gradients]


def columns() -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(0)
    return draw.integers(0, 6, (ROWS, 4)), draw.normal(size=(ROWS, 1)).astype("float32"), draw.uniform(0.5, 2, ROWS)


def of_unknown_length(batch: int) -> tf.data.Dataset:
    """The rows in batches, of which `fit` does not know how many there are."""
    return tf.data.Dataset.from_tensor_slices(columns()).batch(batch).filter(lambda *batch: True)


def inner(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5, **options)


def made(optimizer: Any, dist: DistributedFit | None = None, **options: Any) -> keras.Model:
    """A model with sparse gradients, whose optimizer `optimizer()` makes."""
    keras.utils.set_random_seed(0)
    with dist.scope() if dist else contextlib.nullcontext():
        layers = [keras.layers.Embedding(6, 3), keras.layers.GlobalAveragePooling1D()]
        layers += [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        # A weight without a gradient.
        model.add_weight(shape=(2,), name="unused")
        model.compile(optimizer(), "mse", **{"jit_compile": False, **options})
    return model


def gradients_of_whole_batches(model: keras.Model, epochs: int = EPOCHS) -> Iterator[list[Any]]:
    """Those of each batch in turn, dense or `None`, without `fit`; what asks for the next has applied them."""
    for _ in range(epochs):
        for start in range(0, ROWS, BATCH):
            x, y, weights = (column[start : start + BATCH] for column in columns())
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True), weights)
            gradients = tape.gradient(loss, model.trainable_variables)
            yield [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def by_hand(transform: Callable[..., Sequence[tf.Tensor]], epochs: int = EPOCHS) -> list[np.ndarray]:
    """The weights after training on whole batches without `fit`."""
    model = made(inner)
    variables = model.trainable_variables
    model.optimizer.build(variables)
    for gradients in gradients_of_whole_batches(model, epochs):
        some = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        there, their = (list(each) for each in zip(*some, strict=True))
        model.optimizer.apply(list(transform(there, their)), their)
    return model.get_weights()


def fitted(model: keras.Model, transform: Any, dist: DistributedFit | None = None, **options: Any) -> list[np.ndarray]:
    """The weights after `fit` with a filled stage, which is emptied in the end."""
    StepBuilder.of(model).fill(transform=transform)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **options}
    if "x" not in options:
        options |= dict(zip(("x", "y", "sample_weight"), columns(), strict=True))
    (dist or model).fit(*([model] if dist else []), **options)
    StepBuilder.of(model).fill(transform=None)
    assert "apply" not in vars(getattr(model.optimizer, "inner_optimizer", model.optimizer))
    return model.get_weights()


def plain(transform: Any, dist: DistributedFit | None = None, **options: Any) -> list[np.ndarray]:
    return fitted(made(inner, dist, **options), transform, dist)


def accumulated(transform: Any, dist: DistributedFit | None = None, **options: Any) -> list[np.ndarray]:
    model = made(lambda: AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH), dist, **options)
    return fitted(model, transform, dist, batch_size=MICRO_BATCH, callbacks=[ExactAccumulation()])


def accumulated_to_the_end(transform: Any) -> list[np.ndarray]:
    """The last window of each epoch is closed where the data ends, outside of the step."""
    model = made(lambda: AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH))
    data = of_unknown_length(MICRO_BATCH)
    return fitted(model, transform, x=data, batch_size=None, callbacks=[ExactAccumulation()])


def sliced(
    transform: Any, dist: DistributedFit | None = None, optimizer: Any = inner, **options: Any
) -> list[np.ndarray]:
    model = made(optimizer, dist, **options)
    with microbatch(model, MICRO_BATCH):
        return fitted(model, transform, dist)


def on_workers(_: None) -> list[np.ndarray]:
    """What one of several workers ends with."""
    return accumulated(shifted, DistributedFit(startup_timeout=60), run_eagerly=True)


def scaled(optimizer: Callable[[], keras.optimizers.Optimizer]) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.LossScaleOptimizer(optimizer(), initial_scale=64.0)
