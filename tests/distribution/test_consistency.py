"""What workers compare before they train together, and what two of them that differ are told."""

import contextlib
import functools
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from runner import own_process
from workers import consistency_worker

from keras_paragrad import AccumulatingOptimizer, GradientTelemetry, Throughput
from keras_paragrad.distribution.consistency import compare
from keras_paragrad.distribution.consistency.compare import check_same, first_difference, sketches
from keras_paragrad.distribution.consistency.describe import can_change_training, describe_training
from keras_paragrad.distribution.consistency.fitting import _TEST_HOOKS, _TRAIN_HOOKS, may_stop_within
from keras_paragrad.distribution.data.agreement import Tally

Callback = keras.callbacks.Callback
DESCRIBED = {"fit": {"epochs": 1}}


def model(activation="tanh", optimizer=None, loss="mse", layers=lambda: [], **options):
    dense = keras.layers.Dense(3, activation)
    made = keras.Sequential([keras.Input((4,)), dense, *layers(), keras.layers.Dense(1)])
    made.compile(optimizer or keras.optimizers.SGD(0.1), loss, **options)
    return made


def differences(one, other):
    """The paths at which two descriptions differ, after the way between workers."""
    one, other = (json.loads(json.dumps(each)) for each in (one, other))
    return {path for path, _, _ in compare.differences(one, other)}


def squared(y, z):
    return keras.ops.mean(keras.ops.square(y - z), -1)


def scaled(factor):
    def loss(y, z):
        return factor * squared(y, z)

    return loss


def from_file(source, name):
    """A function as a script in another place would define it."""
    space = {"keras": keras}
    exec(compile(source, f"/somewhere/{name}.py", "exec"), space)
    return space["f"]


class Half(keras.layers.Layer):
    def __init__(self, factor=0.5, function=None, folder="/a/b", **options):
        super().__init__(**options)
        self.factor, self.function, self.folder, self._rank = factor, function, folder, factor

    def call(self, x):
        return x * 0.5


class Third(keras.layers.Layer):
    def call(self, x):
        return x / 3


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"activation": "relu"}, {}, "layers[1].config.activation"),
        ({"loss": "mae"}, {}, "compile.loss"),
        ({"loss": squared}, {"loss": from_file("def f(y, z): return y - z", "a")}, "compile.loss"),
        ({"loss": functools.partial(squared, z=1)}, {"loss": functools.partial(squared, z=2)}, "compile.loss.z"),
        ({"loss": keras.losses.Huber(1.0)}, {"loss": keras.losses.Huber(2.0)}, "compile.loss.config.delta"),
        ({"loss": [squared]}, {"loss": ["mse"]}, "compile.loss[0]"),
        ({"optimizer": keras.optimizers.SGD(0.1, clipnorm=1.0)}, {}, "optimizer.config.clipnorm"),
        ({"optimizer": keras.optimizers.SGD(0.1, 0.9)}, {}, "optimizer.config.momentum"),
        (
            {"optimizer": AccumulatingOptimizer(keras.optimizers.SGD(0.1), 2)},
            {"optimizer": AccumulatingOptimizer(keras.optimizers.SGD(0.1), 3)},
            "optimizer.config.steps",
        ),
        ({"metrics": ["mae"]}, {"metrics": ["mae", "mse"]}, "compile.metrics"),
        (
            {"metrics": [keras.metrics.F1Score(threshold=0.5)]},
            {"metrics": [keras.metrics.F1Score()]},
            "compile.metrics[0].config.threshold",
        ),
        ({"loss_weights": [2.0]}, {}, "compile.loss_weights"),
        ({"jit_compile": True}, {}, "compile.jit_compile"),
        ({"run_eagerly": True}, {}, "compile.run_eagerly"),
        ({"steps_per_execution": 2}, {}, "compile.steps_per_execution"),
        ({"layers": lambda: [Half(0.5)]}, {"layers": lambda: [Half(0.25)]}, "layers[2].config.factor"),
        ({"layers": lambda: [Half()]}, {"layers": lambda: [Third()]}, "layers[2]"),
        (
            {"layers": lambda: [Half(function=np.sin)]},
            {"layers": lambda: [Half(function=np.cos)]},
            "layers[2].attributes.function",
        ),
        (
            {"layers": lambda: [keras.layers.Dropout(0.1)]},
            {"layers": lambda: [keras.layers.Dropout(0.2)]},
            "layers[2].config.rate",
        ),
        (
            {"layers": lambda: [keras.layers.Dense(3, trainable=False)]},
            {"layers": lambda: [keras.layers.Dense(3)]},
            "weights[2]",
        ),
    ],
)
def test_what_shapes_the_computation_is_named(one, other, named):
    first, second = ({"jit_compile": False, **options} for options in (one, other))
    found = differences(describe_training(model(**first)), describe_training(model(**second)))
    assert named in found, found


