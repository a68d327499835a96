"""`deterministic=`: the same bits on one device, in slices, on any number of replicas and workers, and when resumed."""

import contextlib
import functools
import hashlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from runner import own_process
from trainings.deterministic_training import build_model, compile_model, make_data, train, train_in_world

from keras_paragrad import AccumulatingOptimizer, DistributedFit, microbatch, transform_gradients
from keras_paragrad.cli.main import main
from keras_paragrad.distribution import Pipeline
from keras_paragrad.distribution.checkpoint.files import DamagedBackupError
from keras_paragrad.distribution.consistency import describe
from keras_paragrad.distribution.digest import Digest, digest_of
from keras_paragrad.distribution.replicas import parallelism
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.step.batch_part import BatchPart
from keras_paragrad.engine.step.fixed_parts import PartFunction
from keras_paragrad.engine.training.builder import StepBuilder

layers = keras.layers
KINDS = ("convolutions", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("recurrent", "attention")))


def world(replicas: int, **options: object) -> DistributedFit:
    if replicas == 1:
        return DistributedFit("none", deterministic=8, **options)
    return DistributedFit("mirrored", [f"CPU:{index}" for index in range(replicas)], deterministic=8, **options)


def of(digest: Digest) -> tuple[str | None, ...]:
    return digest[:3]


@functools.cache
def on_one_device(kind: str, **options: object):
    """The digest and the history that training in other worlds is compared with."""
    return train(world(1), kind, **options)


@pytest.mark.grappler
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_any_world(kind):
    one, history = train(world(1), kind, validated=True)
    two, history_of_two = train(world(2), kind, validated=True)
    assert of(one) == of(two)
    assert history == history_of_two
    sliced, history_in_slices = train(8, kind, validated=True)
    assert of(sliced) == of(one)
    assert history_in_slices["loss"] == history["loss"]
    assert history_in_slices["accuracy"] == history["accuracy"]


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "kind"), [(3, "dense"), pytest.param(4, "convolutions", marks=pytest.mark.long)])
def test_more_replicas(replicas, kind):
    """With three, the last one computes no part."""
    one = on_one_device(kind)
    task = {"replicas": replicas, "kind": kind}
    (other,) = own_process.call(train_in_world, task, [{}], seconds=200)
    assert (list(of(one[0])), one[1]) == (other["digest"], other["history"])


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_workers(workers):
    one = on_one_device("dense", validated=True)
    environments = own_process.environments_of_workers(workers)
    for other in own_process.call(train_in_world, {"kind": "dense", "validated": True}, environments, seconds=300):
        assert (list(of(one[0])), one[1]) == (other["digest"], other["history"])


def test_gradients_are_those_of_whole_batches():
    """Against plain Keras, on batches that 8 doesn't divide, the last one of fewer rows than parts."""

    def trained(dist: DistributedFit | None) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        x, y = make_data("convolutions")
        model = compile_model(keras.Sequential([keras.Input(x.shape[1:]), layers.Flatten(), layers.Dense(5)]))
        data = x[:75], y[:75], np.linspace(0, 2, 75, dtype="float32")
        fit = model.fit if dist is None else functools.partial(dist.fit, model)
        fit(*data[:2], sample_weight=data[2], batch_size=23, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for ours, expected in zip(trained(world(1)), trained(None), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.long
def test_accumulation_and_clipping():
    def optimizer() -> keras.optimizers.Optimizer:
        return AccumulatingOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.01), steps=2)

    one, two = (train(world(replicas), "dense", optimizer) for replicas in (1, 2))
    assert (of(one[0]), one[1]) == (of(two[0]), two[1])


@pytest.mark.long
def test_optimizer_states_in_shards():
    digest, history = train(world(2, shard="optimizer", min_shard_bytes=1), "dense")
    one = on_one_device("dense")
    assert (of(digest), history) == (of(one[0]), one[1])


@pytest.mark.long
def test_prepared_models_are_trained_alike():
    assert of(train(world(2), "dense", prepared=True)[0]) == of(on_one_device("dense")[0])


def test_rows_of_embeddings_are_summed_with_a_warning():
    dist = world(1)
    with dist.scope():
        model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(20, 8), layers.Flatten()])
        model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="the gradients of all lookups of a row are summed"):
        dist.fit(model, np.ones((16, 7), "int32"), np.ones((16, 56)), verbose=0)


