"""A `train_step` or `test_step` of the model's own is that of one device on the whole batch, however it is divided."""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from foreign.keras_io import ways
from foreign.keras_io.miniatures import MINIATURES
from keras import layers, ops
from oracles.histories import MicroBatches
from sample_models import own_steps
from sample_models import step_models as models
from sample_models.step_models import compiled, data_of

from keras_paragrad import AccumulatingOptimizer, Backup, DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.storage.sharded import sharded_value

KINDS = {
    "captions": (models.Captions,),
    "wgan": (models.Gan, 2, 10.0, 0.3),
    "autoencoder": (models.Autoencoder,),
    "contrastive": (models.Contrastive,),
    "drawing": (models.DrawingDiffusion,),
    "cycle": (models.Cycle,),
}
OPTIONS = {"epochs": 2, "shuffle": False, "verbose": 0}


def replicas(**options):
    return DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], min_shard_bytes=16, **options)


def fitted(kind, rows=11, size=None, dist=None, callbacks=(), **options):
    """A trained model and its history; the last batch has fewer rows than the others."""
    with dist.scope() if dist else contextlib.nullcontext():
        model = compiled(*(KINDS[kind] if isinstance(kind, str) else (kind,)), **{"jit_compile": False, **options})
    fit = functools.partial(dist.fit, model) if dist else model.fit
    with microbatch(model, size) if size else contextlib.nullcontext():
        return model, fit(*data_of(model), batch_size=rows, callbacks=list(callbacks), **OPTIONS).history


def compare(found, expected):
    """Weights, relative to the largest of each, and logs."""
    (ours, history), (plain, shown) = found, expected
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * max(1.0, np.abs(other).max(initial=0)))
    assert history.keys() == shown.keys()
    for name, values in shown.items():
        np.testing.assert_allclose(history[name], values, rtol=5e-6, err_msg=name)


# With batches of 31, the last one has one row, and a replica none.
@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize(("rows", "size"), [(31, 3), (11, None)])
@pytest.mark.parametrize("name", KINDS)
def test_replicas(name, rows, size):
    compare(fitted(name, rows, size, replicas()), fitted(name, rows))


def clipping(**clip):
    return functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9, **clip)


# What a step does with weights after an update: averages, clips, reads them in the next phase. Each shard of a row.
@pytest.mark.few(1)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize(
    ("name", "shard", "size", "rows", "optimizer"),
    [
        ("drawing", "parameters", 4, 31, clipping(clipnorm=0.1)),
        ("wgan", "optimizer", None, 11, clipping(global_clipnorm=0.1)),
        ("cycle", "parameters", 3, 11, clipping(use_ema=True, ema_overwrite_frequency=2)),
    ],
)
def test_shards(name, shard, size, rows, optimizer):
    found = fitted(name, rows, size, replicas(shard=shard), optimizer=optimizer)
    assert any(map(sharded_value, found[0].trainable_weights))
    compare(found, fitted(name, rows, optimizer=optimizer))


class Decorated(models.Captions):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class Clipped(models.Captions):
    """Assigns weights right after an update, without any operation in between."""

    def train_step(self, data):
        weights = self.head.trainable_weights
        zeros = ops.zeros_like(weights[1])
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.head(data[0])))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        weights[1].assign(zeros)
        return {"loss": loss}


class Unbuilt(models.Captions):
    """Layers that the step alone builds."""

    def __init__(self):
        super().__init__()
        self.head = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)])


class InBranch(models.Captions):
    def train_step(self, data):
        step = super().train_step
        return tf.cond(tf.reduce_sum(data[0]) > -1e9, lambda: step(data), lambda: {"loss": 0.0, "accuracy": 0.0})