def test_what_does_not_is_left_out():
    """Automatic names, seeds, paths, addresses, and where a function's file lies."""
    source = "def f(y, z):\n    return keras.ops.mean(y - z)"
    made = []
    for number in range(2):
        loss = from_file("\n" * number + source, f"train{number}")
        extra = lambda number=number: [Half(folder=f"/logs/{number}"), keras.layers.Dropout(0.5, seed=number)]  # noqa: E731
        made.append(model(lambda x: x / 2, loss=loss, layers=extra, metrics=[keras.metrics.Mean(), scaled(1)]))
    # Its attribute without an underscore is compared, and the other is not.
    made[1].layers[1]._rank = 7
    assert [each.name for each in made[0].layers] != [each.name for each in made[1].layers]
    assert differences(describe_training(made[0]), describe_training(made[1])) == set()


def test_functions_are_compared_by_name():
    one, other = (model(lambda x: x * 2, loss=scaled(1)), model(lambda x: x * 3, loss=scaled(2)))
    assert differences(describe_training(one), describe_training(other)) == set()


def test_differences_name_the_path_and_both_values():
    dense, dropout = ({"class_name": name, "config": {"units": 64, "rate": 0.1}} for name in ("Dense", "Dropout"))
    other = {**dense, "config": {"units": 32, "rate": float("nan")}}
    one = {"layers": [dense, dense, dense], "metrics": ["mae"], "fit": {"epochs": 1}, "loss": None}
    another = {"layers": [dense, other, dropout], "metrics": ["mae", dense], "fit": {}, "loss": dense}
    assert [*compare.differences(one, another)] == [
        ("layers[1].config.units", "64", "32"),
        ("layers[1].config.rate", "0.1", "nan"),
        ("layers[2]", "Dense", "Dropout"),
        ("metrics", "['mae']", "['mae', Dense]"),
        ("fit.epochs", "1", "nothing"),
        ("loss", "None", "Dense"),
    ]
    assert [*compare.differences(other, other)] == []


def test_connections_are_compared_under_other_names():
    def connected(twice):
        i = keras.Input((4,))
        a, b = keras.layers.Dense(2)(i), keras.layers.Dense(2)(i)
        made = keras.Model(i, keras.layers.Add()([a, a if twice else b]) + 0 * b)
        made.compile("sgd", "mse")
        return describe_training(made)

    assert differences(connected(True), connected(True)) == set()
    assert differences(connected(True), connected(False))


def test_names_are_compared_unless_they_are_automatic():
    def heads(*names):
        i = keras.Input((4, 4, 1))
        h = keras.layers.Flatten()(keras.layers.MaxPooling2D()(keras.layers.Conv2D(2, 3)(i)))
        made = keras.Model(i, [keras.layers.Dense(1, name=name)(h) for name in names])
        made.compile("sgd", ["mse", "mae"])
        return describe_training(made)

    assert differences(heads(None, None), heads(None, None)) == set()
    assert "layers[4].config.name" in differences(heads("head_1", "head_2"), heads("head_2", "head_1"))


class Net(keras.Model):
    def __init__(self, act=keras.ops.tanh, units=2):
        super().__init__()
        self.act = act
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.act(self.dense(x))


def test_functional_models_of_a_class_of_ones_own_are_compared_under_other_names():
    assert differences(*(describe_training(consistency_worker.pipeline()) for _ in range(2))) == set()