@pytest.mark.long
def test_batches_that_are_given_one_by_one():
    """By `train_on_batch`, of 21 rows, which two replicas and eight parts don't divide; outputs are regularized."""
    digests = []
    for replicas in (1, 2):
        dist, (x, y) = world(replicas, weighting="examples"), make_data("dense")
        with dist.scope():
            keras.utils.set_random_seed(1)
            outputs = layers.Dense(5, activity_regularizer="l2")
            model = compile_model(keras.Sequential([keras.Input((6,)), layers.Dropout(0.3), outputs]))
        dist.prepare(model)
        logs = [str(model.train_on_batch(x[start : start + 21], y[start : start + 21])) for start in range(0, 84, 21)]
        digests.append([*of(digest_of(model)), logs])
    assert digests[0] == digests[1]


def test_parts_draw_numbers_of_their_own():
    """With dropout of all but a few values, equal rows in all parts would give all parts one gradient."""
    dist, x = world(1), np.ones((64, 32), "float32")
    with dist.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((32,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(1.0), "mae")
    before = model.get_weights()[0]
    dist.fit(model, x, np.full((64, 1), 1e6, "float32"), batch_size=64, verbose=0)
    # The mean over rows of what is kept, times two. If all parts drew the same, it would be a multiple of 1/4.
    change = (model.get_weights()[0] - before).ravel()
    assert np.any(np.abs(change * 4 - np.round(change * 4)) > 1e-3)


def test_batch_statistics_of_fewer_rows_than_parts():
    """Five rows are five parts, whose statistics are averaged, without those of the three empty parts."""
    dist, x = world(1), np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    with dist.scope():
        model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.5), layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="statistics"):
        dist.fit(model, x, x[:, :1], batch_size=5, verbose=0)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), 0.5 * x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance.numpy(), np.full(4, 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "shard"),
    [(1, 2, None), *(pytest.param(4, 3, shard, marks=pytest.mark.long) for shard in (None, "parameters"))],
)
def test_resumed_elsewhere_within_a_window(before, after, shard, tmp_path):
    """Interrupted after 5 batches, in the second of three micro-batches of a window; resumed on another world."""
    whole = on_one_device("dense", windows=3)
    task = {"kind": "dense", "windows": 3, "backups": str(tmp_path), "shard": shard}
    interrupted = {**task, "replicas": before, "interrupt_after": 5}
    assert own_process.call(train_in_world, interrupted, [{}], seconds=200) == [None]
    (resumed,) = own_process.call(train_in_world, {**task, "replicas": after}, [{}], seconds=200)
    assert (list(of(whole[0])), whole[1]) == (resumed["digest"], resumed["history"])


@pytest.mark.long
def test_another_kind_of_processor_is_said(tmp_path, caplog, monkeypatch):
    def trained(epochs):
        dist = world(1)
        with dist.scope():
            keras.utils.set_random_seed(1)
            model = compile_model(build_model("dense"))
        backups = dist.callbacks(tmp_path, delete_when_done=False)
        dist.fit(model, *make_data("dense"), batch_size=64, epochs=epochs, verbose=0, callbacks=backups)

    trained(1)
    trained(2)
    assert "other kernels" not in caplog.text
    monkeypatch.setattr(describe, "_processor", lambda: "Another Processor")
    trained(3)
    assert "Another Processor here" in caplog.text


@pytest.mark.long
def test_the_digest_shows_another_order_of_additions(monkeypatch):
    def add_in_turn(part: PartFunction, sums: list[BatchPart]) -> BatchPart:
        return functools.reduce(lambda total, each: part._add([total, each]), sums)

    expected, _ = on_one_device("dense")
    monkeypatch.setattr(PartFunction, "add_in_order", add_in_turn)
    added, _ = train(world(1), "dense")
    assert added.weights != expected.weights
    assert added.data_order == expected.data_order


def test_the_digest_shows_another_order_of_rows():
    expected, _ = on_one_device("dense")
    reordered, _ = train(world(1), "dense", seed=5)
    assert reordered.data_order != expected.data_order


