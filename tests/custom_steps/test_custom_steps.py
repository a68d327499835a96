"""Models with a `train_step` of their own take the step of one device on the whole batch, however it is divided."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from sample_models import step_models as models
from sample_models.step_models import compiled, data_of

from keras_paragrad import AccumulatingOptimizer, Backup, DistributedFit, ExactAccumulation, microbatch, recompute
from keras_paragrad.storage.sharded import sharded_value

KINDS = {
    "autoencoder": (models.Autoencoder,),
    "sum": (models.SummedAutoencoder,),
    "counted sum": (models.CountedSum,),
    "gan": (models.Gan,),
    "wgan": (models.Gan, 2, 10.0, 0.3),
    "diffusion": (models.Diffusion,),
    "cycle": (models.Cycle,),
    "captions": (models.Captions,),
}
# Each call of an optimizer, with the phase that it is in.
PHASES = {"gan": [0, 1], "wgan": [0, 1, 2], "cycle": [0, 0, 0, 0], "captions": [0, 1, 2]}
OPTIONS = {"epochs": 2, "shuffle": False, "verbose": 0}


def fitted(model, rows=11, fit=None, **options):
    history = (fit or model.fit)(*data_of(model), batch_size=rows, **OPTIONS, **options).history
    return model, history


def compare(found, expected, logs=None):
    """Weights of the scale of the largest of each, and logs, by name or all."""
    (ours, history), (plain, shown) = found, expected
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * max(1.0, np.abs(other).max(initial=0)))
    assert history.keys() == shown.keys()
    for name in logs if logs is not None else shown:
        np.testing.assert_allclose(history[name], shown[name], rtol=2e-6, err_msg=name)


@pytest.mark.slow(60)
@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["captions", "wgan", "autoencoder", "gan", "sum", "diffusion", "cycle"])
def test_slices(name):
    expected = fitted(compiled(*KINDS[name], jit_compile=False))
    ours = compiled(*KINDS[name], jit_compile=False)
    with microbatch(ours, 4):
        compare(fitted(ours), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", [{"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2}])
def test_slices_in_other_modes(name, mode):
    expected = fitted(compiled(*KINDS[name], **mode))
    ours = compiled(*KINDS[name], **mode)
    microbatch(ours, 5)
    compare(fitted(ours), expected)


@pytest.mark.long
def test_batches_of_unknown_size():
    def train(size):
        model = compiled(models.Captions, jit_compile=False)
        if size:
            microbatch(model, size)
        rows = tf.data.Dataset.from_tensor_slices((models.ROWS, models.LABELS)).batch(11)
        return model, model.fit(rows, epochs=2, shuffle=False, verbose=0).history

    compare(train(4), train(None))


def replicas(**options):
    return DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], **options)


def on_replicas(name, size=None, rows=11, shard=None, **options):
    dist = replicas(shard=shard, min_shard_bytes=16)
    with dist.scope():
        model = compiled(*KINDS[name], jit_compile=False, **options)
    assert any(map(sharded_value, model.trainable_weights)) == (shard is not None)
    if size:
        microbatch(model, size)
    return fitted(model, rows, fit=lambda *data, **keywords: dist.fit(model, *data, **keywords))


@pytest.mark.slow(60)
@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("name", ["gan", "autoencoder", "captions", "wgan", "sum", "diffusion", "cycle"])
def test_replicas(name):
    compare(on_replicas(name), fitted(compiled(*KINDS[name], jit_compile=False)))


class TwoHeads(keras.Model):
    """The compiled optimizer updates one of two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]) for _ in range(2))
        self.built = True

    def call(self, x):
        return self.one(x) + self.two(x)

    def train_step(self, data):
        x, y = data
        for optimizer, head in ((self.optimizer, self.one), (self.other, self.two)):
            with tf.GradientTape() as tape:
                loss = ops.mean((head(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, head.trainable_weights), head.trainable_weights)
        return {"loss": loss}


@pytest.mark.own_process
def test_the_average_of_the_optimizer_is_of_the_weights_that_it_updates():
    """Keras builds it for all weights on replicas, and at the end of fit the other's would be overwritten, too."""

    def train(dist):
        keras.utils.set_random_seed(0)
        with dist.scope():
            model = TwoHeads()
            model.other = models.sgd()
            model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=None))
        x = np.random.default_rng(0).normal(size=(11, 2)).astype("float32")
        dist.fit(model, x, x**2, batch_size=4, **OPTIONS)
        return model

    found, expected = train(replicas()), train(DistributedFit("none"))
    assert len(found.optimizer.variables) == len(expected.optimizer.variables)
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("name", ["autoencoder", "captions", "gan", "wgan", "sum", "diffusion", "cycle"])
def test_slices_on_replicas(name):
    """Also with a last batch of one row, of which a replica gets none."""
    expected = fitted(compiled(*KINDS[name], jit_compile=False), 31)
    compare(on_replicas(name, 3, 31), expected)