def test_subclassed_models_are_compared_by_attributes_and_layers():
    def built(*arguments):
        made = Net(*arguments)
        made(np.zeros((1, 4)))
        made.compile("sgd", "mse")
        return describe_training(made)

    assert differences(built(), built()) == set()
    assert "attributes[0].act" in differences(built(), built(keras.ops.sigmoid))
    assert "layers[0].config.units" in differences(built(), built(keras.ops.tanh, 3))


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"epochs": 2}, {}, "fit.epochs"),
        ({"initial_epoch": 1}, {}, "fit.initial_epoch"),
        ({"shuffle": False}, {}, "fit.shuffle"),
        ({"batch_size": 8}, {}, "fit.batch_size"),
        ({"class_weight": {0: 1.0}}, {"class_weight": {0: 2.0}}, "fit.class_weight.0"),
        ({"validation_data": 1}, {}, "fit.validation_data"),
        ({"validation_freq": [1, 2]}, {}, "fit.validation_freq"),
        ({"steps_per_epoch": 3}, {}, "fit.steps_per_epoch"),
        ({"sample_weight": 1}, {}, "fit.sample_weight"),
        (
            {"callbacks": [keras.callbacks.EarlyStopping(patience=1)]},
            {"callbacks": [keras.callbacks.EarlyStopping()]},
            "callbacks[0].patience",
        ),
        ({"callbacks": [keras.callbacks.TerminateOnNaN()]}, {}, "callbacks"),
        (
            {"callbacks": keras.callbacks.ReduceLROnPlateau(factor=0.1)},
            {"callbacks": [keras.callbacks.ReduceLROnPlateau(factor=0.2)]},
            "callbacks[0].factor",
        ),
        (
            {"callbacks": [keras.callbacks.ModelCheckpoint("a.keras", save_freq=5)]},
            {"callbacks": [keras.callbacks.ModelCheckpoint("a.keras")]},
            "callbacks[0].save_freq",
        ),
    ],
)
def test_arguments_of_fit_are_named(one, other, named):
    made = model()
    first, second = (describe_training(made, {}, options) for options in (one, other))
    assert named in differences(first, second)


def test_how_much_is_shown_and_where_it_is_written_is_not_compared():
    made, found = model(), []
    for number in range(2):
        callbacks = [keras.callbacks.ModelCheckpoint(f"{number}.keras", verbose=number)]
        callbacks += [keras.callbacks.CSVLogger("a"), keras.callbacks.TensorBoard("a"), Throughput()] if number else []
        found.append(describe_training(made, {}, {"verbose": number, "callbacks": callbacks}))
    assert differences(*found) == set()


def test_settings_versions_and_options_are_compared(monkeypatch):
    made = model()
    assert differences(describe_training(made, {"exact": True}), describe_training(made, {"exact": False})) == {
        "DistributedFit.exact"
    }
    before = describe_training(made)
    with monkeypatch.context() as changed:
        changed.setattr("keras_paragrad.__version__", "9.0")
        assert differences(before, describe_training(made)) == {"versions.keras_paragrad"}
    keras.config.set_max_epochs(1)
    try:
        assert differences(before, describe_training(made)) == {"keras.max_epochs"}
    finally:
        keras.config.set_max_epochs(None)


class Progress(Callback):
    def __init__(self):
        super().__init__()
        self.rates = []
        self.shown = 0

    def on_epoch_end(self, epoch, logs=None):
        self.shown += 1
        self.rates.append(self.model.optimizer.learning_rate)


