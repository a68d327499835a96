"""What made-up rows don't show is proved on the rows of the first update, before it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import largest_difference
from runner import own_process
from trainings import proved_on_workers

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.compat.model import percent
from keras_paragrad.engine.division import first_batch, proof
from keras_paragrad.memory import recompute

ROWS, SIZE = 16, 4
TOLERANCE = 1e-6
X = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype("float32")
Y = X.sum(1, keepdims=True)
MARKER = -999.0
HOLES = np.random.default_rng(1).random((2 * ROWS, 1)) < 0.4


def hardest(y, p):
    """The mean of the ten hardest rows."""
    values = ops.mean(ops.square(y - p), -1)
    return ops.mean(ops.sort(values)[::-1][: ops.minimum(10, ops.shape(values)[0])])


def of_labels(y, p):
    """The mean over the labels that aren't missing."""
    present = ops.cast(ops.not_equal(y, MARKER), "float32")
    return ops.sum(present * ops.square(y - p)) / ops.maximum(ops.sum(present), 1.0)


def by_row(y, p):
    return ops.mean(ops.square(y - p), -1)


class OfItsOwn(keras.Model):
    """Its own `train_step` minimizes `minimized`."""

    minimized = staticmethod(hardest)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(self.minimized(y, self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class CentersLarge(layers.Layer):
    """Subtracts the mean of the rows where one is large."""

    def call(self, x):
        return ops.where(ops.max(ops.abs(x)) > 50, x - ops.mean(x, axis=0), x)


class AddsMean(layers.Layer):
    """Adds a loss that is a mean."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(x**2))
        return x


class KeepsLarge(layers.Layer):
    """Keeps the mean of the last large batch."""

    def build(self, shape):
        self.kept = self.add_weight(shape=(), trainable=False, initializer="zeros", name="kept")

    def call(self, x):
        self.kept.assign(ops.where(ops.max(x) > 1e4, ops.mean(x), self.kept))
        return x


def error_of_labels(y, p):
    """The mean error of a batch, over the labels that aren't missing."""
    present = ops.cast(ops.not_equal(y, MARKER), "float32")
    return ops.sum(present * ops.abs(y - p)) / ops.maximum(ops.sum(present), 1.0)


def model_of(loss, *more, kind=keras.Model, accumulates=False, **arguments):
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    y = x
    for layer in (*more, layers.Dense(8, activation="tanh", name="hidden"), layers.Dense(1, name="output")):
        y = layer(y)
    model, sgd = kind(x, y), keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(AccumulatingOptimizer(sgd, ROWS // SIZE) if accumulates else sgd, loss=loss, **arguments)
    return model


def trained(model, size=ROWS, x=X, y=Y, callbacks=(), fit=None):
    (fit or model.fit)(x, y, batch_size=size, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def in_windows(loss, *more, prove=True, x=X, y=Y, **arguments):
    model = model_of(loss, *more, accumulates=True, **arguments)
    return trained(model, SIZE, x, y, [ExactAccumulation(prove=prove)])


def in_slices(loss, *more, prove=True, weighting="auto", x=X, y=Y, **arguments):
    model = model_of(loss, *more, **arguments)
    with microbatch(model, SIZE, prove=prove, weighting=weighting):
        return trained(model, x=x, y=y)


def on_replicas(loss, *more, prove=True, x=X, y=Y, **arguments):
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], prove=prove)
    with dist.scope():
        model = model_of(loss, *more, **arguments)
    return trained(model, x=x, y=y, fit=lambda *data, **how: dist.fit(model, *data, **how))


@pytest.mark.slow(12)
@pytest.mark.covering
@pytest.mark.parametrize("fit", [in_slices, on_replicas])
@pytest.mark.parametrize(("loss", "y"), [(hardest, Y), (of_labels, np.where(HOLES, MARKER, Y).astype("float32"))])
def test_a_loss_of_more_rows_than_a_part_has_is_computed_on_whole_batches(fit, loss, y):
    assert largest_difference(fit(loss, y=y), trained(model_of(loss), y=y)) < TOLERANCE


@pytest.mark.parametrize("weighting", ["auto", "examples"])
def test_the_loss_of_the_first_batch_evaluated_on_replicas_is_proved(weighting):
    """Training has seen no missing label, or there was none."""
    y = np.where(HOLES, MARKER, Y).astype("float32")
    expected = model_of(of_labels).evaluate(X, y, batch_size=ROWS, verbose=0)
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], weighting=weighting)
    with dist.scope():
        model = model_of(of_labels)
    dist.prepare(model)
    with contextlib.nullcontext() if weighting == "auto" else pytest.warns(UserWarning, match="'examples' as stated"):
        shown = model.evaluate(X, y, batch_size=ROWS, verbose=0)
    assert (weighting == "auto") == bool(np.isclose(shown, expected, rtol=TOLERANCE))


@pytest.mark.parametrize("way", ["slices", "replicas"])
def test_a_first_batch_passed_by_itself_is_proved(way):
    y = np.where(HOLES, MARKER, Y).astype("float32")

    def shown(model):
        losses = [model.train_on_batch(X[:ROWS], y[:ROWS]) for _ in range(2)]
        return [*losses, model.test_on_batch(X[:ROWS], y[:ROWS]), *model.get_weights()[-2][:, 0]]

    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"]) if way == "replicas" else DistributedFit("none")
    with dist.scope():
        model = model_of(of_labels)
    handle = dist.prepare(model) if way == "replicas" else microbatch(model, SIZE)
    np.testing.assert_allclose(shown(model), shown(model_of(of_labels)), rtol=1e-5)
    handle.undo()


@pytest.mark.filterwarnings("ignore:The results of the metrics")
def test_metrics_of_the_first_batch_evaluated_on_replicas_are_proved():
    y = np.where(HOLES, MARKER, Y).astype("float32")
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        model = model_of("mse", metrics=[error_of_labels])
    dist.prepare(model)
    with pytest.raises(ValueError, match=r"error_of_labels is [\d.]+ on 2 parts of the first batch, and [\d.]+ on it"):
        model.evaluate(X, y, batch_size=ROWS, verbose=0)
    model.evaluate(X, Y, batch_size=ROWS, verbose=0)


def test_what_one_worker_finds_on_its_rows_all_compute():
    for shown, expected in own_process.on_workers(proved_on_workers.trained_and_evaluated, None, seconds=120):
        np.testing.assert_allclose(shown, expected, rtol=2e-6)


def test_in_windows_it_is_refused_before_anything_changes():
    model = model_of(hardest, accumulates=True)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"4 parts are \d\d% off the gradient of the whole: its loss divides by"):
        trained(model, SIZE, callbacks=[ExactAccumulation()])
    assert int(model.optimizer.iterations.numpy()) == 0
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def missing(marker, rows):
    y = Y.copy()
    y[rows] = marker
    return y