class LooksUp(models.Autoencoder):
    """Sparse gradients, a loss scale, and a sum over the rows."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(3, 2)

    def train_step(self, data):
        noise = data[0][1]
        with tf.GradientTape() as tape:
            loss = ops.sum(ops.square(self.table(ops.cast(noise[:, 0] > 0, "int32")) - noise[:, :2]))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.table.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return {"loss": loss}


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))


FORMS = [
    (Decorated, models.sgd),
    (Clipped, models.sgd),
    (Unbuilt, models.sgd),
    (InBranch, models.sgd),
    (LooksUp, scaled),
]


@pytest.mark.few(0, "Clipped-sgd")
@pytest.mark.parametrize(("kind", "optimizer"), FORMS)
def test_steps_in_other_forms(kind, optimizer):
    compare(fitted(kind, size=4, optimizer=optimizer), fitted(kind, optimizer=optimizer))


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize(("kind", "optimizer"), FORMS)
def test_steps_in_other_forms_on_replicas(kind, optimizer):
    compare(fitted(kind, dist=replicas(), optimizer=optimizer), fitted(kind, optimizer=optimizer))


class TwoHeads(models.Captions):
    """The compiled optimizer updates one of two layers."""

    def __init__(self):
        super().__init__()
        self.two, self.other = keras.Sequential([keras.Input((5,)), layers.Dense(3)]), models.sgd()

    def train_step(self, data):
        for optimizer, head in ((self.optimizer, self.head), (self.other, self.two)):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(head(data[0])))
            optimizer.apply(tape.gradient(loss, head.trainable_weights), head.trainable_weights)
        return {"loss": loss}


@pytest.mark.long
@pytest.mark.own_process
def test_the_average_of_the_optimizer_is_of_the_weights_that_it_updates():
    """Keras builds it for all weights on replicas, and at the end of fit the other's would be overwritten, too."""
    average = clipping(use_ema=True, ema_overwrite_frequency=None)
    found, expected = (fitted(TwoHeads, dist=dist, optimizer=average) for dist in (replicas(), DistributedFit("none")))
    assert len(found[0].optimizer.variables) == len(expected[0].optimizer.variables)
    compare(found, expected)


class Noisy(models.Contrastive):
    """Draws as many rows of noise as batches have, so that a part of one wouldn't fit."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw()

    def train_step(self, data):
        weights = self.encoder.trainable_weights
        with tf.GradientTape() as tape:
            rows = self.encoder(data[0]) + self.draw((8, 4))
            loss = ops.mean(ops.square(ops.matmul(rows, ops.transpose(rows))))
        self.of_encoder.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.long
@pytest.mark.own_process
def test_numbers_that_a_step_draws_are_the_same_on_all_replicas():
    dist = replicas()
    seeded = functools.partial(Noisy, lambda: functools.partial(keras.random.normal, seed=5))
    compare(fitted(seeded, 8, dist=dist), fitted(seeded, 8))
    for weight in fitted(functools.partial(Noisy, lambda: tf.random.normal), 8, dist=dist)[0].weights:
        first, second = dist.strategy.experimental_local_results(weight.value)
        np.testing.assert_array_equal(first, second)


@pytest.mark.own_process
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {}])
def test_a_random_generator_is_refused_on_replicas(mode):
    def draw():
        return tf.function(tf.random.Generator.from_seed(1).normal, autograph=False)

    with pytest.raises(ValueError, match=r"draws from a tf.random.Generator.*Draw with keras.random"):
        fitted(functools.partial(Noisy, draw), 8, dist=replicas(), **mode)


class Window(models.Diffusion):
    def train_step(self, data):
        return super().train_step(data[0])


def fitted_in_windows(kind=Window, data=(models.ROWS,), weighting="examples", dist=None, sizes=(3, 2, 2, 3, 3, 1)):
    """Trains in windows of three micro-batches of these sizes; on whole batches, without weighting."""

    def optimizer():
        return AccumulatingOptimizer(models.sgd(), steps=3, weighting=weighting) if weighting else models.sgd()

    with dist.scope() if dist else contextlib.nullcontext():
        model = compiled(kind, optimizer=optimizer, jit_compile=False)
    if dist:
        dist.prepare(model)
    batches = MicroBatches(data, sizes)
    callbacks = [ExactAccumulation()] if weighting else []
    return model, model.fit(dist.dataset(batches) if dist else batches, callbacks=callbacks, **OPTIONS).history


# One micro-batch has one row, and a replica none. Counters and averages are assigned once a window.
@pytest.mark.own_process
@pytest.mark.few(0, "None")
@pytest.mark.parametrize("how", [None, {"shard": "parameters"}, {}, {"shard": "optimizer"}])
def test_windows(how):
    found = fitted_in_windows(dist=None if how is None else replicas(**how))
    compare(found, fitted_in_windows(weighting=None, sizes=(7, 7)))


@pytest.mark.long
def test_windows_of_micro_batches_that_count_the_same():
    compare(fitted_in_windows(weighting="uniform", sizes=(3,) * 6), fitted_in_windows(weighting=None, sizes=(9, 9)))


LABELED = models.ROWS, models.LABELS


@pytest.mark.parametrize(
    ("kind", "data", "weighting", "says"),
    [
        (Window, LABELED, "auto", r"own train_step.*Write AccumulatingOptimizer\(\.\.\., weighting='examples'\)"),
        (models.Captions, LABELED, "examples", r"updates weights several times.*microbatch\(model, size=4\)"),
        (lambda: own_steps.model(own_steps.Numbers), own_steps.data(), "examples", "gives 'sum_of_sums' a number"),
    ],
)
def test_what_windows_refuse(kind, data, weighting, says):
    with pytest.raises(ValueError, match=says):
        fitted_in_windows(kind, data, weighting)


class StopAfter(keras.callbacks.Callback):
    """Breaks off after the second batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