@pytest.mark.slow(30)
@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("size", [3, None])
def test_sums_that_a_mean_counts_by_rows(size):
    compare(on_replicas("counted sum", size), fitted(compiled(models.CountedSum, jit_compile=False)))


@pytest.mark.long
def test_sums_that_a_mean_counts_by_rows_in_slices():
    model = compiled(models.CountedSum, jit_compile=False)
    with microbatch(model, 4):
        compare(fitted(model), fitted(compiled(models.CountedSum, jit_compile=False)))


def clipping(**clip):
    return functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9, **clip)


# What a step does with weights after an update: averages, clips, reads them in the next phase. Each shard of a row.
IN_SHARDS = [
    ("diffusion", "parameters", 4, 31, clipping(clipnorm=0.1)),
    ("diffusion", "optimizer", None, 11, functools.partial(keras.optimizers.Lamb, 0.01)),
    ("captions", "optimizer", None, 11, clipping(global_clipnorm=0.1)),
    ("wgan", "parameters", 3, 11, models.sgd),
    ("wgan", "optimizer", None, 11, models.sgd),
    ("gan", "parameters", None, 31, clipping(clipvalue=0.01)),
    ("gan", "optimizer", 3, 31, clipping(clipnorm=0.1)),
    ("cycle", "parameters", None, 11, clipping(use_ema=True, ema_overwrite_frequency=2)),
    ("autoencoder", "parameters", 4, 11, functools.partial(keras.optimizers.Lamb, 0.01)),
    ("sum", "parameters", None, 31, models.sgd),
]


@pytest.mark.slow(60)
@pytest.mark.few(2)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize(("name", "shard", "size", "rows", "optimizer"), IN_SHARDS)
def test_shards(name, shard, size, rows, optimizer):
    expected = fitted(compiled(*KINDS[name], optimizer=optimizer, jit_compile=False), rows)
    compare(on_replicas(name, size, rows, shard, optimizer=optimizer), expected)


def accumulating():
    return AccumulatingOptimizer(models.sgd(), steps=4)


# The last batch of an epoch is logged as it is, and a window's last one is a part of it.
@pytest.mark.slow(30)
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["diffusion", "autoencoder"])
def test_windows(name):
    expected = fitted(compiled(*KINDS[name], jit_compile=False), 16)
    ours = compiled(*KINDS[name], optimizer=accumulating, jit_compile=False)
    compare(fitted(ours, 4, callbacks=[ExactAccumulation()]), expected, {"loss", "noise"} & expected[1].keys())


# In `make test`, slices are trained on replicas, in shards too.
@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("shard", ["parameters", None, "optimizer"])
@pytest.mark.parametrize("name", ["diffusion"])
def test_windows_on_replicas(name, shard):
    expected = fitted(compiled(*KINDS[name], jit_compile=False), 12)
    dist = replicas(shard=shard, min_shard_bytes=16)
    with dist.scope():
        ours = compiled(*KINDS[name], optimizer=accumulating, jit_compile=False)
    fit = dist.fit
    found = fitted(ours, 3, lambda *data, **options: fit(ours, *data, callbacks=[ExactAccumulation()], **options))
    # A `Mean` of the step weights the rows of a last window, which is smaller, as it weights those of others.
    compare(found, expected, ())