def test_files_have_the_digest_of_the_model(tmp_path, capsys):
    model, dist = build_model("dense"), world(1)
    compile_model(model)
    x, y = make_data("dense")
    backups = dist.callbacks(tmp_path / "backups", delete_when_done=False)
    dist.fit(model, x, y, batch_size=64, verbose=0, callbacks=backups)
    expected = digest_of(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    paths = [tmp_path / "backups", tmp_path / "model.keras", tmp_path / "model.weights.h5"]
    for path in paths:
        assert of(digest_of(path)) == of(expected), path
    assert of(digest_of(keras.saving.load_model(tmp_path / "model.keras")))[:2] == of(expected)[:2]
    assert main(["digest", *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "They are the same."
    assert printed.count(str(expected.weights)) == len(paths)
    dist.fit(model, x, y, batch_size=64, verbose=0)
    model.save(tmp_path / "later.keras")
    assert main(["digest", str(paths[1]), str(tmp_path / "later.keras")]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "They differ in weights, optimizer, data order."


def test_the_digest_shows_swapped_variables(tmp_path, capsys):
    """Of one shape and dtype: kernels of two layers, a scale and an average of one layer, a bias and a scale."""

    def built():
        middle = [layers.Dense(4), layers.BatchNormalization(name="a"), layers.Dense(4, name="head")]
        model = keras.Sequential([keras.Input((4,)), *middle])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
        model.optimizer.build(model.trainable_variables)
        draw = np.random.default_rng(0)
        model.set_weights([draw.normal(size=weight.shape) for weight in model.get_weights()])
        return model

    def files_of(model, name):
        model.save(tmp_path / f"{name}.keras")
        model.save_weights(tmp_path / f"{name}.weights.h5")
        return [str(tmp_path / f"{name}.{ending}") for ending in ("keras", "weights.h5")]

    # Automatic names differ.
    model, same = built(), built()
    files = files_of(model, "model")
    assert len({of(digest_of(each)) for each in (model, same, *files)}) == 1
    assert main(["digest", *files]) == 0
    weights = model.get_weights()
    for first, second in [(0, 6), (2, 4), (1, 2)]:
        swapped = [*weights]
        swapped[first], swapped[second] = swapped[second], swapped[first]
        model.set_weights(swapped)
        swapped_files = files_of(model, "swapped")
        assert main(["digest", *swapped_files]) == 0
        assert [main(["digest", *pair]) for pair in zip(files, swapped_files, strict=True)] == [3, 3]
        assert capsys.readouterr().out.splitlines()[-1] == "They differ in weights."


@pytest.mark.long
def test_shards_and_their_backups_have_the_same_digest(tmp_path):
    """Shards are joined, without the padding of the last one."""
    dist, digests = world(2, shard="parameters", min_shard_bytes=1), []

    class Digests(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            digests.append(of(digest_of(self.model)))

    digest, history = train(dist, "dense", callbacks=[Digests(), *dist.callbacks(tmp_path, delete_when_done=False)])
    one = on_one_device("dense")
    assert (of(digest), history) == (of(one[0]), one[1])
    backups = sorted(tmp_path.glob("*.backup"))
    assert [of(digest_of(path)) for path in backups] == digests
    shards = next(tmp_path.glob(f"{backups[0].stem}-*-of-*"))
    shards.write_bytes(shards.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedBackupError, match="00000-of-00001.npz: its checksum differs"):
        digest_of(backups[0])


def test_nothing_to_digest(tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    file = tmp_path / "notes.txt"
    for path, found in [(tmp_path, "is a directory without backups"), (file, "is another file"), ("x", "missing")]:
        with pytest.raises(ValueError, match=found):
            digest_of(path)


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Counting(layers.Layer):
    """Counts its calls in a variable of TensorFlow's."""

    def build(self, shape):
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class Drawing(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x), seed=1)


class DrawingWithoutSeed(layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


class Averaging(layers.Layer):
    """Keeps a moving average of its inputs."""

    def build(self, shape):
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.average.assign(0.5 * self.average + 0.5 * keras.ops.mean(x))
        return x


def furthest(y, y_pred):
    """A number of the whole batch, not of its examples."""
    return keras.ops.max(keras.ops.abs(y - y_pred)) * keras.ops.ones_like(y[:, 0])


REFUSED = {
    "a state": (lambda: keras.Sequential([Averaging(), layers.Dense(1)]), "once per batch"),
    "a weight assigned": (lambda: keras.Sequential([layers.SpectralNormalization(layers.Dense(1))]), "is trained"),
    "own step": (lambda: OwnStep(), "Override compute_loss"),
    "a variable of TensorFlow": (lambda: keras.Sequential([Counting(), layers.Dense(1)]), "that Keras does not know"),
    "numbers of TensorFlow": (lambda: keras.Sequential([Drawing(), layers.Dense(1)]), "SeedGenerator"),
    "numbers of no seed": (lambda: keras.Sequential([DrawingWithoutSeed(), layers.Dense(1)]), "SeedGenerator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models(name):
    make, advice = REFUSED[name]
    dist, x = world(1), np.ones((16, 4), "float32")
    with dist.scope():
        model = make()
        model.compile("sgd", "mse")
    with pytest.raises((IndivisibleError, ValueError), match=advice):
        dist.fit(model, x, x[:, :1], verbose=0)


def test_metrics_of_ones_own_get_whole_batches():
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")

    def shown(dist=None):
        keras.utils.set_random_seed(0)
        with dist.scope() if dist else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[furthest, "mae"])
        if dist:
            dist.prepare(model)
        how = {"batch_size": 7, "verbose": 0}
        history = model.fit(x, x[:, :1], epochs=2, shuffle=False, **how).history
        return [*np.ravel(list(history.values())), *model.evaluate(x, x[:, :1], **how)]

    one, two = shown(world(1)), shown(world(2))
    assert one == two
    np.testing.assert_allclose(one, shown(), rtol=1e-5)


@pytest.mark.long
def test_prepared_again_with_other_arguments():
    """The last `DistributedFit` counts, whatever an earlier one has filled."""
    model = compile_model(build_model("dense"))
    x, y = make_data("dense")
    for parts in (8, 4):
        dist = DistributedFit("none", deterministic=parts, weighting="examples" if parts == 8 else "auto")
        dist.fit(model, x, y, batch_size=64, verbose=0)
        split = StepBuilder.of(model).stages.split
        assert (split.parts, split.loss_divisor.weighting) == (parts, dist.options.weighting)
    dist.prepare(model).undo()
    assert StepBuilder.of(model).stages.split is None
    assert "data_order" not in vars(model.optimizer)


def test_the_data_order_goes_with_the_optimizer():
    model = compile_model(build_model("dense"))
    handle, first = microbatch(model, 64, deterministic=8), model.optimizer
    assert "data_order" in vars(first)
    compile_model(model)
    model.fit(*make_data("dense"), batch_size=64, verbose=0)
    assert "data_order" not in vars(first)
    assert "data_order" in vars(model.optimizer)
    handle.undo()
    assert "data_order" not in vars(model.optimizer)


def test_refused_together():
    for options, advice in [
        ({"exact": False}, "exact=False"),
        ({"shard_policy": "already_sharded"}, "shard_policy"),
        ({"strategy": Pipeline(cuts=["dense"])}, "replicas of the whole model"),
    ]:
        with pytest.raises(ValueError, match=advice):
            DistributedFit(deterministic=8, **options)


def test_refused_with_shards():
    dist = world(2, shard="parameters", min_shard_bytes=1)
    with dist.scope():
        model = build_model("dense")
        model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "sparse_categorical_crossentropy")
    with pytest.raises(IndivisibleError, match="clipvalue"):
        dist.fit(model, *make_data("dense"), batch_size=64, verbose=0)


def test_replicas_that_compute_nothing_are_said(caplog):
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], deterministic=3)
    with dist.scope():
        model = compile_model(build_model("dense"))
    dist.prepare(model)
    assert "compute nothing" not in caplog.text
    parallelism._warn_of_idle_replicas(model, 8, 3)
    assert "1 of 3 replicas compute nothing" in caplog.text
    assert "deterministic=12" in caplog.text


def test_refused_synchronized_statistics():
    dist = world(2)
    with dist.scope():
        model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(synchronized=True), layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="synchronized=False"):
        dist.prepare(model)


def test_slices_of_a_fixed_number():
    model = compile_model(build_model("dense"))
    microbatch(model, 4, deterministic=8)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="parts of more than size=4 rows"):
        model.fit(*make_data("dense"), batch_size=64, verbose=0)


def test_slices_on_replicas_need_whole_parts():
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"])
    with dist.scope():
        model = compile_model(build_model("dense"))
    microbatch(model, 64, deterministic=8)
    with pytest.raises(IndivisibleError, match=r"DistributedFit\(\.\.\., deterministic=8\)"):
        dist.fit(model, *make_data("dense"), batch_size=64, verbose=0)


def test_transformed_gradients():
    """A transform gets the gradient of the whole batch, the same bits in any world."""

    def seen(replicas: int) -> list[str]:
        dist, sums = world(replicas), []
        with dist.scope():
            keras.utils.set_random_seed(1)
            model = compile_model(build_model("dense"))

        def note(gradients, variables):
            flat = tf.concat([tf.reshape(each, [-1]) for each in gradients], 0)
            tf.py_function(lambda value: sums.append(hashlib.sha256(value.numpy().tobytes()).hexdigest()), [flat], [])
            return gradients

        transform_gradients(model, note)
        dist.fit(model, *make_data("dense"), batch_size=64, shuffle=False, verbose=0)
        return sums[::replicas]

    assert seen(1) == seen(2)
