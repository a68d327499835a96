"""The largest batch that fits: how it is looked for, processes that are killed, and what is refused."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from sample_models import counting

from keras_paragrad import find_batch_size, microbatch, recompute
from keras_paragrad.memory import available, batch_size, estimate_memory
from keras_paragrad.memory.batch_size import largest, nice_sizes
from keras_paragrad.memory.trial import CannotTryError, PreparationCall, Trials, custom_objects_of, preparations_of

WIDE = 256
X, Y = np.ones((40, WIDE), "float32"), np.ones((40, 1), "float32")


def made(**options):
    model = keras.Sequential([keras.Input((WIDE,)), keras.layers.Dense(WIDE, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


class Simulated:
    """Trials of a model whose training takes `constant + a_row * rows`, or with `kills`, isn't measured if too much."""

    def __init__(self, constant, a_row, kills=False):
        self.constant, self.a_row, self.kills, self.asked = constant, a_row, kills, []

    def __call__(self, model, data, device_bytes, steps):
        self.device_bytes = device_bytes
        return self

    def bytes_of(self, rows):
        self.asked.append(rows)
        used = self.constant + self.a_row * rows
        return None if self.kills and used > self.device_bytes else used


def test_sizes_have_four_binary_digits():
    assert nice_sizes(1) == [1] and nice_sizes(20) == [*range(1, 17), 18, 20]
    sizes = nice_sizes(1000)
    assert sizes[-3:] == [896, 960, 1000] and all(b <= 9 / 8 * a for a, b in zip(sizes[7:], sizes[8:], strict=False))


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("guess", [(0, 40.0), (1000, 5.0), (10_000, 10.0), None])
@pytest.mark.parametrize("limit", [10_009, 10_010, 12_345, 500_000, 10**7])
def test_finds_the_largest_in_few_trials(limit, guess, kills):
    sizes, asked = nice_sizes(5000), []

    def measure(rows):
        asked.append(rows)
        used = 10_000 + 10 * rows
        return None if kills and used > limit else used

    first = len(sizes) - 1 if guess and guess[1] < 10 else 20
    found = largest(sizes, limit, measure, first, guess and guess[1])
    expected = max((rows for rows in sizes if 10_000 + 10 * rows <= limit), default=None)
    assert found is expected is None or (found in asked and expected * 8 / 9 <= found <= expected)
    assert len(asked) <= (14 if kills else 6) and len(set(asked)) == len(asked)


def test_estimates_first_and_says_what_it_tried(no_graph, monkeypatch, capsys, caplog):
    trials = Simulated(600_000, 4000, kills=True)
    monkeypatch.setattr(batch_size, "Trials", trials)
    model = made()
    with caplog.at_level("INFO", "keras_paragrad"):
        found = find_batch_size(model, X, Y, device_bytes=2_000_000, max_batch_size=4096)
    assert found == max(rows for rows in nice_sizes(4096) if 600_000 + 4000 * rows <= 2_000_000)
    first = trials.asked[0]
    assert first > found and 0.8 < estimate_memory(model, first)[None].total / 2_000_000 <= 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"find_batch_size: {first} rows take more than 1.91 MiB, too much."
    assert len(lines) == len(trials.asked) and [each.getMessage() for each in caplog.records] == lines