class Stops(Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch > 3


class Assigns(Callback):
    def on_epoch_end(self, epoch, logs=None):
        [weight.assign(weight * 0.9) for weight in self.model.weights]


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (Progress(), False),
        (keras.callbacks.CSVLogger("a.csv"), False),
        (keras.callbacks.TensorBoard("logs"), False),
        (keras.callbacks.TensorBoard("logs", histogram_freq=1), True),
        (keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch)), False),
        (keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs["w"].assign(1)), False),
        (keras.callbacks.EarlyStopping(), True),
        (keras.callbacks.SwapEMAWeights(), True),
        (type("Own", (keras.callbacks.EarlyStopping,), {})(), True),
        (Throughput(), False),
        (GradientTelemetry(), True),
        (Stops(), False),
        (Assigns(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_callbacks_are_compared(callback, expected):
    assert can_change_training(callback) == expected


@pytest.mark.parametrize(
    ("callback", "may"),
    [
        (Stops(), True),
        (type("Stops", (Stops, keras.callbacks.EarlyStopping), {})(), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), True),
        (keras.callbacks.LambdaCallback(on_train_batch_begin=functools.partial(print, "batch")), True),
        (keras.callbacks.TerminateOnNaN(), True),
        (keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None), False),
        (Progress(), False),
        (keras.callbacks.EarlyStopping(), False),
        (keras.callbacks.ModelCheckpoint("a.keras", save_freq=5), False),
        (Throughput(), False),
        (type("Shows", (Stops,), {"changes_training": False})(), False),
    ],
)
def test_who_may_stop_between_batches(callback, may):
    assert may_stop_within([callback], _TRAIN_HOOKS) == may
    assert not may_stop_within([Stops()], _TEST_HOOKS)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([{"fit": {"epochs": 2}}], r"differently: fit\.epochs: 1 on worker 0, 2 on worker 1\. Start the same script"),
        ([{}], r"fit: given on worker 0, nothing on worker 1\."),
        (
            [DESCRIBED, {"fit": {"epochs": 2}}, {"fit": {"epochs": 3}}],
            r"2 on worker 2\. Workers 2, 3 differ from worker 0",
        ),
        (
            [{"fit": {"epochs": 1, **dict.fromkeys("abcdefgh", 0)}}],
            r"fit\.f: nothing on worker 0, 0 on worker 1\. Start",
        ),
    ],
)
def test_the_first_worker_that_differs_is_compared(monkeypatch, others, says):
    described = [DESCRIBED, *others]
    rows = []
    monkeypatch.setattr(compare, "gather", lambda strategy, row: rows.append(row) or np.stack(rows))
    monkeypatch.setattr(compare, "broadcast_bytes", lambda strategy, text, source: json.dumps(described[source]))
    for each in described[:-1]:
        with contextlib.suppress(ValueError):
            check_same(tf.distribute.get_strategy(), each)
    with pytest.raises(ValueError, match=says):
        check_same(tf.distribute.get_strategy(), described[-1])


def test_weights_are_compared_within_rounding():
    generator = np.random.default_rng(0)
    values = [generator.normal(size=size).astype("float32") for size in ((3,), (70_000,), (4, 5))]

    def of(changed, number=1):
        variables = [keras.Variable(value) for value in values]
        variables[number].assign(changed(values[number]))
        return sketches(tf.distribute.get_strategy(), variables)

    same = of(np.copy)
    rounded = of(lambda value: value * (1 + 1e-7))
    assert first_difference(np.stack([same, rounded])) is None
    for change in (lambda value: value * 1.001, lambda value: value[::-1], np.negative, lambda value: value * np.nan):
        assert first_difference(np.stack([same, same, of(change)])) == (1, 2)
    assert first_difference(np.stack([of(lambda value: value * np.nan)] * 2)) is None


def recorded(*batches):
    """What is compared of the batches that a worker reads."""
    spec = tf.nest.map_structure(_of_any_size, tf.data.Dataset.from_tensors(batches[0]).element_spec)
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    tally = Tally()
    read = tally.recorded(data)
    tally.begin()
    assert len(list(read)) == len(batches)
    return tally.up_to(1, len(batches)), tally.up_to(1, 1)


def _of_any_size(spec):
    if isinstance(spec, tf.RaggedTensorSpec):
        return spec
    return type(spec)([None] * spec.shape.rank, spec.dtype)


def test_batches_of_other_shapes_have_another_checksum():
    two, three = np.ones((2, 3)), np.ones((3, 2))
    (ones, first), others = recorded(two, two), [recorded(*each)[0] for each in ((two, three), (three, two), (three,))]
    assert ones == recorded(two * 2, two)[0]
    assert len({ones, *others}) == 4
    assert first == recorded(two, three)[1]
    for many, few in (
        (tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1, 2], []], dtype=tf.int32)),
        (tf.sparse.from_dense([[1, 2]]), tf.sparse.from_dense([[1, 0]])),
        (tf.sparse.from_dense([[1], [0]]), tf.sparse.from_dense([[1]])),
    ):
        assert recorded(many) != recorded(few)


# In `make test`, test_own_fit.py has a model with a `fit` of its own on replicas, test_proofs.py metrics of one's own
# there, and "prepared and other epochs" and test_workers.py prepared models and arrays.
LONG = (
    *("a model with a fit of its own", "prepared with arrays"),
    # Of weights as of the rate.
    "weights that one changes behind the back",
)


def short_or_long(*cases):
    """Cases whose first part is a name: long, if `LONG` has it."""
    return [pytest.param(*case, marks=[pytest.mark.long] * (case[0] in LONG)) for case in cases]


@pytest.fixture(scope="module")
def found():
    """What each case of `consistency_worker` but `LONG` came to on two workers of one cluster."""
    names = [name for name in consistency_worker.CASES if name not in LONG]
    return own_process.on_workers(consistency_worker.main, names, seconds=300)