@pytest.mark.few(1)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize("shard", ["parameters", None, "optimizer"])
def test_backups_have_the_state_of_a_model_s_own_optimizers(shard, tmp_path):
    adam = functools.partial(keras.optimizers.Adam, 0.01)

    def train(*callbacks):
        return fitted(models.Gan, 8, dist=replicas(shard=shard), callbacks=callbacks, optimizer=adam)[0].get_weights()

    with contextlib.suppress(KeyboardInterrupt):
        train(StopAfter(), Backup(tmp_path, every=1))
    for one, other in zip(train(Backup(tmp_path, every=1)), train(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_backups_refuse_an_optimizer_that_they_would_leave_out(tmp_path):
    hidden = keras.optimizers.Adam(name="hidden")

    class Hidden(TwoHeads):
        other = property(lambda self: hidden, lambda self, optimizer: None)

    with pytest.raises(ValueError, match="with hidden, which is in no attribute of the model"):
        fitted(Hidden, size=4, callbacks=[Backup(tmp_path)])


@pytest.mark.long
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize("shard", [None, "optimizer", "parameters"])
def test_checkpoints_of_shards(shard, tmp_path):
    """TensorFlow's hold whole variables, for any number of replicas, and go on in the middle."""

    def made(shard, devices=2):
        dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"][:devices], shard=shard, min_shard_bytes=16)
        adam = functools.partial(keras.optimizers.Adam, 0.01)
        with dist.scope():
            return dist, compiled(models.Gan, optimizer=adam, jit_compile=False)

    def half(dist, model, number):
        rows = tuple(each[16 * number : 16 * number + 16] for each in data_of(model)[0])
        dist.fit(model, rows, batch_size=8, shuffle=False, verbose=0)

    def checkpoint(model):
        return tf.train.Checkpoint(model=model, **dict(zip("dg", model.optimizers, strict=True)))

    dist, model = made("parameters")
    half(dist, model, 0)
    path = checkpoint(model).write(str(tmp_path / "checkpoint"))
    half(dist, model, 1)
    resumed = made(shard, 1 if shard is None else 2)
    # Makes its states.
    half(*resumed, 1)
    checkpoint(resumed[1]).restore(path)
    half(*resumed, 1)
    for one, other in zip(resumed[1].get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


# In `make test`, test_shown_by_workers.py has "Tracking".
@pytest.mark.own_process
@pytest.mark.parametrize(
    ("cases", "in_graphs"),
    [
        (("Guide", "Loss", "Counted", "Counted, sum", "CountedOnce"), ("Guide",)),
        pytest.param(own_steps.CASES, own_steps.CASES, marks=pytest.mark.long),
    ],
    ids=["few", "all"],
)
def test_own_test_steps_show_what_one_device_shows(cases, in_graphs):
    for case in cases:
        mode = {} if case in in_graphs else {"run_eagerly": True}
        found, expected = (own_steps.evaluated(case, make, **mode) for make in (replicas, None))
        assert found == pytest.approx(expected, rel=1e-6), (case, mode)


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("made", [own_steps.Numbers, own_steps.SummedNumbers, own_steps.Largest])
def test_numbers_that_an_own_train_step_gives_to_metrics_or_returns(made):
    def shown(dist=None, size=None):
        with dist.scope() if dist else contextlib.nullcontext():
            model = own_steps.model(made, metrics=None, run_eagerly=True)
        if dist:
            dist.prepare(model)
        batches = MicroBatches(own_steps.data(), (3, 7, 5))
        with microbatch(model, size) if size else contextlib.nullcontext():
            return model.fit(dist.dataset(batches) if dist else batches, shuffle=False, verbose=0).history

    expected = shown()
    for how in ((None, 3), (replicas(), None), (replicas(exact=False), 2)):
        found = shown(*how)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-5), (name, how)


@pytest.mark.parametrize(("name", "says"), [("clipping_step", None), ("sharpness_aware", "assigns to its weight")])
def test_windows_hold_a_statement_to_the_first_window(name, says):
    """The gradient of a clipped loss isn't the mean of its parts'."""
    refused = pytest.raises(ValueError, match=says) if says else pytest.warns(UserWarning, match="% off the gradient")
    with refused:
        # `pytest.warns` shows again what it has caught.
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        ways.accumulation(MINIATURES[name], weighting="examples")