def test_goes_by_the_estimate_alone_if_it_may_not_try(no_graph, capsys):
    model = made()
    found = find_batch_size(model, X, Y, device_bytes=3_000_000, max_batch_size=100_000, steps=0, verbose=0)
    assert (
        estimate_memory(model, found)[None].total <= 2_400_000 < estimate_memory(model, found * 9 // 8 + 1)[None].total
    )
    assert not capsys.readouterr().out


def test_says_why_it_did_not_try(no_graph, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    local = type("Local", (keras.layers.Layer,), {"call": lambda self, inputs: inputs, "__module__": "__main__"})
    model = keras.Sequential([keras.Input((WIDE,)), local(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = find_batch_size(model, X, Y, device_bytes=3_000_000, verbose=0)
    assert found == 40 and "Local can't be imported in another process. Define it in a module" in caplog.text
    assert "relies on the memory estimate" in caplog.text


def test_takes_code_of_others_along():
    model = counting.counting_model(WIDE)
    model.get_layer("first").activation = doubled
    found = custom_objects_of(model)
    names = {"CountingLayer", "CountingLoss", "CountingMetric", "counting>CountingModel", "doubled"}
    assert names <= set(found) and found["doubled"] is doubled
    assert not {"Dense", "SGD", "Mean"} & set(found)
    pickle.dumps(found["CountingLayer"])


def doubled(x):
    return 2 * x


def test_repeats_what_prepared_the_model():
    model = made()
    handle = recompute(model, [model.layers[0].name])
    microbatch(model, 8, weighting="examples")
    names = {name: arguments for _, name, arguments in preparations_of(model)}
    assert names["microbatch"] == {"size": 8, "weighting": "examples"}
    assert names["recompute"] == {"layers": [model.layers[0].name], "every": None}
    handle.undo()
    assert [name for _, name, _ in preparations_of(model)] == ["microbatch"]
    model._keras_paragrad["step_builder"].fill(place=lambda: None)
    with pytest.raises(CannotTryError, match="'place' stage"):
        preparations_of(model)


# Each process imports TensorFlow.
@pytest.mark.long
def test_a_trial_that_takes_too_much_is_killed_alone(monkeypatch):
    class Twice(keras.layers.Layer):
        def call(self, inputs):
            return 2 * inputs

    model = keras.Sequential([keras.Input((WIDE,)), Twice(), keras.layers.Dense(WIDE), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    before = [each.numpy() for each in model.weights]
    ended = []
    run = Trials._run
    monkeypatch.setattr(Trials, "_run", lambda *arguments: ended.append(run(*arguments)) or ended[-1])
    trials = Trials(model, (X, Y, None), 250_000_000, 1)
    assert trials.bytes_of(400_000) is None
    slices = PreparationCall("keras_paragrad.accumulation.slices", "microbatch", {"size": 20_000})
    used = trials.measure(40_000, [slices]).bytes
    # Two copies of the batch at most, and two layers' activations and gradients of a slice.
    assert 40_000 * WIDE * 4 < used < 250_000_000 and ended == [-9, 0]
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.weights, strict=True))
    assert not model.optimizer.built or not model.optimizer.iterations.numpy()


def test_a_trial_that_fails_otherwise_says_so(monkeypatch):
    trials = Trials(made(), (X, Y, None), 10**9, 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CannotTryError, match="ended with status 1: nothing was printed"):
        trials.bytes_of(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": iter([X])}, "`x` is a generator"),
        ({"x": tf.ragged.constant([[1.0], [1.0, 2.0]]), "y": None}, "`x` and `y` have to be arrays"),
        ({"steps": -1}, "`steps` is -1"),
        ({"device_bytes": 1000, "steps": 0}, "Not even 1 row of 'sequential.*' can be trained in 0.977 KiB"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        find_batch_size(made(), **{"x": X, "y": Y, **arguments})


def test_refuses_models_that_are_not_ready():
    with pytest.raises(ValueError, match="is not compiled. Call model.compile"):
        find_batch_size(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), X, Y)
    lazy = keras.Sequential([keras.layers.Dense(1)])
    lazy.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is not built. Call model.build"):
        find_batch_size(lazy, X, Y)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        mirrored = made()
    with pytest.raises(ValueError, match="built for 2 replicas. Multiply what it finds"):
        find_batch_size(mirrored, X, Y)


def test_refuses_a_gpu_that_is_reserved(monkeypatch):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: False)
    with pytest.raises(ValueError, match="has reserved the memory of GPU:0"):
        available.memory_of_device(10**9, 2)
    assert available.memory_of_device(10**9, 0) == 10**9
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    monkeypatch.setattr(available, "least_free_gpu_bytes", lambda: 10**10)
    assert available.memory_of_device(None, 2) == 9 * 10**9


def test_memory_is_what_control_groups_leave(tmp_path):
    groups = tmp_path / "groups"
    job = tmp_path / "a" / "job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("700\n")
    (job / "memory.stat").write_text("file 300\ninactive_file 200\n")
    (tmp_path / "a" / "memory.max").write_text("max\n")
    groups.write_text("0::/a/job\n")
    assert available._of_cgroups(tmp_path, groups) == [500]
    assert available._of_cgroups(tmp_path, tmp_path / "none") == []
    assert 0 < available.available_bytes() < 2**50 and available.resident_bytes() <= available.resident_bytes(peak=True)


class OwnBuild(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 1))

    def call(self, x):
        return x @ self.kernel


def test_sends_classes_but_no_layers():
    model = keras.Sequential([keras.Input((WIDE,)), OwnBuild()])
    assert set(custom_objects_of(model).values()) == {OwnBuild}


@pytest.mark.long
def test_what_is_found_fits_in_training():
    script = Path(__file__).parents[1] / "trainings" / "memory_found.py"
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert 0.7 * told["limit"] < told["seen"] <= 1.1 * told["limit"]