class StopAfter(keras.callbacks.Callback):
    """Breaks off after the second batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


@pytest.mark.slow(60)
@pytest.mark.few(1)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize(("name", "shard"), [("gan", "parameters"), ("gan", None), ("diffusion", "optimizer")])
def test_backups(name, shard, tmp_path):
    """Of a step with its own optimizers, their state is restored as well."""

    def train(*callbacks):
        dist = replicas(shard=shard, min_shard_bytes=16)
        with dist.scope():
            model = compiled(*KINDS[name], optimizer=functools.partial(keras.optimizers.Adam, 0.01), jit_compile=False)
        with contextlib.suppress(KeyboardInterrupt):
            fitted(model, 8, lambda *data, **options: dist.fit(model, *data, callbacks=list(callbacks), **options))
        return model.get_weights()

    train(StopAfter(), Backup(tmp_path, every=1))
    for one, other in zip(train(Backup(tmp_path, every=1)), train(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_backups_refuse_an_optimizer_that_they_would_leave_out(tmp_path):
    class Hidden(models.Captions):
        def train_step(self, data):
            weights = self.head.trainable_weights
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self.head(data[0])))
            hidden.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    hidden = keras.optimizers.Adam(name="hidden")
    model = compiled(Hidden, jit_compile=False)
    microbatch(model, 4)
    with pytest.raises(ValueError, match="with hidden, which is in no attribute of the model"):
        fitted(model, callbacks=[Backup(tmp_path)])


@pytest.mark.long
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize("shard", [None, "optimizer", "parameters"])
def test_checkpoints_of_shards(shard, tmp_path):
    """TensorFlow's hold whole variables, for any number of replicas, and go on in the middle."""

    def made(shard, devices=2):
        dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"][:devices], shard=shard, min_shard_bytes=16)
        with dist.scope():
            return dist, compiled(
                models.Gan, optimizer=functools.partial(keras.optimizers.Adam, 0.01), jit_compile=False
            )

    def half(dist, model, number):
        (data,) = data_of(model)
        rows = tuple(each[16 * number : 16 * number + 16] for each in data)
        dist.fit(model, rows, batch_size=8, epochs=1, shuffle=False, verbose=0)

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


class Decorated(models.Captions):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class Clipped(models.Captions):
    """Assigns weights right after an update, without any operation in between."""

    def train_step(self, data):
        bias = self.head.weights[1]
        zeros = ops.zeros_like(bias)
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.head(data[0])))
        weights = self.head.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.tracker.update_state(loss)
        self.optimizer.apply(gradients, weights)
        bias.assign(zeros)
        return {"loss": self.tracker.result()}


class Unbuilt(models.Captions):
    """Layers that the step alone builds."""

    def __init__(self):
        super().__init__()
        self.head = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])


@pytest.mark.long
@pytest.mark.own_process
def test_layers_that_the_step_alone_builds_on_replicas(caplog):
    dist = replicas()
    with dist.scope():
        model = compiled(Unbuilt, jit_compile=False)
    found = fitted(model, fit=lambda *data, **keywords: dist.fit(model, *data, **keywords))
    compare(found, fitted(compiled(Unbuilt, jit_compile=False)))
    assert "was not checked" not in caplog.text


class Weighted(keras.Model):
    """A mean weighted by sample weights, from its own `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            losses = ops.square(self(x)[:, 0] - ops.cast(y, "float32"))
            loss = ops.sum(losses * weights) / ops.sum(weights)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [Clipped, Unbuilt, Decorated])
@pytest.mark.slow(30)
@pytest.mark.few(2)
def test_steps_in_other_forms(kind):
    expected = fitted(compiled(kind, jit_compile=False))
    ours = compiled(kind, jit_compile=False)
    microbatch(ours, 4)
    compare(fitted(ours), expected)


class LooksUp(models.Autoencoder):
    """Sparse gradients, a loss scale, and a sum over the rows."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(3, 2)

    def train_step(self, data):
        noise = data[0][1]
        with tf.GradientTape() as tape:
            found = self.table(ops.cast(noise[:, 0] > 0, "int32"))
            loss = ops.sum(ops.square(found - noise[:, :2]))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.table.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.slow(20)
