"""What a step is estimated to take, against models and optimizers that are really made, and against a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, microbatch
from keras_paragrad.cli.main import main
from keras_paragrad.compat.variables import without_memory
from keras_paragrad.memory import estimate_memory
from keras_paragrad.memory.breakdown import MIN_SHARD_BYTES
from keras_paragrad.memory.estimate import bytes_in_words

WIDE, NARROW = 300 * 400, 400


def mlp(optimizer="adam", **options):
    layers = [keras.layers.Dense(400, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((300,)), *layers])
    model.compile(optimizer, "mse", **options)
    return model


def test_weights_gradients_and_slots_are_those_of_the_model():
    model = mlp(keras.optimizers.Adam(use_ema=True))
    column = estimate_memory(model, 8)[None]
    weights = sum(each.numpy().nbytes for each in model.trainable_variables)
    assert (column.parameters, column.gradients, column.ema) == (weights, weights, weights)
    assert column.non_trainable == sum(each.numpy().nbytes for each in model.non_trainable_variables)
    model.optimizer.build(model.trainable_variables)
    assert column.slots + column.ema == sum(each.numpy().nbytes for each in model.optimizer.variables)
    assert (column.gathered, column.accumulators) == (0, 0)


def test_shards_are_of_what_is_large(caplog):
    model = mlp(AccumulatingOptimizer(keras.optimizers.SGD(momentum=0.9), 4))
    small = sum(each.numpy().nbytes for each in model.trainable_variables) - 4 * WIDE
    assert 4 * NARROW < MIN_SHARD_BYTES < 4 * WIDE
    whole, optimizer, parameters = estimate_memory(model, 30, replicas=7).columns[:3]
    shard = 4 * -(-WIDE // 7)
    assert [each.parameters for each in (whole, optimizer, parameters)] == [4 * WIDE + small] * 2 + [shard + small]
    # The accumulators' position and weight, and the optimizer's iterations and rate.
    assert [each.accumulators - 12 for each in (whole, optimizer)] == [4 * WIDE + small, shard + small]
    assert [each.slots - 12 - 12 + 12 for each in (whole, parameters)] == [4 * WIDE + small, shard + small]
    assert [each.gathered for each in (whole, optimizer, parameters)] == [0, 0, 4 * WIDE]
    # The kernel's arrives last, and is whole until it is reduced.
    assert [each.gradients for each in (whole, parameters)] == [4 * WIDE + small] * 2
    assert len({each.activations for each in (whole, optimizer, parameters)}) == 1
    assert whole.total > optimizer.total > parameters.total
    assert not caplog.messages


def test_tables_are_not_gathered_and_their_gradients_are_of_rows():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Embedding(9000, 16), keras.layers.Flatten()])
    model.compile("adam", "mse")
    column = estimate_memory(model, 12, 4)["parameters"]
    assert (column.parameters, column.gathered) == (9000 * 16 * 4 // 4, 0)
    assert column.gradients == 3 * 5 * 16 * 4


def test_half_precision_is_gathered_in_half_precision():
    with keras.dtype_policies.DTypePolicy("mixed_bfloat16") and without_memory():
        layer = keras.layers.Dense(400, dtype="mixed_bfloat16")
        model = keras.Sequential([keras.Input((300,)), layer])
    model.compile("sgd", "mse")
    column = estimate_memory(model, 8, 2)["parameters"]
    assert (column.gathered, column.parameters) == (2 * WIDE, 4 * (WIDE // 2 + NARROW))


def state(model):
    parts = [model, *model.layers, model.optimizer, model._compile_loss, model._compile_metrics]
    held = [(part, {name: id(value) for name, value in vars(part).items()}) for part in parts]
    return held, [id(each._value) for each in model.variables], [each.numpy() for each in model.variables]


@pytest.mark.long
def test_the_model_is_left_as_it_is():
    def trained(estimated):
        keras.utils.set_random_seed(0)
        model = mlp(metrics=["mae", "auc"])
        if estimated:
            before = state(model)
            estimate_memory(model, 64, 4)
            np.testing.assert_equal(state(model), before)
            assert not (model.optimizer.built or model._compile_loss.built or model._compile_metrics.built)
        draw = np.random.default_rng(0)
        history = model.fit(draw.normal(size=(64, 300)), draw.integers(0, 2, (64, 1)), verbose=0, shuffle=False)
        if estimated:
            before = state(model)
            estimate_memory(model, 64, 4)
            np.testing.assert_equal(state(model), before)
        return history.history

    assert trained(True) == trained(False)


def test_no_memory_is_needed_for_a_model_of_any_size():
    with without_memory():
        model = keras.Sequential([keras.Input((10**6,)), keras.layers.Dense(10**6, use_bias=False)])
        model.compile("adam", "mse")
    columns = estimate_memory(model, 10**4, replicas=100)
    assert columns[None].parameters == 4 * 10**12
    assert columns["optimizer"].slots == pytest.approx(8 * 10**12 / 100)


def dense(inputs):
    return keras.layers.Dense(2)(keras.layers.Flatten()(inputs))


def two_outputs():
    a, b = keras.Input((300,), name="a"), keras.Input((4,), dtype="int32", name="b")
    outputs = {"c": dense(a), "d": keras.layers.Dense(7, activation="softmax")(keras.layers.Embedding(9, 3)(b))}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("sgd", {"c": "mse", "d": "sparse_categorical_crossentropy"}, metrics={"d": "accuracy"})
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return self.inner(x)


def subclassed():
    model = Subclassed()
    model(np.ones((2, 300)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Adversarial(keras.Model):
    """Two optimizers, one of which Keras does not know of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(300), keras.layers.Dense(1)
        self.seen = keras.metrics.Mean()

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def compile(self):
        super().compile(keras.optimizers.SGD())
        self.own = keras.optimizers.Adam()

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        for part, optimizer in ((self.first, self.own), (self.second, self.optimizer)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x) ** 2)
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.seen.update_state(loss)
        return {"loss": self.seen.result()}


