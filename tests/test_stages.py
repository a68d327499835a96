"""Components fill the stages of a step in whatever order they are attached, and it is the same step."""

import functools

import keras
import numpy as np
import pytest
from oracles import transforms
from oracles.transforms import BATCH, MICRO_BATCH, inner, made, shifted

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    GradientNoiseScale,
    GradientTelemetry,
    microbatch,
)
from keras_paragrad.engine.step.stages import Stages
from keras_paragrad.engine.training.builder import StepBuilder

# Keras says so of the weight without a gradient, and windows and transforms get the sum of an embedding's lookups.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*the gradients of all lookups of a row are summed:UserWarning"),
]

wanted = functools.cache(transforms.by_hand)
BEFORE_FIT = {
    "microbatch": lambda model: microbatch(model, 2),
    "transform": lambda model: StepBuilder.of(model).fill(transform=shifted),
}
CALLBACKS = {
    "ExactAccumulation": ExactAccumulation,
    "GradientNoiseScale": GradientNoiseScale,
    "GradientTelemetry": functools.partial(GradientTelemetry, every=1),
}
# In one order and its reverse, each component comes before and after each other.
FORWARD = (tuple(BEFORE_FIT), tuple(CALLBACKS))
BACKWARD = (FORWARD[0][::-1], FORWARD[1][::-1])


def trained(order, dist, epochs, **options):
    """Weights, history and what telemetry saw last, with everything attached in an order."""
    before, called = order
    model = made(lambda: AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH), dist, **options)
    callbacks = {name: CALLBACKS[name]() for name in called}
    for name in before:
        BEFORE_FIT[name](model)
    x, y, sample_weight = transforms.columns()
    options = {"batch_size": MICRO_BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
    fit = functools.partial(dist.fit, model) if dist else model.fit
    history = fit(x, y, sample_weight=sample_weight, callbacks=[*callbacks.values()], **options).history
    return model, history, callbacks["GradientTelemetry"].last


def check_orders(dist=None, epochs=transforms.EPOCHS, **options):
    found = [trained(order, dist, epochs, **options) for order in (FORWARD, BACKWARD)]
    for model, _, _ in found:
        for ours, theirs in zip(model.get_weights(), wanted(shifted, epochs), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    (_, history, last), (_, other_history, other_last) = found
    assert history.keys() == other_history.keys()
    for name, values in history.items():
        np.testing.assert_array_equal(values, other_history[name], name)
    for ours, theirs in zip(keras.tree.flatten(last), keras.tree.flatten(other_last), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# In `make test`, replicas below have the same stages.
@pytest.mark.long
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_on_one_device(run_eagerly):
    check_orders(run_eagerly=run_eagerly)


@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_on_replicas():
    # Stages are attached before anything is traced, which takes longer than all steps.
    check_orders(DistributedFit(devices=["CPU:0", "CPU:1"], jit=False), epochs=1, run_eagerly=True)


def test_a_stage_that_is_emptied_leaves_the_others():
    model = made(inner)
    builder = StepBuilder.of(model)
    cut = microbatch(model, 2)
    builder.fill(transform=shifted)
    assert builder.stages.filled == ["split", "transform"]
    cut.undo()
    assert builder.stages.filled == ["transform"] and "make_train_function" in vars(model)
    builder.fill(transform=None)
    assert builder.stages == Stages() and "make_train_function" not in vars(model)


def test_the_innermost_part_of_an_update_says_how_losses_are_normalized():
    model = made(inner)
    builder = StepBuilder.of(model)
    assert builder.stages.loss_divisor(of_slices=True) is None
    microbatch(model, 2, weighting="examples")
    slices = builder.stages.split.loss_divisor
    assert builder.stages.loss_divisor(of_slices=True) is slices
    assert builder.stages.loss_divisor(of_slices=False) is None

    def of_micro_batches(model, arguments, terms):
        raise AssertionError

    builder.fill(weigh=of_micro_batches)
    assert builder.stages.loss_divisor(of_slices=True) is of_micro_batches


def test_another_name_is_no_stage():
    with pytest.raises((TypeError, ValueError), match="combined"):
        StepBuilder.of(made(inner)).fill(combined=keras)