@pytest.mark.parametrize("first", [1, 13], ids=["the first", "the last"])
def test_every_batch_of_the_first_window_is_seen(first):
    with pytest.raises(ValueError, match="off the gradient of the whole"):
        in_windows(of_labels, y=missing(MARKER, slice(first, first + 3)))


def adding_a_mean():
    return layers.Dense(6, kernel_initializer=keras.initializers.Orthogonal(seed=0)), AddsMean()


def recomputed_in_slices(loss):
    model = recompute(model_of(loss, *adding_a_mean()), every=1).model
    with microbatch(model, SIZE):
        return trained(model)


def test_losses_that_recomputed_layers_add_are_shown_and_tried():
    expected, found = trained(model_of("mse", *adding_a_mean())), recomputed_in_slices("mse")
    assert largest_difference(found, expected) < TOLERANCE
    np.testing.assert_allclose(found.history.history["loss"], expected.history.history["loss"], rtol=TOLERANCE)
    added = keras.losses.MeanSquaredError(reduction="sum")
    expected, found = trained(model_of(added, *adding_a_mean())), recomputed_in_slices(added)
    assert largest_difference(found, expected) < TOLERANCE


def test_an_added_loss_without_a_gradient_is_tried_too():
    with pytest.raises(ValueError, match="'sum' is .* off"):
        in_windows(keras.losses.MeanSquaredError(reduction="sum"), AddsMean())


SOME_MISSING = missing(MARKER, slice(1, 7))


@pytest.mark.filterwarnings("ignore:The results of the metrics")
def test_metrics_that_replicas_show_otherwise_are_refused():
    with pytest.raises(ValueError, match=r"error_of_labels is [\d.]+ on 2 parts of the first batch, and [\d.]+ on it"):
        on_replicas(by_row, y=SOME_MISSING, metrics=[error_of_labels])


