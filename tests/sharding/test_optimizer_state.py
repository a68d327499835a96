"""The variables of an optimizer, counted without making them."""

import keras
import numpy as np
import pytest

from keras_paragrad import AccumulatingOptimizer
from keras_paragrad.compat.variables import copy_built_optimizer, optimizer_variables, variable_bytes, without_memory

KERAS = keras.optimizers
OPTIMIZERS = {
    "Adadelta": KERAS.Adadelta,
    "Adafactor": KERAS.Adafactor,
    "Adagrad": KERAS.Adagrad,
    "Adam": KERAS.Adam,
    "Adam, amsgrad": lambda: KERAS.Adam(amsgrad=True),
    "Adam, EMA": lambda: KERAS.Adam(use_ema=True),
    "Adam, Keras's accumulation": lambda: KERAS.Adam(gradient_accumulation_steps=4),
    "AdamW": KERAS.AdamW,
    "Adamax": KERAS.Adamax,
    "Ftrl": KERAS.Ftrl,
    "Lamb": KERAS.Lamb,
    "Lion": KERAS.Lion,
    "LossScaleOptimizer": lambda: KERAS.LossScaleOptimizer(KERAS.Adam(use_ema=True)),
    "MultiOptimizer": lambda: KERAS.MultiOptimizer(
        KERAS.OptimizerMap(KERAS.Adam(), {".*kernel": KERAS.SGD(momentum=0.9)})
    ),
    "Muon": KERAS.Muon,
    "Nadam": KERAS.Nadam,
    "RMSprop": KERAS.RMSprop,
    "RMSprop, centered": lambda: KERAS.RMSprop(centered=True, momentum=0.9),
    "SGD": KERAS.SGD,
    "SGD, momentum": lambda: KERAS.SGD(momentum=0.9),
    "SGD, a rate that can't be serialized": lambda: KERAS.SGD(lambda: 0.1),
    "ScheduleFreeAdamW": KERAS.ScheduleFreeAdamW,
    "AccumulatingOptimizer": lambda: AccumulatingOptimizer(KERAS.Adam(use_ema=True), 4),
    "AccumulatingOptimizer, ScheduleFreeAdamW": lambda: AccumulatingOptimizer(KERAS.ScheduleFreeAdamW(), 4),
    "LossScaleOptimizer, AccumulatingOptimizer": lambda: KERAS.LossScaleOptimizer(
        AccumulatingOptimizer(KERAS.Adam(), 4, accumulator_dtype="float64")
    ),
}
WEIGHTS = (64 * 128 + 128 + 2 * 128 + 3 * 16 * 64 + 64) * 4


@pytest.fixture(scope="module")
def variables():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128),
            keras.layers.BatchNormalization(),
            keras.layers.Reshape((8, 16)),
            keras.layers.Conv1D(64, 3),
        ]
    )
    return model.trainable_variables


def test_every_optimizer_of_keras_is_among_them():
    names = {name for name in dir(KERAS) if isinstance(getattr(KERAS, name), type)}
    assert {name for name in OPTIMIZERS if name in names} == names - {"Optimizer", "OptimizerMap"}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_are_those_of_the_built_optimizer(name, variables):
    optimizer = OPTIMIZERS[name]()
    copy = copy_built_optimizer(optimizer, variables)
    assert not optimizer.built
    optimizer.build(variables)
    expected = {id(each): each for kind in optimizer_variables([optimizer]).values() for each in kind}
    # What it says itself that it has.
    assert {id(each) for each in optimizer.variables} <= set(expected)
    found = [each for kind in optimizer_variables([copy]).values() for each in kind]
    assert sum(map(variable_bytes, found)) == sum(each.numpy().nbytes for each in expected.values())
    assert sorted((tuple(each.shape), each.dtype) for each in found) == sorted(
        (tuple(each.shape), each.dtype) for each in expected.values()
    )


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("Adam, EMA", "ema", WEIGHTS),
        ("LossScaleOptimizer", "ema", WEIGHTS),
        ("AccumulatingOptimizer", "ema", WEIGHTS),
        ("Adam, Keras's accumulation", "accumulators", WEIGHTS),
        # The window's position and weight.
        ("AccumulatingOptimizer", "accumulators", WEIGHTS + 12),
        ("LossScaleOptimizer, AccumulatingOptimizer", "accumulators", 2 * WEIGHTS + 12),
    ],
)
def test_what_the_variables_are_for(name, kind, size, variables):
    state = optimizer_variables([copy_built_optimizer(OPTIMIZERS[name](), variables)])
    assert sum(map(variable_bytes, state[kind])) == size


def test_a_built_optimizer_is_copied_without_its_values(variables):
    optimizer = KERAS.Adam()
    optimizer.build(variables)
    before = [each.numpy() for each in optimizer.variables]
    optimizer_variables([copy_built_optimizer(optimizer, variables)])
    for value, each in zip(before, optimizer.variables, strict=True):
        np.testing.assert_array_equal(value, each.numpy())


def test_variables_without_memory_have_no_value_until_they_are_assigned_one():
    with without_memory():
        with without_memory():
            pass
        large, small = keras.layers.Dense(1000, name="large"), keras.layers.Dense(2)
        large.build((None, 50))
        small.build((None, 2))
    assert small.kernel.numpy().any()
    assert large.kernel.numpy().size == 0
    large.kernel.assign(np.ones((50, 1000)))
    assert large.kernel.numpy().all()
    after = keras.layers.Dense(1000)
    after.build((None, 50))
    assert after.kernel.numpy().any()