def adversarial():
    model = Adversarial()
    model.build((None, 300))
    model.compile()
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [two_outputs, subclassed, adversarial])
def test_models_of_other_kinds(make):
    model = make()
    column = estimate_memory(model, 16)[None]
    weights = sum(each.numpy().nbytes for each in model.trainable_variables)
    assert column.parameters == weights
    rows = 16 * 4 * 3 * 4 - 9 * 3 * 4 if make is two_outputs else 0
    assert column.gradients == weights + rows
    # The inputs at the least.
    assert column.activations >= 16 * 300 * 4
    if make is adversarial:
        assert not model.own.built
        assert column.slots == pytest.approx(2 * (300 * 300 + 300) * 4, abs=50)


def test_slices_of_a_step_with_several_optimizers():
    model = adversarial()
    whole = estimate_memory(model, 1024)[None]
    microbatch(model, 8)
    sliced = estimate_memory(model, 1024)[None]
    assert (sliced.parameters, sliced.gradients, sliced.slots) == (whole.parameters, whole.gradients, whole.slots)
    assert sliced.activations < whole.activations


def test_sizes_that_the_inputs_leave_open_are_asked_for():
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    model = keras.Model(tokens, keras.layers.LSTM(32)(keras.layers.Embedding(50, 16)(tokens)))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"shape=\(None, None\).* name='tokens'\) leaves open.* --length 128"):
        estimate_memory(model, 8)
    columns = [estimate_memory(model, 8, length=length)[None] for length in (20, 40)]
    # Of each step the loop keeps the input, its state and what the gates compute.
    assert (columns[1].activations - columns[0].activations) / 20 == pytest.approx(8 * (16 + 8 * 32) * 4, rel=0.15)


def test_what_does_not_say_its_inputs_or_is_not_compiled_is_refused():
    model = Subclassed()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="doesn't say what its inputs are. Build it first"):
        estimate_memory(model, 8)
    with pytest.raises(ValueError, match="no optimizer. Call model.compile"):
        estimate_memory(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), 8)
    with pytest.raises(ValueError, match="`batch_size` is 0"):
        estimate_memory(mlp(), 0)
    with pytest.raises(KeyError, match="'weights'; the estimate has None, optimizer, parameters"):
        estimate_memory(mlp(), 8)["weights"]