@pytest.mark.parametrize("fit", [in_windows, in_slices])
@pytest.mark.filterwarnings("ignore:The results of the metrics")
def test_metrics_that_parts_show_otherwise_are_warned_of(fit):
    with pytest.warns(UserWarning, match="error_of_labels is .* on 4 parts"):
        fit(by_row, y=SOME_MISSING, metrics=[error_of_labels])


def test_metrics_of_rows_are_not_warned_of():
    metrics = [by_row, keras.metrics.R2Score()]
    assert on_replicas(by_row, layers.Dropout(0.3), y=SOME_MISSING, metrics=metrics).history.history


@pytest.mark.parametrize("fit", [in_windows, in_slices, on_replicas])
def test_states_that_parts_leave_otherwise_are_refused(fit):
    with pytest.raises(ValueError, match="The state of keeps_large is updated with each"):
        fit(by_row, KeepsLarge(), x=1e6 * X)


@pytest.mark.parametrize("marker", [np.nan, 255.0])
def test_the_usual_markers_are_tried_where_the_first_window_has_none(marker):
    def loss(y, p):
        present = ops.logical_not(ops.isnan(y)) if np.isnan(marker) else ops.not_equal(y, marker)
        errors = ops.where(present, ops.square(ops.where(present, y, p) - p), 0.0)
        return ops.sum(errors) / ops.maximum(ops.sum(ops.cast(present, "float32")), 1.0)

    with pytest.raises(ValueError, match=r"On 8 made-up rows.* 'examples' is .* off"):
        in_windows(loss, y=missing(marker, slice(20, 24)))


@pytest.mark.slow(8)
def test_where_a_whole_batch_does_not_fit_its_outputs_prove_it(monkeypatch):
    monkeypatch.setattr(proof, "bytes_of", lambda graph: proof.MOST_BYTES)
    with pytest.raises(ValueError, match="off the gradient of the whole"):
        in_windows(hardest)
    in_windows(by_row, layers.Dropout(0.3))


def test_a_train_step_needs_no_proof():
    """Divided by its calls, it takes the whole batch's step."""
    more = layers.Dense(6, "tanh", kernel_initializer="ones")
    found = in_slices(None, CentersLarge(), more, kind=OfItsOwn, x=100 * X)
    assert (
        largest_difference(found, trained(model_of(None, CentersLarge(), more, kind=OfItsOwn), x=100 * X)) < TOLERANCE
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("fit", [in_windows, in_slices])
def test_without_a_proof_it_is_trained(fit):
    assert largest_difference(fit(hardest, prove=False), trained(model_of(hardest))) > 1e-3


def test_what_is_stated_is_warned_of_by_how_much_it_is_off():
    with pytest.warns(UserWarning, match=r"are \d\d% off the gradient of the whole, with weighting='examples'"):
        in_slices(hardest, weighting="examples")


def test_a_layer_that_mixes_large_rows_gets_them_all(caplog):
    caplog.set_level("INFO", "keras_paragrad")
    found = in_slices("mse", CentersLarge(), x=100 * X)
    assert largest_difference(found, trained(model_of("mse", CentersLarge()), x=100 * X)) < TOLERANCE
    assert "Calls of 'centers_large' get whole batches" in caplog.text


@pytest.mark.slow(10)
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("more", "arguments"),
    [
        ([layers.Dropout(0.5), layers.GaussianNoise(0.2)], {}),
        ([layers.Lambda(lambda x: 1e4 * x - 1e4 * x + x)], {}),
        ([layers.Dense(8, activation="relu", dtype="mixed_bfloat16")], {}),
        ([layers.Dense(8, kernel_regularizer="l2")], {"loss_weights": [0.3]}),
    ],
    ids=["random", "rounding", "half precision", "regularized"],
)
def test_what_divides_is_not_refused(more, arguments):
    in_windows(by_row, *more, **arguments)


def test_a_gradient_that_is_not_finite_proves_nothing():
    # As without a division, the weights are NaN then.
    in_slices(by_row, y=np.where(HOLES, np.nan, Y))


def test_what_is_known_is_not_computed(monkeypatch):
    def fail(*arguments, **given):
        raise AssertionError("it was computed")

    monkeypatch.setattr(first_batch, "find_difference", fail)
    in_slices("mse", layers.LayerNormalization(), layers.Dropout(0.1))
    with pytest.raises(AssertionError, match="it was computed"):
        in_slices(by_row)


