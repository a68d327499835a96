"""The gradient of a whole update is transformed once, whatever it was put together from."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from oracles import transforms
from oracles.transforms import BATCH, MICRO_BATCH, accumulated, fitted, inner, made, negated, plain, scaled, shifted
from runner import own_process

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    GradientNoiseScale,
    GradientTelemetry,
)
from keras_paragrad.compat.optimizer import WrappingOptimizer
from keras_paragrad.engine.training.builder import StepBuilder

# Keras says so of the weight without a gradient, and transforms get the sum of an embedding's lookups.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*the gradients of all lookups of a row are summed:UserWarning"),
]

TRANSFORMS = {"negated": negated, "shifted": shifted}
wanted = functools.cache(transforms.by_hand)


def check(found, transform):
    for ours, theirs in zip(found, wanted(transform), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


WAYS = {
    "plain": plain,
    "eager": functools.partial(plain, run_eagerly=True),
    "XLA": functools.partial(plain, jit_compile=True),
    "two steps a call": functools.partial(plain, steps_per_execution=2),
    "accumulated": accumulated,
    "accumulated, XLA": functools.partial(accumulated, jit_compile=True),
    "accumulated to the end of the data": transforms.accumulated_to_the_end,
    "sliced": transforms.sliced,
}


# The replicas below run eagerly, and test_transform_gradients.py has XLA.
IN_OTHER_WAYS = ("eager", "XLA", "accumulated, XLA", "two steps a call")


# A sign that is lost shows with one of them, and a gradient that is transformed twice, or in parts, with the other.
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((way, "shifted") for way in WAYS if way not in IN_OTHER_WAYS),
        *(pytest.param(way, "shifted", marks=pytest.mark.long) for way in IN_OTHER_WAYS),
        *(("plain", "negated"), ("accumulated", "negated")),
    ],
)
def test_on_one_device(way, name):
    check(WAYS[way](TRANSFORMS[name]), TRANSFORMS[name])


@pytest.mark.few(1)
@pytest.mark.parametrize("by", ["loss_scale_factor", "LossScaleOptimizer"])
def test_without_loss_scale(by):
    def optimizer():
        return inner(loss_scale_factor=64.0) if by == "loss_scale_factor" else inner()

    around = scaled if by == "LossScaleOptimizer" else lambda made: made
    check(fitted(made(around(optimizer), run_eagerly=True), shifted), shifted)

    accumulating = around(lambda: AccumulatingOptimizer(optimizer(), BATCH // MICRO_BATCH))
    callbacks = [ExactAccumulation()]
    model = made(accumulating, run_eagerly=True)
    check(fitted(model, shifted, batch_size=MICRO_BATCH, callbacks=callbacks), shifted)


# In `make test`, transform_gradients fills the same stage in accumulated steps on replicas.
@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_on_replicas():
    dist = DistributedFit(devices=["CPU:0", "CPU:1"], jit=False)
    check(transforms.sliced(shifted, dist, scaled(inner), run_eagerly=True), shifted)


@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_accumulated_on_replicas():
    check(accumulated(negated, DistributedFit(devices=["CPU:0", "CPU:1"], jit=False)), negated)


@pytest.mark.own_process
def test_on_replicas_that_are_not_weighed():
    # Of as many rows each. They are clipped after the sum, as on one device.
    dist = DistributedFit(devices=["CPU:0", "CPU:1"], jit=False, exact=False)
    rows = 4 * (transforms.ROWS // 4)
    data = dict(zip(("x", "y"), (column[:rows] for column in transforms.columns()[:2]), strict=True))
    found = [
        fitted(made(inner, where, run_eagerly=where is None), shifted, where, batch_size=4, **data)
        for where in (dist, None)
    ]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.long
def test_on_workers():
    for worker in own_process.on_workers(transforms.on_workers, None, seconds=180):
        check(worker, shifted)


def test_the_stage_stays_with_a_model_that_is_compiled_anew():
    model = made(lambda: AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH), run_eagerly=True)
    start = model.get_weights()
    check(fitted(model, negated, batch_size=MICRO_BATCH, callbacks=[ExactAccumulation()]), negated)
    StepBuilder.of(model).fill(transform=shifted)
    model.set_weights(start)
    model.compile(AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH), "mse", run_eagerly=True)
    x, y, sample_weight = transforms.columns()
    options = {"batch_size": MICRO_BATCH, "epochs": transforms.EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(x, y, sample_weight=sample_weight, callbacks=[ExactAccumulation()], **options)
    check(model.get_weights(), shifted)


class Handing(WrappingOptimizer):
    """Hands gradients on."""

    def apply(self, grads, trainable_variables=None):
        self.inner_optimizer.apply(grads, trainable_variables)


def test_wrappers_nest():
    model = made(lambda: Handing(AccumulatingOptimizer(Handing(inner()), BATCH // MICRO_BATCH)), run_eagerly=True)
    check(fitted(model, shifted, batch_size=MICRO_BATCH, callbacks=[ExactAccumulation()]), shifted)


def test_the_noise_scale_sees_gradients_before_and_telemetry_after():
    def seen(transform):
        model = made(lambda: AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH), run_eagerly=True)
        noise, telemetry = GradientNoiseScale(), GradientTelemetry(every=1)
        data = dict(zip(("x", "y"), (column[:BATCH] for column in transforms.columns()[:2]), strict=True))
        callbacks = [ExactAccumulation(), noise, telemetry]
        fitted(model, transform, epochs=1, batch_size=MICRO_BATCH, callbacks=callbacks, **data)
        return noise.noise, telemetry.last.model.gradient_norm[-1]

    (noise, norm), (expected, plain_norm) = seen(shifted), seen(None)
    np.testing.assert_allclose(noise, expected, rtol=1e-6)
    assert norm > 1.1 * plain_norm


def test_accumulation_of_keras_s_own_is_refused():
    model = made(lambda: inner(gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match=r"AccumulatingOptimizer\(optimizer, steps=2\)"):
        StepBuilder.of(model).fill(transform=negated)


@pytest.mark.own_process
def test_a_train_step_of_one_s_own_is_transformed_on_replicas():
    """It is exact whatever `exact` says."""

    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    dist = DistributedFit(devices=["CPU:0", "CPU:1"], jit=False, exact=False)
    data = transforms.columns()[0][:7], transforms.columns()[1][:7]

    def trained(scope, fit):
        keras.utils.set_random_seed(0)
        with scope:
            model = Own([keras.Input(data[0].shape[1:]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        StepBuilder.of(model).fill(transform=negated)
        fit(model, *data, batch_size=5, shuffle=False, verbose=0)
        return model.get_weights()

    found = trained(dist.scope(), dist.fit), trained(contextlib.nullcontext(), keras.Model.fit)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