def test_slices_take_the_memory_of_a_slice():
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(400, activation="relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    whole = estimate_memory(model, 4096)[None].activations
    with microbatch(model, 512):
        sliced = estimate_memory(model, 4096)[None].activations
    batch, rows = 4096 * 301 * 4, 512 * 300 * 4
    sums = sum(each.numpy().nbytes for each in model.trainable_variables)
    assert sliced - batch - sums == pytest.approx((whole - batch) / 8 + rows, rel=0.1)
    assert estimate_memory(model, 4096)[None].activations == whole


@pytest.mark.long
@pytest.mark.own_process
def test_a_distributed_fit_estimates_for_its_replicas():
    replicas = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    dist = DistributedFit(strategy=replicas)
    with dist.scope():
        model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(400), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    estimate = dist.estimate(model, 33)
    assert (estimate.replicas, estimate.rows) == (2, 17)
    alone = keras.Sequential.from_config(model.get_config())
    alone.compile("adam", "mse")
    assert estimate.to_dict() == estimate_memory(alone, 33, 2).to_dict()
    dist.fit(model, np.ones((33, 300)), np.ones((33, 1)), verbose=0)
    assert dist.estimate(model, 33).to_dict() == estimate.to_dict()


def test_the_table_and_json():
    estimate = estimate_memory(mlp(), 64, 4)
    text = str(estimate)
    for part in (
        "batches of 64 on 4 devices, 16 examples on each",
        "'optimizer'",
        "Optimizer slots",
        "Peak",
        "475 KiB",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 118
    assert json.loads(json.dumps(estimate.to_dict()))["columns"][2]["shard"] == "parameters"
    assert "'optimizer'" not in str(estimate_memory(mlp(), 64))


FILE = """
import keras
from beside import UNITS


def build_model(units=UNITS):
    model = keras.Sequential([keras.Input((units,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def not_compiled():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def number():
    return 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "beside.py").write_text("UNITS = 10**6")
    path = tmp_path / "train.py"
    path.write_text(FILE)
    return path


def test_the_command_estimates_a_model_larger_than_the_machine(script, capsys):
    assert main(["estimate", f"{script}:build_model", "--batch-size", "64", "--devices", "8", "--json"]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    weights = 4 * (10**12 + 10**6 + 10**6 + 1)
    assert [column["parameters"] for column in columns[:2]] == [weights, weights]
    assert columns[2]["parameters"] == pytest.approx(weights / 8)
    assert main(["estimate", f"{script}:build_model"]) == 0
    assert "3.64 TiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("buildmodel", "has no function 'buildmodel'. Did you mean `build_model`?"),
        ("not_compiled", "has no optimizer"),
        ("number", "`model` is 3, and must be a compiled keras.Model"),
    ],
)
def test_the_command_says_what_is_wrong(function, says, script, capsys):
    assert main(["estimate", f"{script}:{function}"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train.py", "train:build", "nowhere.py:build_model", "train.py:build --devices 0"])
def test_the_command_refuses_words_that_are_wrong(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *words.split()])
    assert ended.value.code == 2
    assert "keras-paragrad estimate: error: argument" in capsys.readouterr().err


TRAINS = Path(__file__).parents[1] / "trainings" / "memory_worker.py"


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process's memory is read from Linux's /proc")
def test_a_run_takes_what_was_estimated():
    # Freed memory goes back at once, and oneDNN keeps none for later.
    settings = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **settings, "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-W", "ignore", TRAINS]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["estimated"] == pytest.approx(found["seen"], rel=0.15), found


@pytest.mark.parametrize(("size", "words"), [(999, "999 B"), (1_023_400, "999 KiB"), (1_023_900, "0.976 MiB")])
def test_bytes_just_below_a_unit(size, words):
    assert bytes_in_words(size) == words
