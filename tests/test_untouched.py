"""No check, probe, trial or estimate leaves a trace in a model that counts whatever is done with it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sample_models import counting
from sample_models.counting import CALLED, CountingLoss, counting_model

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, find_batch_size, microbatch, recompute
from keras_paragrad.accumulation.slices import DIVIDER
from keras_paragrad.compat.model import train_step_of
from keras_paragrad.distribution.pipeline.cutting import Calls, measured_times
from keras_paragrad.engine.calls.divisible import find_mixing_layers
from keras_paragrad.engine.losses.loss_normalization import find_weightings
from keras_paragrad.engine.losses.terms import recorded_terms
from keras_paragrad.engine.losses.weightings import weighting_of
from keras_paragrad.engine.probes.independence import check_metrics, mixing_reasons
from keras_paragrad.engine.probes.losses import find_mixing
from keras_paragrad.engine.probes.row_independence import find_mixing_layer
from keras_paragrad.engine.probes.states import layers_storing_examples
from keras_paragrad.engine.probes.weighting_trial import try_weightings
from keras_paragrad.engine.telemetry.train_functions import gradient_graph
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.inputs.chunks import Execution, bytes_of_gradient
from keras_paragrad.inputs.selection import Selection
from keras_paragrad.memory import estimate_memory
from keras_paragrad.memory.trial import Trials
from keras_paragrad.per_example.probing import units_for

ROWS, SIZE = 8, 4
X, Y = (np.random.default_rng(seed).normal(size=(ROWS, SIZE)).astype("float32") for seed in (0, 1))
SPEC = tf.TensorSpec((None, SIZE))


def weightings(model):
    """A function of `weighting` is tried as well."""
    arguments = {"x": SPEC, "y": SPEC, "y_pred": None, "sample_weight": None}
    assert [each.name for each in try_weightings(model, arguments, by_examples).fitting] == ["<lambda>", "examples"]


def refusal(model):
    """In the step that a component asks in, which has called the loss before."""

    @tf.function(autograph=False)
    def step(x, y):
        with untouched(model, keras.StatelessScope()), recorded_terms(model) as terms:
            loss = model.compute_loss(x, y, model(x, training=True))
        arguments = {"x": x, "y": y, "y_pred": y, "sample_weight": None}
        mixing_reasons(model, arguments, terms, DIVIDER)
        find_weightings(model, arguments, by_examples)
        assert not find_mixing(terms[0])
        return loss

    step(X, Y)


by_examples = weighting_of(lambda x, y, y_pred, sample_weight: tf.shape(y)[0])


def divisible_calls(model):
    """Of a layer that adds a loss, nothing is compared."""
    assert not find_mixing_layers(model, train_step_of(model), (tf.constant(X), tf.constant(Y)))


def bytes_per_row(model):
    Execution(model, Selection.of(model, 0, [X], None), 0, False).bytes_per_row([X], bytes_of_gradient)


def recompute_where_it_pays(model):
    recompute(model).undo()


def found_batch_size(model):
    """By the estimate, and as far as a trial goes in this process."""
    find_batch_size(model, X, Y, device_bytes=10**6, steps=0, verbose=0)
    Trials(model, (X, Y, None), 10**6, 1)


# What each of them calls.
PROBES = {
    "mixing_layer": (lambda model: find_mixing_layer(model, SPEC), {"layer"}),
    "mixing_reasons": (refusal, {"layer", "model", "loss"}),
    "try_weightings": (weightings, {"layer", "model", "loss"}),
    "check_metrics": (
        lambda model: check_metrics(model, {"y": SPEC, "y_pred": SPEC, "sample_weight": None}),
        {"metric"},
    ),
    "layers_that_keep_examples": (lambda model: layers_storing_examples(model, SPEC), {"layer"}),
    "units_for": (lambda model: units_for(model, (tf.constant(X),), {}), {"layer"}),
    "estimate_memory": (lambda model: estimate_memory(model, ROWS), {"layer", "loss", "model"}),
    "find_batch_size": (found_batch_size, {"layer", "loss", "model"}),
    "recompute": (recompute_where_it_pays, {"layer"}),
    "measured_times": (lambda model: measured_times(Calls(model), "CPU:0"), {"layer"}),
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


@pytest.mark.filterwarnings("ignore:The state of counting", "ignore:The metrics ")
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


@pytest.mark.filterwarnings("ignore:The loss .counting. assigns variables")
@pytest.mark.filterwarnings("ignore:The state of counting", "ignore:The metrics inputs_seen")
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
