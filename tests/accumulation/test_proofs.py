"""Parts of a batch that don't give what the whole gives are found on real rows, and not computed."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.in_parts import (
    ROWS,
    SIZE,
    STEPS,
    TOLERANCE,
    WHOLE,
    X,
    Y,
    check,
    for_windows,
    in_slices,
    in_windows,
    model_of,
    on_replicas,
    refusal_in_windows,
    trained,
    values,
    whole,
)
from oracles.whole_batches import largest_difference
from runner import own_process
from sample_models import mixing
from sample_models.mixing import MARKER, Opens, Running, Updating, by_row, marked
from trainings import proved_on_workers

from keras_paragrad import DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.engine.proof import first_batch, loss_proof, pure_function
from keras_paragrad.engine.trials.trial import uneven_parts

# `pytest.warns` shows again what it has caught.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
MISSING = np.where(np.random.default_rng(1).random(Y.shape) < 0.4, MARKER, Y).astype("float32")

MIXING = {
    "mean": mixing.MinusBatchMean,
    "gradient": mixing.InItsGradient,
    "state, read": functools.partial(Updating, mixing.sum_of_rows, mixing.scaled),
    "a little": mixing.MinusLittle,
    "in training": mixing.InTraining,
    "over the batch": mixing.OverBatch,
    "by rows": mixing.ByNumberOfRows,
    "normalized gradient": mixing.NormalizesItsGradient,
    "codebook": mixing.Codebook,
}


def mixing_model(name, *more):
    return functools.partial(model_of, functools.partial(MIXING[name], name="mixes"), *more)


@pytest.mark.few(0, "gradient")
@pytest.mark.parametrize("name", MIXING)
def test_layers_that_mix_rows_get_whole_batches(name, caplog):
    caplog.set_level("INFO", "keras_paragrad")
    check(in_slices, mixing_model(name))
    assert caplog.text.count(WHOLE) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", MIXING)
def test_layers_that_mix_rows_get_whole_batches_of_replicas(name):
    check(on_replicas, mixing_model(name))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MIXING)
def test_layers_that_mix_rows_are_refused_in_windows(name):
    says = refusal_in_windows(mixing_model(name))
    assert says.startswith(f"The {'gradients' if 'gradient' in name else 'outputs'} of")
    assert "rows are mixed in 'mixes'" in says


@pytest.mark.few(1)
@pytest.mark.parametrize("last", [lambda: layers.Dense(2, kernel_initializer="zeros"), lambda: layers.Dropout(0.5)])
def test_no_layer_hides_another(last):
    assert "rows are mixed in 'mixes'" in refusal_in_windows(mixing_model("over the batch", last))


@pytest.mark.long
def test_a_model_that_mixes_rows():
    def make(optimizer="sgd", **compiled):
        keras.utils.set_random_seed(0)
        model = mixing.Recommender()
        model.compile(optimizer, "mse", **compiled)
        return model

    data = {"x": np.random.default_rng(2).integers(0, 50, (44, 2)), "y": Y[:, :1]}
    check(in_slices, make, **data)
    assert "rows are mixed in 'recommender" in refusal_in_windows(make, **data)


COMPARING = {
    "negatives": (mixing.InBatchNegatives, Y),
    "marked": (lambda: marked, MISSING),
    "pairs": (mixing.OfPairs, Y),
    "not a number": (lambda: mixing.unless_nan, np.where(MISSING == MARKER, np.nan, Y)),
    "divided": (mixing.DividesItself, Y),
    "neighbours": (mixing.OfNeighbours, Y),
    "circle": (lambda: keras.losses.Circle(gamma=1), np.arange(44) % 2),
}


def comparing_model(name):
    return functools.partial(model_of, loss=COMPARING[name][0]()), COMPARING[name][1]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", COMPARING)
def test_losses_that_compare_examples_get_whole_batches(name, caplog):
    caplog.set_level("INFO", "keras_paragrad")
    make, y = comparing_model(name)
    check(in_slices, make, y=y)
    assert caplog.text.count(WHOLE) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("name", COMPARING)
def test_losses_that_compare_examples_get_whole_batches_of_replicas(name):
    make, y = comparing_model(name)
    check(on_replicas, make, y=y)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COMPARING)
def test_losses_that_compare_examples_are_refused_in_windows(name):
    make, y = comparing_model(name)
    says = refusal_in_windows(make, y=y)
    assert re.search(r"On 24 rows .* in parts is .* off|fails on 9 of 24 rows", says)
    assert "keras_paragrad.microbatch(model, size=...)" in says


@pytest.mark.parametrize("first", [1, 21])
def test_every_batch_of_the_first_window_is_seen(first):
    y = np.where(np.isin(np.arange(44), [first, first + 1])[:, None], MARKER, Y)
    assert "in parts is" in refusal_in_windows(functools.partial(model_of, loss=marked), y=y)


def test_large_outputs_are_proved_on_fewer_rows(monkeypatch):
    monkeypatch.setattr(loss_proof, "MOST_BYTES", 1)
    monkeypatch.setattr(loss_proof, "bytes_of", lambda graph: 0)
    assert "On 8 rows of the first batch" in refusal_in_windows(functools.partial(model_of, loss=marked), y=MISSING)


@pytest.mark.few(1)
@pytest.mark.parametrize("train", [in_slices, in_windows, on_replicas])
@pytest.mark.parametrize("loss", [by_row, mixing.OfElements()], ids=["rows", "elements"])
def test_a_loss_with_a_value_for_each_example_is_divided(train, loss, caplog):
    caplog.set_level("INFO", "keras_paragrad")
    check(train, functools.partial(model_of, mixing.Shifted, loss=loss))
    assert WHOLE not in caplog.text


def test_a_gradient_that_is_not_finite_proves_nothing():
    in_slices(functools.partial(model_of, loss=by_row), y=np.where(MISSING == MARKER, np.nan, Y))


constant = keras.initializers.Constant
# Of states, whether parts one after the other leave or read others.
STATES = {
    "slow mean of much": (lambda **how: Updating(mixing.slow_mean, start=constant(50.0), **how), True),
    "sum": (lambda **how: Updating(mixing.sum_of_rows, **how), False),
    "batches": (lambda **how: Updating(lambda s, x: s + 1, **how), True),
    "settled": (lambda **how: Updating(lambda s, x: s * 0 + 3, mixing.scaled, constant(3.0), **how), False),
    "mean": (lambda **how: Updating(mixing.slow_mean, aggregation="mean", **how), True),
    "power iteration": (lambda **how: Updating(mixing.power_iteration, start="ones", shape=(3,), **how), True),
    "maximum": (lambda **how: Updating(mixing.largest, **how), False),
}


@pytest.mark.few(1, "slow mean of much")
@pytest.mark.parametrize("name", STATES)
def test_states_of_layers(name, caplog):
    caplog.set_level("INFO", "keras_paragrad")
    make, differs = STATES[name]
    make = functools.partial(model_of, functools.partial(make, name="mixes"))
    check(in_slices, make)
    assert caplog.text.count(WHOLE) == differs
    if differs:
        assert "leave another state of mixes than the whole batch" in refusal_in_windows(make)
    else:
        check(in_windows, make)


def test_a_state_that_the_next_part_reads_is_not_the_batch_s():
    """Each part leaves what the whole leaves."""
    make = functools.partial(Updating, lambda s, x: s * 0 + 3, mixing.scaled, constant(1.0), name="reads")
    make = functools.partial(model_of, make)
    check(in_slices, make)
    assert "The outputs of" in refusal_in_windows(make)


def test_no_part_has_half_of_the_rows_or_pairs():
    for count in range(2, 300):
        (begin, first), (rest, end) = uneven_parts(count)
        assert (begin, rest, end) == (0, first, count)
        assert first % 2 == 1
        assert 0 < first < end - first or count == 2


class DrawsFromGenerator(layers.Layer):
    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + 0.1 * self.generator.normal(tf.shape(x))


def test_a_random_generator_is_left_where_it_was():
    states = []
    for prove in (True, False):
        with pytest.warns(UserWarning, match="draws from a tf.random.Generator") if prove else contextlib.nullcontext():
            model = in_windows(functools.partial(model_of, DrawsFromGenerator), prove=prove)
        states.append(model.layers[2].generator.state.numpy())
    np.testing.assert_equal(*states)


@pytest.mark.few(0, "sum")
@pytest.mark.parametrize("name", STATES)
def test_states_of_layers_on_replicas(name):
    check(on_replicas, functools.partial(model_of, STATES[name][0]))


GATES = {
    "layer": lambda **how: model_of(mixing.LayerGate, **how),
    "loss": lambda **how: model_of(loss=mixing.LossGate(), **how),
    "metric": lambda **how: model_of(metrics=[mixing.MetricGate()], **how),
}


@pytest.mark.few(1, "in_slices-layer-begin")
@pytest.mark.parametrize(
    ("train", "gate", "at"),
    [
        *((in_slices, gate, at) for gate, at in (("layer", "begin"), ("loss", "end"), ("metric", "begin"))),
        *((on_replicas, gate, at) for gate, at in (("loss", "begin"), ("layer", "end"), ("metric", "end"))),
    ],
)
def test_it_is_asked_again_each_epoch(train, gate, at):
    check(train, GATES[gate], epochs=2, callbacks=[Opens(at)])


@pytest.mark.parametrize(
    ("gate", "at", "says"), [("layer", "begin", "mixed in 'layer_gate'"), ("loss", "end", "in parts is")]
)
def test_it_is_asked_again_each_epoch_in_windows(gate, at, says):
    opens, model = Opens(at), for_windows(GATES[gate])
    with pytest.raises(ValueError, match=says):
        trained(model, size=ROWS // STEPS, epochs=3, callbacks=[opens, ExactAccumulation()])
    assert int(model.optimizer.iterations) == 2
    np.testing.assert_equal(values(model.trainable_variables), opens.weights)


def test_metrics_are_asked_again_each_epoch_in_windows():
    with pytest.warns(UserWarning, match="gate is .* on 3 parts"):
        in_windows(GATES["metric"], epochs=2, callbacks=[Opens("begin")])


def test_what_cannot_be_asked_is_computed_whole_or_warned_of(caplog):
    caplog.set_level("INFO", "keras_paragrad")
    make, says = functools.partial(model_of, mixing.UnknownToKeras), "It was not checked whether .* Keras doesn't know"
    check(in_slices, make)
    assert re.search(rf"{WHOLE}.*{says}", caplog.text)
    with pytest.warns(UserWarning, match=says):
        in_windows(make)


@pytest.mark.parametrize("of", ["loss", "metric"])
def test_a_proof_that_fails_proves_nothing(of, monkeypatch):
    def fault(*_):
        raise RuntimeError("a fault")

    def make(**how):
        return model_of(**({"loss": marked} if of == "loss" else {"metrics": [Running(0.9)]}), **how)

    monkeypatch.setattr(pure_function.PureFunction, "__call__", fault)
    check(in_slices, make, y=MISSING if of == "loss" else Y)
    with pytest.warns(UserWarning, match="It was not checked whether .*: a fault"):
        in_windows(make)


@pytest.mark.parametrize("train", [in_windows, in_slices])
def test_without_a_proof_it_is_trained(train):
    make = functools.partial(model_of, loss=marked)
    assert largest_difference(train(make, prove=False, y=MISSING), whole(make, y=MISSING)) > 1e-3


def test_what_is_known_is_not_computed(monkeypatch):
    made = []
    for name in ("ModelProof", "LossProof", "MetricProof"):
        monkeypatch.setattr(first_batch, name, lambda *given, name=name, **more: made.append(name))
    make = functools.partial(model_of, layers.LayerNormalization, lambda: layers.Dropout(0.1), metrics=["mae"])
    for train in (in_slices, in_windows, on_replicas):
        train(make)
    assert not made
    with pytest.warns(UserWarning, match="has no attribute 'ask'"):
        in_windows(functools.partial(make, loss=by_row))
    assert made == ["LossProof"]


def unseeded(y, p):
    """Draws numbers that no other call draws."""
    return by_row(y, p + tf.random.gamma(tf.shape(p), 2.0))


CLEAN = {
    "random": {"more": [lambda: layers.Dropout(0.5), lambda: layers.GaussianNoise(0.2)]},
    "unseeded": {"loss": unseeded},
    "rounding": {"more": [lambda: layers.Lambda(lambda x: 1e4 * x - 1e4 * x + x)], "loss": by_row},
    "half precision": {"more": [lambda: layers.Dense(8, "relu", dtype="mixed_bfloat16")]},
    "regularized": {"more": [lambda: layers.Dense(8, kernel_regularizer="l2")], "loss_weights": [0.3]},
    "logarithms": {"loss": keras.losses.MeanSquaredLogarithmicError()},
    "cosines": {"loss": keras.losses.CosineSimilarity()},
    "crossentropy": {"loss": keras.losses.BinaryCrossentropy(from_logits=True)},
    "divergence": {"loss": keras.losses.KLDivergence()},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_there_is_nothing(name, monkeypatch):
    answers, ask = [], first_batch.ask
    monkeypatch.setattr(first_batch, "ask", lambda asked: answers.append(ask(asked)) or answers[-1])
    for known in ("is_keras_own", "computes_rows_independently", "has_losses_per_example"):
        monkeypatch.setattr(first_batch, known, lambda model: False)
    how = {**CLEAN[name]}
    in_windows(functools.partial(model_of, *how.pop("more", ()), **how), y=(Y > 0).astype("float32"))
    # Of layers at the first micro-batch, and of the loss at the window's end.
    assert answers == [first_batch.Answer()] * 2


METRICS = {
    "average": lambda: Running(0.9),
    "two": lambda: mixing.Two(0.5),
    "maximum": Running,
    "function": lambda: lambda y, p: ops.max(ops.abs(y - p)),
}


def metric_model(*names):
    return lambda **how: model_of(metrics=[METRICS[name]() for name in names], **how)


def test_metrics_on_replicas_are_those_of_one_device():
    make = metric_model(*METRICS)
    both = on_replicas(make), whole(make)
    evaluated = [model.evaluate(X[:21], Y[:21], batch_size=8, verbose=0, return_dict=True) for model in both]
    for one, other in (evaluated, [model.history.history for model in both]):
        assert one.keys() == other.keys() and len(one) == 6
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-5)


@pytest.mark.parametrize("name", ["average", "two", "function"])
def test_metrics_in_slices_are_those_of_whole_batches(name):
    check(in_slices, metric_model(name))


@pytest.mark.parametrize(("name", "shown"), [("average", "running"), ("function", "lambda")])
def test_metrics_that_differ_are_warned_of_in_windows(name, shown):
    with pytest.warns(UserWarning, match=f"{shown} is .* on 3 parts of the first batch, and .* on it"):
        in_windows(metric_model(name))


def test_metrics_in_fixed_parts_are_those_of_whole_batches():
    check(functools.partial(in_slices, deterministic=5), metric_model(*METRICS))


def test_metrics_of_rows_are_divided(caplog):
    caplog.set_level("INFO", "keras_paragrad")
    check(in_slices, lambda **how: model_of(metrics=[by_row, Running()], **how))
    assert WHOLE not in caplog.text
    check(in_windows, lambda **how: model_of(metrics=[by_row, Running(), keras.metrics.R2Score()], **how))


def test_metrics_that_layers_update_are_warned_of():
    with pytest.warns(UserWarning, match="The metrics of_batches, which call.. or compute_loss.. updates"):
        in_windows(functools.partial(model_of, mixing.Tracks))


@pytest.mark.parametrize("weighting", ["auto", "examples"])
def test_the_loss_of_the_first_batch_evaluated_on_replicas_is_proved(weighting):
    expected = model_of(loss=marked).evaluate(X, MISSING, batch_size=ROWS, verbose=0)
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], weighting=weighting)
    with dist.scope():
        model = model_of(loss=marked)
    dist.prepare(model)
    with contextlib.nullcontext() if weighting == "auto" else pytest.warns(UserWarning, match="'examples' as stated"):
        shown = model.evaluate(X, MISSING, batch_size=ROWS, verbose=0)
    assert (weighting == "auto") == bool(np.isclose(shown, expected, rtol=TOLERANCE))


@pytest.mark.parametrize("way", ["slices", "replicas"])
def test_a_first_batch_passed_by_itself_is_proved(way):
    def shown(model):
        losses = [model.train_on_batch(X[:ROWS], MISSING[:ROWS]) for _ in range(2)]
        return [*losses, model.test_on_batch(X[:ROWS], MISSING[:ROWS]), *model.get_weights()[-1]]

    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"]) if way == "replicas" else DistributedFit("none")
    with dist.scope():
        model = model_of(loss=marked)
    handle = dist.prepare(model) if way == "replicas" else microbatch(model, SIZE)
    np.testing.assert_allclose(shown(model), shown(model_of(loss=marked)), rtol=1e-5)
    handle.undo()


def test_what_one_worker_finds_on_its_rows_all_compute():
    for shown, expected in own_process.on_workers(proved_on_workers.trained_and_evaluated, None, seconds=120):
        np.testing.assert_allclose(shown, expected, rtol=2e-6)


class Convolved(layers.Layer):
    """What the nodes of a graph send each other, of which a batch has all."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, name="of_nodes")

    def build(self, shapes):
        self.dense.build(shapes[0])

    def compute_output_shape(self, shapes):
        return shapes[0][0], 3

    def call(self, inputs):
        nodes, adjacency = inputs
        return self.dense(ops.matmul(adjacency, nodes))