def test_sparse_gradients_and_a_loss_scale(caplog):
    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))

    expected = fitted(compiled(LooksUp, optimizer=scaled, jit_compile=False))
    ours = compiled(LooksUp, optimizer=scaled, jit_compile=False)
    with microbatch(ours, 4):
        compare(fitted(ours), expected)
    assert "was not checked" not in caplog.text


def test_what_a_loss_divides_by_is_found(caplog):
    caplog.set_level("INFO", "keras_paragrad")
    weights = np.linspace(0.1, 3, 32).astype("float32")

    def train(size):
        model = compiled(Weighted, jit_compile=False)
        if size:
            microbatch(model, size)
        model.fit(models.ROWS, models.LABELS, 11, sample_weight=weights, **OPTIONS)
        return model

    ours, plain = train(4), train(None)
    np.testing.assert_allclose(ours.dense.kernel, plain.dense.kernel, atol=1e-6)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "keras_paragrad"]
    assert "weighted by: sgd" in said
    assert "sample_weight, phase 1." in said


@pytest.mark.slow(20)
def test_random_numbers_of_a_step_go_from_slice_to_slice():
    """Those of rows differ from slice to slice, and a step draws others than the one before."""
    seen = []

    class Drawing(models.DrawingDiffusion):
        def noise(self, rows):
            noise = super().noise(rows)
            tf.py_function(lambda each: seen.append(each.numpy()), [noise], [])
            return noise

    model = compiled(Drawing, jit_compile=False)
    microbatch(model, 4)
    fitted(model, 8)
    # Before them, a trial has drawn others.
    drawn = np.concatenate(seen)[-2 * len(models.ROWS) :]
    assert len(np.unique(drawn)) == drawn.size


class FixedNoise(models.Diffusion):
    def noise(self, rows):
        return rows * 0 + ops.sum(keras.random.normal((6, 5), seed=self.seeds), axis=0)


class RawVariable(models.Captions):
    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0)

    def train_step(self, data):
        self.seen.assign_add(1)
        return super().train_step(data)


class InFunction(RawVariable):
    """Of which the step calls a compiled part."""

    @tf.function
    def count(self):
        self.seen.assign_add(1)

    def train_step(self, data):
        self.count()
        return super(RawVariable, self).train_step(data)


class RunningMaximum(models.Captions):
    """Scales rows by the largest number so far."""

    def __init__(self):
        super().__init__()
        self.largest = self.add_weight(shape=(), initializer="ones", trainable=False, name="largest")

    def train_step(self, data):
        x, y = data
        scaled = x / (self.largest + 0)
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return super().train_step((scaled, y))


class InBranch(models.Captions):
    def train_step(self, data):
        return tf.cond(tf.reduce_sum(data[0]) > 0, lambda: super(InBranch, self).train_step(data), lambda: {})


class WithoutUpdate(models.Captions):
    def train_step(self, data):
        return {"loss": 0.0}


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("kind", "stated", "says"),
    [
        (models.Contrastive, "auto", r"update 1 of 2, by 'sgd.*compares rows"),
        (FixedNoise, "auto", "for a fixed number of rows"),
        (RawVariable, "auto", "assigns a tf.Variable .*self.add_weight"),
        (InFunction, "auto", "assigns a tf.Variable"),
        (RunningMaximum, "auto", "The state of .*largest is updated with each of the slices"),
        (InBranch, "auto", "within a tf.function, a tf.cond"),
        (WithoutUpdate, "auto", "doesn't call apply"),
        (models.Captions, "sum", "sum .* off"),
        (models.Captions, "mask", "needs the outputs of the model"),
    ],
)
def test_what_can_not_be_divided_is_refused_before_the_first_step(kind, stated, says):
    model = compiled(kind, jit_compile=False)
    before = model.get_weights()
    microbatch(model, 4, weighting=stated)
    with pytest.raises(ValueError, match=says):
        fitted(model)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


