"""No check, probe, trial or estimate leaves a trace in a model that counts whatever is done with it."""

import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from sample_models import counting
from sample_models.counting import CALLED, CountingLoss, counting_model
from sample_models.mixing import Running

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, find_batch_size, microbatch, recompute
from keras_paragrad.accumulation.slices import DIVIDER
from keras_paragrad.compat.model import train_step_of
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.losses.terms import recorded_terms
from keras_paragrad.engine.proof import pure_function
from keras_paragrad.engine.proof.call_trials import CallTrials
from keras_paragrad.engine.proof.loss_proof import LossProof, MetricProof
from keras_paragrad.engine.proof.model_proof import ModelProof, PartsOfBatch
from keras_paragrad.engine.telemetry.train_functions import gradient_graph
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.engine.trials import trial
from keras_paragrad.inputs.run import Execution
from keras_paragrad.inputs.selection import Selection
from keras_paragrad.memory import estimate_memory
from keras_paragrad.memory.trial import Trials
from keras_paragrad.per_example.mixing_layers import find_mixing_layer
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.units import mixes_examples
from keras_paragrad.privacy.clipping import layers_storing_examples

ROWS, SIZE = 8, 4
X, Y = (np.random.default_rng(seed).normal(size=(ROWS, SIZE)).astype("float32") for seed in (0, 1))
SPEC = tf.TensorSpec((None, SIZE))


def mixing_loss(model):
    """In the step that a component asks in, which has called the loss before."""

    @tf.function(autograph=False)
    def step(x, y):
        with untouched(model, keras.StatelessScope()), recorded_terms(model) as terms:
            loss = model.compute_loss(x, y, model(x, training=True))
        assert not mixes_examples(terms[0])
        return loss

    step(X, Y)


def by_examples(x, y, y_pred, sample_weight):
    return tf.shape(y)[0]


DATA = tf.constant(X), tf.constant(Y)
BY_EXAMPLES = LossDivisor(by_examples, DIVIDER)


def model_proof(model):
    """Parts leave another mean of inputs, which the layer follows."""
    proof = ModelProof(
        model, DATA, PartsOfBatch(LossDivisor("auto", DIVIDER), SIZE, in_sequence=True, on_replicas=True)
    )
    assert "leave another state of counting" in proof.ask()
    assert proof.find_metric_differences() == []


def loss_proof(model):
    """A function of `weighting` is called as well."""
    proof = LossProof(model, DATA, PartsOfBatch(BY_EXAMPLES, SIZE, in_sequence=True, on_replicas=True))
    assert proof.ask() is None
    return proof


def metric_proof(model):
    for summed in (True, False):
        assert MetricProof(loss_proof(model), summed).ask() is None


def divisible_calls(model):
    """Of a layer that adds a loss, nothing is compared."""
    assert not CallTrials(model, train_step_of(model), DATA).find()


def bytes_per_row(model):
    Execution(model, Selection.of(model, 0, [X], None), 0, False, []).bytes_per_row([X])


def recompute_where_it_pays(model):
    recompute(model).undo()


def found_batch_size(model):
    """By the estimate, and as far as a trial goes in this process."""
    find_batch_size(model, X, Y, device_bytes=10**8, steps=0, verbose=0)
    Trials(model, (X, Y, None), 10**6, 1)


# What each of them calls.
PROBES = {
    "mixing_layer": (lambda model: find_mixing_layer(model, SPEC), {"layer"}),
    "mixing_loss": (mixing_loss, {"layer", "model", "loss"}),
    "model_proof": (model_proof, {"layer"}),
    "loss_proof": (loss_proof, {"layer", "model", "loss"}),
    "metric_proof": (metric_proof, {"layer", "metric"}),
    "layers_that_keep_examples": (lambda model: layers_storing_examples(model, SPEC), {"layer"}),
    "units_for": (lambda model: units_for(model, (tf.constant(X),), {}), {"layer"}),
    "estimate_memory": (lambda model: estimate_memory(model, ROWS), {"layer", "loss", "model"}),
    "find_batch_size": (found_batch_size, {"layer", "loss", "model"}),
    "recompute": (recompute_where_it_pays, {"layer"}),
    "gradient_graph": (lambda model: gradient_graph(model, (SPEC, SPEC), ROWS), {"layer", "loss", "model"}),
    "bytes_per_row": (bytes_per_row, {"layer"}),
    "divisible_calls": (divisible_calls, {"layer", "loss", "model", "metric"}),
}


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    made = counting_model(SIZE)
    made.fit(X, Y, batch_size=ROWS, verbose=0)
    return made