@pytest.fixture(scope="module")
def found_long():
    """What each case of `LONG` came to."""
    return own_process.on_workers(consistency_worker.main, LONG, seconds=300)


def found_in(request, name):
    return request.getfixturevalue("found_long" if name in LONG else "found")


@pytest.mark.parametrize(
    ("name", "says"),
    short_or_long(
        ("another activation", r"layers\[1\]\.config\.activation: 'tanh' on worker 0, 'relu' on worker 1"),
        ("prepared and other epochs", r"fit\.epochs: 1 on worker 0, 2 on worker 1"),
        (
            "weights loaded on one",
            "different weights before the first step: .*kernel has norm.* on worker 0, and norm.* on worker 1",
        ),
        (
            "a rate that one changes behind the back",
            "after epoch 0.*learning rate: 0.1.* on worker 0, 1.1.* on worker 1",
        ),
        ("weights that one changes behind the back", "different weights after epoch 0.*kernel"),
        ("fewer batches", "batches of data: 3 on worker 0, 2 on worker 1"),
        ("larger batches", r"checksum of the batches' shapes: -?\d+ on worker 0, -?\d+ on worker 1"),
    ),
)
def test_workers_that_differ_get_one_error(request, name, says):
    check_refused(found_in(request, name), name, says)


def check_refused(found, name, says):
    first, second = (worker[name] for worker in found)
    assert first == second
    assert re.search(f"refused: .*{says}", str(first)), first


def test_models_of_other_shapes_are_refused():
    with pytest.raises(RuntimeError, match="models differ"):
        own_process.on_workers(consistency_worker.another_width, None, seconds=120)


def test_workers_with_nothing_to_compare(found):
    """TensorFlow's all-reduce of an empty tensor ends the process."""
    assert [worker["nothing to compare"] for worker in found] == [(2, 0, 2)] * 2


def test_a_cluster_is_started_once_in_a_process(found):
    for worker in found:
        assert "DistributedFit(strategy=first.strategy)" in worker["a second start"]["said"]
        assert worker["a second start"]["at once"]


@pytest.mark.parametrize(
    ("name", "expected"),
    short_or_long(
        ("a stop of one worker in evaluation and after an epoch", {"steps": 6, "epochs": 2}),
        ("a stop of one worker after a batch", {"steps": 2, "epochs": 1}),
        ("a stop of one worker before an epoch", {"steps": 3, "epochs": 1}),
        ("not a number", 2),
    ),
)
def test_workers_stop_together(request, name, expected):
    assert [worker[name] for worker in found_in(request, name)] == [expected] * 2


def test_no_worker_ends_before_others_have_read(found):
    """A collective reads from a worker that has its own part already; an ended one would fail the others."""
    for each in found:
        passed = each["no end before others have read"]
        assert {name: bool(count) for name, count in passed.items()} == dict.fromkeys(passed, True)


def test_what_is_tried_on_made_up_rows_starts_no_collective(found):
    """A trial of one worker that waited for the other would be waited for in turn, or shift their collectives."""
    first, second = (worker["parts of its own"] for worker in found)
    assert first == second
    made = consistency_worker.own_parts(contextlib.nullcontext())
    for name, value in consistency_worker.results_of(made.fit, made).items():
        np.testing.assert_allclose(first[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_may_differ_trains(found):
    first, second = (worker["what may differ"] for worker in found)
    assert first == second
    assert len(first["loss"]) == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*shuffle=True.* was passed, but will be ignored:UserWarning")
def test_a_model_with_a_fit_of_its_own_trains_as_one_device(found_long):
    """Its evaluation and predictions too."""
    first, second = (worker["a model with a fit of its own"] for worker in found_long)
    assert first == second
    made = consistency_worker.pipeline()
    for name, value in consistency_worker.results_of_pipeline(made.fit, made).items():
        np.testing.assert_allclose(first[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_a_prepared_model_trains_on_arrays_as_one_device(found_long):
    """Its own `fit` and `evaluate` cut them up as `dist.fit` does."""
    first, second = (worker["prepared with arrays"] for worker in found_long)
    assert first == second
    np.testing.assert_allclose(first["loss"], first["loss of dist.fit"], rtol=1e-5)
    np.testing.assert_allclose(first["evaluated"], first["evaluated by one device"], rtol=1e-5)