KNOWN = [
    *(keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError(), keras.losses.Huber(), keras.losses.LogCosh()),
    *(keras.losses.MeanSquaredLogarithmicError(), keras.losses.Poisson(), keras.losses.Hinge()),
    *(keras.losses.BinaryCrossentropy(from_logits=True), keras.losses.KLDivergence(), keras.losses.CosineSimilarity()),
]


@pytest.mark.slow(20)
@pytest.mark.parametrize("loss", KNOWN, ids=lambda loss: loss.name)
def test_what_is_known_is_proved_when_it_is_computed(loss, monkeypatch):
    monkeypatch.setattr(first_batch, "is_known_to_divide", lambda model: False)
    seen = []
    find = first_batch.find_difference
    monkeypatch.setattr(first_batch, "find_difference", lambda *args, **given: seen.append(find(*args, **given)))
    in_slices(loss, layers.LayerNormalization(), layers.Dense(8, "sigmoid"), y=(Y > 0).astype("float32"))
    assert seen == [None]


def batch_gradient(model, rows):
    """The gradient of some rows in training, flat."""
    with tf.GradientTape() as tape:
        loss = ops.mean(ops.square(Y[rows] - model(X[rows], training=True)))
    gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
    return np.concatenate([np.ravel(each) for each in gradients])


def said_of(caught):
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


@pytest.mark.few(2)
@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("fit", [in_windows, on_replicas, in_slices])
def test_batch_statistics_are_warned_of_by_how_much_they_differ(fit):
    parts = 2 if fit is on_replicas else ROWS // SIZE
    model = model_of("mse", layers.BatchNormalization(), layers.BatchNormalization())
    whole = batch_gradient(model, slice(ROWS))
    size = ROWS // parts
    mean = np.mean([batch_gradient(model, slice(start, start + size)) for start in range(0, ROWS, size)], axis=0)
    error = np.linalg.norm(whole - mean) / np.linalg.norm(whole)
    with pytest.warns(UserWarning) as caught:
        fit("mse", layers.BatchNormalization(), layers.BatchNormalization())
    first, second = said_of(caught)
    assert "2 BatchNormalization layers" in first and "\n" not in first
    assert f"On {ROWS} rows of the first batch" in second
    assert f"of {parts} parts are {percent(error)} off the gradient of the whole" in second
    with pytest.warns(UserWarning) as caught:
        fit("mse", layers.BatchNormalization(), prove=False)
    assert len(said_of(caught)) == 1


@pytest.mark.filterwarnings("always")
def test_where_whole_batches_do_not_fit_statistics_are_compared_on_one_part(monkeypatch):
    monkeypatch.setattr(proof, "bytes_of", lambda graph: proof.MOST_BYTES)
    with pytest.warns(UserWarning, match=f"On {SIZE} rows of the first batch, the weighted gradients of 2 parts are"):
        in_slices("mse", layers.BatchNormalization())


WEIGHTED = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def uniformly(**data):
    model = model_of(WEIGHTED)
    model.compile(AccumulatingOptimizer("sgd", ROWS // SIZE, weighting="uniform"), WEIGHTED)
    model.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0, callbacks=[ExactAccumulation()], **data)


def as_keras_distributes(loss=WEIGHTED, **data):
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], exact=False)
    with dist.scope():
        model = model_of(loss)
    dist.fit(model, X, Y, batch_size=ROWS, shuffle=False, verbose=0, **data)


@pytest.mark.parametrize(("fit", "says"), [(uniformly, "weighting='uniform'"), (as_keras_distributes, "exact=False")])
def test_parts_that_count_alike_are_warned_of_by_how_much_they_are_off(fit, says):
    fit()
    with pytest.warns(UserWarning) as caught:
        fit(sample_weight=np.linspace(0.1, 2, 2 * ROWS).astype("float32"))
    assert sum(f"off the gradient of the whole, with {says}, which weights" in each for each in said_of(caught)) == 1


def test_sums_are_right_where_parts_count_alike():
    as_keras_distributes(keras.losses.MeanSquaredError(reduction="sum"))
    as_keras_distributes(lambda y, p: ops.sum(ops.square(y - p)))
