"""Models, data and optimizers for the tests, and how Hypothesis draws them."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import keras
import numpy as np
import tensorflow as tf

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Nadam", "Lion", "Lamb", "Adamax", "Adafactor")
REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")


class OptimizerCase(NamedTuple):
    """An inner optimizer's name and arguments; calling it makes one."""

    name: str
    clip: dict
    average: dict
    decays: bool

    def __call__(self) -> keras.optimizers.Optimizer:
        rate = 0.01
        if self.decays:
            rate = keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=1, decay_rate=0.8)
        more = {"momentum": 0.9} if self.name == "SGD" else {}
        return getattr(keras.optimizers, self.name)(rate, **more, **self.clip, **self.average)


optimizer_cases = st.builds(
    OptimizerCase,
    name=st.sampled_from(OPTIMIZERS),
    clip=st.sampled_from([{}, {"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}]),
    average=st.sampled_from(
        [
            {},
            {"use_ema": True, "ema_momentum": 0.8},
            {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
        ]
    ),
    decays=st.booleans(),
)


class DataCase(NamedTuple):
    """Micro-batches of the given sizes, with sample weights or without, from a dataset that knows its length or not."""

    sizes: tuple[int, ...]
    weighted: bool = False
    known_length: bool = True
    seed: int = 0

    def batches(self) -> list[tuple[np.ndarray, ...]]:
        generator = np.random.default_rng(self.seed)
        made = []
        for rows in self.sizes:
            x, y = (generator.normal(size=(rows, width)).astype("float32") for width in (5, 2))
            weight = (generator.uniform(0.2, 3, rows).astype("float32"),) if self.weighted else ()
            made.append((x, y, *weight))
        return made

    def dataset(self) -> tf.data.Dataset:
        """The micro-batches as they are."""
        columns = [tf.TensorSpec((None, 5)), tf.TensorSpec((None, 2)), tf.TensorSpec((None,))]
        signature = tuple(columns if self.weighted else columns[:2])
        dataset = tf.data.Dataset.from_generator(lambda: iter(self.batches()), output_signature=signature)
        if not self.known_length:
            return dataset
        return dataset.apply(tf.data.experimental.assert_cardinality(len(self.sizes)))


data_cases = st.builds(
    DataCase,
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=11).map(tuple),
    weighted=st.booleans(),
    known_length=st.booleans(),
    seed=st.integers(0, 3),
)


def build_model(
    optimizer: Callable[[], keras.optimizers.Optimizer],
    reduction: str = "sum_over_batch_size",
    strategy: tf.distribute.Strategy | None = None,
    **compile_arguments,
) -> keras.Model:
    """A small model with a constraint and, where the loss is an average, a regularizer; always the same weights."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        regularizer = None if reduction == "sum" else keras.regularizers.L2(0.01)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(4, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(1.0)),
                keras.layers.Dense(2, kernel_regularizer=regularizer),
            ]
        )
        model.compile(optimizer(), keras.losses.MeanSquaredError(reduction=reduction), **compile_arguments)
    return model