class OwnStep(keras.Model):
    def train_step(self, data):
        (nodes, adjacency), y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self([nodes, adjacency]))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


@pytest.mark.parametrize(("rows", "kind"), [(6, keras.Model), (None, keras.Model), (6, OwnStep)])
def test_rows_that_are_no_examples_are_taken_together(rows, kind):
    """The layer that sends between nodes is entered, and the one within it divided."""
    shapes = (tf.TensorSpec((rows, 6)), tf.TensorSpec((rows, rows))), tf.TensorSpec((rows,), "int64")
    batch = (X[:6], np.eye(6)), np.arange(6) % 3
    data = tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=shapes)

    def fitted(size):
        keras.utils.set_random_seed(0)
        inputs = [keras.Input((6,)), keras.Input((rows,))]
        model = kind(inputs, Convolved()(inputs))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        with microbatch(model, size) if size else contextlib.nullcontext():
            model.fit(data, shuffle=False, verbose=0)
        return model

    assert largest_difference(fitted(4), fitted(None)) < TOLERANCE


def test_an_error_of_the_models_own_is_not_explained_by_parts():
    class Fails(layers.Layer):
        def call(self, inputs):
            return ops.matmul(inputs, ops.ones((5, 5)))

        def compute_output_shape(self, shape):
            return shape

    model = model_of(Fails)
    with microbatch(model, 3), pytest.raises(ValueError, match="Dimensions must be equal"):
        trained(model)


class AddedIfGiven(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x, other=None):
        return self.dense(x if other is None else x + other)


@pytest.mark.parametrize("given", [False, True])
def test_an_optional_input_of_a_generator(given):
    """TensorFlow passes it as an optional, which may have no value."""
    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")

    def trained(prepare):
        keras.utils.set_random_seed(0)
        inputs = {"x": keras.Input((3,), name="x"), "other": keras.Input((3,), name="other", optional=True)}
        model = keras.Model(inputs, AddedIfGiven()(*inputs.values()))
        model.compile("sgd", "mse")
        prepare(model)
        model.fit((({"x": x, "other": x if given else None}, x[:, :2]) for _ in range(3)), shuffle=False, verbose=0)
        return model.get_weights()

    for found, expected in zip(trained(lambda model: microbatch(model, 4)), trained(lambda model: None), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
