"""What can't work is refused when it is constructed, with what to write instead."""

import keras
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer
from keras_paragrad.accumulation.window import StepsSchedule

pytestmark = pytest.mark.fast


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (0, "at least 1"),
        (-3, "at least 1"),
        (2.5, "Write steps=4"),
        (True, "Write steps=4"),
        ("4", "Write steps=4"),
        (None, "Write steps=4"),
        ([], "Write steps=4"),
        ([(0, 2), (100,)], "pairs of"),
        ([(0, 2), (100, 0)], "at least 1"),
        ([(100, 8), (0, 2)], r"Write steps=\[\(0, 2\), \(100, 8\)\]"),
        ([(5, 2)], r"Write steps=\[\(0, 2\), \(5, 2\)\]"),
        ([(0, 2), (0, 4)], "must start at 0 and increase"),
        (lambda update: 4, "pairs of"),
    ],
)
def test_steps(steps, says):
    with pytest.raises(ValueError, match=says):
        AccumulatingOptimizer("sgd", steps)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("weighting", "tokens"),
        ("tail", "keep"),
        ("accumulator_dtype", "int8"),
        ("accumulator_dtype", "float"),
        ("skip_nonfinite", "yes"),
        ("skip_nonfinite", None),
    ],
)
def test_choices(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` is {value!r}. .*must be "):
        AccumulatingOptimizer("sgd", **{argument: value})


def accumulates_inside():
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(gradient_accumulation_steps=2))
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "write steps= here"),
        (accumulates_inside, "write steps= here"),
        (lambda: AccumulatingOptimizer("sgd"), "optimizer.inner_optimizer"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            r"LossScaleOptimizer\(AccumulatingOptimizer\(inner\)\)",
        ),
        (lambda: 3, "must be a Keras optimizer"),
        (lambda: None, "must be a Keras optimizer"),
    ],
)
def test_inner_optimizer(make, says):
    inner = make()
    with pytest.raises(ValueError, match=says):
        AccumulatingOptimizer(inner)


@pytest.mark.parametrize("inner", ["adam", {"class_name": "Adam", "config": {"learning_rate": 0.5}}])
def test_a_name_or_config_makes_the_inner_optimizer(inner):
    assert isinstance(AccumulatingOptimizer(inner).inner_optimizer, keras.optimizers.Adam)


@pytest.mark.not_fast
def test_schedule_in_the_graph_is_that_of_the_host():
    for steps in (3, [(0, 2), (3, 5), (7, 1)]):
        schedule = StepsSchedule(steps)
        traced = tf.function(schedule)
        for update in range(12):
            assert int(traced(tf.constant(update, tf.int64))) == schedule.at(update)


def test_apply_says_what_is_missing():
    optimizer = AccumulatingOptimizer("sgd")
    with pytest.raises(ValueError, match=r"Write optimizer.build\(model.trainable_variables\) first"):
        optimizer.apply([tf.constant(1.0)])
    known, unknown = keras.Variable(1.0), keras.Variable(1.0)
    optimizer.build([known])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.constant(1.0)], [unknown])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None], [known])