@pytest.mark.parametrize("probe", PROBES)
def test_leaves_no_trace(model, probe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, called = PROBES[probe]
    counting.begin_anew()
    expected = counting.next_ones()
    counting.begin_anew()
    before = counting.state_of(model)
    CALLED.clear()
    run(model)
    assert called <= {what for what, times in CALLED.items() if times}
    found = counting.state_of(model)
    for what, was in before.items():
        assert found[what] == was, what
    assert counting.next_ones() == expected
    assert not list(tmp_path.iterdir())


class Leaves(layers.Layer):
    """Leaves a trace of each call, in every way that a layer has."""

    def build(self, input_shape):
        self.state, self.calls, self.last = self.add_weight(shape=(), initializer="zeros", trainable=False), [], None

    def call(self, inputs):
        self.calls.append(inputs.shape)
        self.last = inputs
        self.state.assign_add(ops.sum(inputs))
        self.add_loss(ops.mean(inputs) * np.random.uniform() * random.random())
        return inputs + 0.01 * keras.random.normal(ops.shape(inputs)) + 0.01 * tf.random.normal(tf.shape(inputs))


class Counts(keras.Model):
    """Its metric is of what a layer has seen last."""

    def __init__(self):
        super().__init__()
        self.leaves, self.kernel, self.rows = Leaves(), layers.Dense(2), keras.metrics.Sum("rows")
        self.within = keras.Sequential([layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(2)])

    def call(self, inputs, training=False):
        return self.within(self.leaves(self.kernel(inputs)), training=training)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.rows.update_state(ops.shape(self.leaves.last)[0])
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.long
def test_a_proof_leaves_nothing_behind(monkeypatch):
    tried = []

    def shown():
        keras.utils.set_random_seed(0)
        model = Counts()
        model.compile("adam", "mse", metrics=[Running(0.9)], jit_compile=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sliced = microbatch(model, 3, weighting="examples")
            history = model.fit(X[:6], Y[:6, :2], batch_size=6, epochs=2, shuffle=False, verbose=0).history
            sliced.undo()
        drawn = [random.random(), np.random.uniform(), float(tf.random.uniform([])), float(keras.random.uniform(()))]
        variables = model.variables + model.metrics_variables + model.optimizer.variables
        calls = [tuple(shape) for shape in model.leaves.calls]
        return [ops.convert_to_numpy(each) for each in variables], drawn, calls, len(model.leaves._losses), history

    compute = pure_function.PureFunction.__call__
    monkeypatch.setattr(pure_function.PureFunction, "__call__", lambda *given: tried.append(given) or compute(*given))
    found = shown()
    assert len(tried) > 5
    monkeypatch.setattr(trial, "ThreadPoolExecutor", None)
    np.testing.assert_equal(found, shown())
    assert found[-1]["rows"] == [6, 6]


def accumulated():
    made = counting_model(
        SIZE,
        keras.Model,
        CountingLoss(keras.Variable(0.0, trainable=False)),
        AccumulatingOptimizer("sgd", 2, weighting="examples"),
    )
    made.fit(X, Y, batch_size=2, callbacks=[ExactAccumulation()], verbose=0)
    return made


def sliced():
    made = counting_model(SIZE, keras.Model, CountingLoss(keras.Variable(0.0, trainable=False)))
    microbatch(made, 2, weighting="examples")
    made.fit(X, Y, batch_size=4, verbose=0)
    return made


@pytest.mark.few(0, "sliced")
@pytest.mark.filterwarnings("ignore:Parts of a batch leave another state of counting")
@pytest.mark.parametrize("train", [accumulated, sliced])
def test_each_part_of_a_batch_is_counted_once(train):
    made = train()
    assert [float(each) for each in (made.get_layer("counting").number, made.loss.number)] == [4.0, 4.0]


def test_keras_state_is_restored_after_its_session_was_cleared():
    keras.utils.clear_session()
    keras.layers.Dense(1)
    with untouched(None, keras.StatelessScope()):
        keras.layers.Dense(1)
    assert keras.layers.Dense(1).name == "dense_1"


class OfTensorFlow(tf.Module):
    """TensorFlow wraps its lists and dictionaries."""

    def __init__(self):
        super().__init__()
        self.calls, self.by_name = [], {}


class CallsAModule(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.module = OfTensorFlow()

    def call(self, x):
        self.module.calls.append(1)
        self.module.by_name["last"] = 1
        return x


def test_lists_that_tensorflow_wraps_are_restored():
    layer = CallsAModule()
    inputs = keras.Input((SIZE,))
    model = keras.Model(inputs, layer(inputs))
    keras.layers.Layer.add_loss(model, tf.constant(1.0))
    before = len(layer.module.calls)
    layer.module.by_name.clear()
    with untouched(model, keras.StatelessScope()):
        model(X)
    assert len(model.losses) == 1
    assert len(layer.module.calls) == before
    assert not layer.module.by_name