class RejectsSyntheticRows(models.Captions):
    """Can't be tried: it asserts what made-up rows don't have."""

    def train_step(self, data):
        if data[0].shape[0] == 8:
            raise ValueError("there are never eight rows")
        return super().train_step(data)


def test_what_can_not_be_tried_is_not_guessed(caplog):
    model = compiled(RejectsSyntheticRows, jit_compile=False)
    with microbatch(model, 4), pytest.raises(ValueError, match="could not be tried.*state it: weighting='examples'"):
        fitted(model)
    assert "there are never eight rows" in caplog.text


@pytest.mark.slow(20)
def test_another_weighting_is_tried_anew():
    model = compiled(models.SummedAutoencoder, jit_compile=False)
    with microbatch(model, 4):
        fitted(model)
    with (
        microbatch(model, 4, weighting="examples"),
        pytest.raises(ValueError, match="'examples' is .* 'sum' fits"),
    ):
        fitted(model)


def test_windows_refuse_updates_that_follow_each_other():
    model = compiled(models.Captions, optimizer=accumulating, jit_compile=False)
    with pytest.raises(ValueError, match=r"updates weights 3 times.*microbatch\(model, size\)"):
        fitted(model, 4, callbacks=[ExactAccumulation()])


class SharpnessAware(keras.Model):
    """Climbs, takes the gradient there, and steps back."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        steps = [0.05 * each for each in tape.gradient(loss, weights)]
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            above = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(above, weights)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


def test_sharpness_aware_minimization_is_refused_with_what_takes_it():
    def trained(again):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = SharpnessAware(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))
        model.compile("sgd", "mse")
        if again:
            recompute(model, every=1)
        return model

    def fit(model):
        x = np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        return model.get_weights()

    model = trained(again=False)
    with microbatch(model, 4), pytest.raises(ValueError, match=r"a value that depends on the rows.*recompute\(model\)"):
        fit(model)
    for one, other in zip(fit(trained(again=True)), fit(trained(again=False)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:1 BatchNormalization layer normalizes")
def test_layers_that_normalize_by_all_replicas_are_refused_in_slices():
    class Normalized(models.Captions):
        def __init__(self):
            super().__init__()
            normalization = keras.layers.BatchNormalization(synchronized=True)
            self.head = keras.Sequential([keras.Input((5,)), normalization, keras.layers.Dense(3)])

    dist = replicas()
    with dist.scope():
        model = compiled(Normalized, jit_compile=False)
    microbatch(model, 3)
    with pytest.raises(ValueError, match="train_step of Normalized .* of all replicas. .*leave microbatch out"):
        fitted(model, fit=lambda *data, **options: dist.fit(model, *data, **options))


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("kind", "says"), [(models.Diffusion, "changes states once per update"), (models.SummedAutoencoder, "'sum'")]
)
def test_uniform_says_what_it_needs(kind, says):
    optimizer = functools.partial(AccumulatingOptimizer, models.sgd(), steps=2, weighting="uniform")
    model = compiled(kind, optimizer=optimizer, jit_compile=False)
    with pytest.warns(UserWarning, match=f"micro-batches of one size, a loss that is a mean.*{says}"):
        fitted(model, 4, callbacks=[ExactAccumulation()])


class MixedLog(models.Autoencoder):
    """Returns the mean over the epoch plus the loss of the batch, of which slices have several."""

    def train_step(self, data):
        images, _ = data[0]
        with tf.GradientTape() as tape:
            mean, _ = ops.split(self.encoder(images), 2, axis=-1)
            loss = ops.mean(ops.square(images - self.decoder(mean)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.tracker.update_state(loss)
        return {"mean": self.tracker.result(), "mixed": self.tracker.result() + loss}


def test_a_log_of_a_result_and_the_batch_is_refused_in_slices():
    model = compiled(MixedLog)
    refused = pytest.raises(ValueError, match="of MixedLog returns 'mixed', computed from the result of a metric and")
    with microbatch(model, 4), refused:
        model.fit(*data_of(model), batch_size=11, **OPTIONS)
