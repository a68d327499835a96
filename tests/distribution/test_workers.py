"""`DistributedFit` on two workers, in processes that the launcher starts."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf
from runner import forked_scripts, own_process
from workers import consistency_worker

from keras_paragrad.compat import collectives
from keras_paragrad.compat.workers import ReplicaPlacement

SCRIPT = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf
from keras_paragrad import AccumulatingOptimizer, DistributedFit

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
settings = json.loads(sys.argv[1])
dist = DistributedFit(devices=settings.get("devices"), startup_timeout=60)
generator = np.random.default_rng(0)
rows = settings.get("rows", [90, 90])[worker]
x = generator.normal(size=(rows, 6)).astype("float32")
y = generator.integers(0, 3, rows)
with dist.scope():
    keras.utils.set_random_seed(1)
    hidden = settings.get("hidden", [8, 8])[worker]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(hidden, "tanh"), keras.layers.Dense(3)])
    clip = settings.get("clips", [0.1, 0.1])[worker]
    model.compile(
        AccumulatingOptimizer(keras.optimizers.Adam(1e-2, global_clipnorm=clip), 2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # Alone it is the reference, whose few steps take less time than tracing them.
        run_eagerly="TF_CONFIG" not in os.environ,
    )
batch_size = settings.get("batch_size", 32)
history = dist.fit(model, x, y, batch_size=batch_size, epochs=2, validation_split=0.2, verbose=0).history
found = {
    "weights": [weight.tolist() for weight in model.get_weights()],
    "history": history,
    "evaluation": model.evaluate(x, y, batch_size=32, verbose=0),
    "predictions": model.predict(x, batch_size=32, verbose=0).tolist(),
}
with open(f"{settings['folder']}/{settings['name']}-{worker}.json", "w") as file:
    json.dump(found, file)
"""
SERVED = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
from keras_paragrad import DistributedFit

dist = DistributedFit(exact=False)
with dist.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(210, 4)).astype("float32")
history = dist.fit(model, x, x[:, :1], batch_size=20, epochs=3, validation_split=1 / 7, verbose=0)
with open(sys.argv[1] + "/served-0.json", "w") as file:
    json.dump({"iterations": int(model.optimizer.iterations.numpy()), "history": history.history}, file)
"""
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}


def run(folder, workers, name, **settings):
    argument = json.dumps({"folder": str(folder), "name": name, **settings})
    script = folder / "train.py"
    script.write_text(SCRIPT)
    if workers == 1:
        own_process.call(forked_scripts.run_script, (str(script), [argument], str(folder)), [{}], seconds=240)
        return None
    return launched(script, ["--workers", str(workers)], argument)


def launched(script, options, argument):
    with forked_scripts.forked(script) as (started, needed):
        launch = ["-m", "keras_paragrad", "launch", *options, "--grace-seconds", "20", str(started), argument]
        environment = {**ENVIRONMENT, **needed}
        command = [sys.executable, "-P", *launch]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


def results(folder, name):
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


def assert_close(found, expected, tolerance):
    flat, wanted = [], []

    def flatten(value, into):
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            flatten(part, into)
        if isinstance(value, float):
            into.append(value)

    flatten(found, flat)
    flatten(expected, wanted)
    assert len(flat) == len(wanted) > 0
    assert max(abs(one - other) for one, other in zip(flat, wanted, strict=True)) <= tolerance


# In `make test`, test_exactness.py has workers with two devices each.
@pytest.mark.parametrize(
    "devices", [["CPU:0"], pytest.param(["CPU:0", "CPU:1"], marks=pytest.mark.long)], ids=["one", "two"]
)
def test_workers_end_where_one_process_ends(tmp_path, devices):
    """Shuffled, uneven, accumulated and clipped, with one device each and with two."""
    run(tmp_path, 1, "alone", devices=["CPU:0"])
    (expected,) = results(tmp_path, "alone")
    together = run(tmp_path, 2, "together", devices=devices)
    assert together.returncode == 0, together.stderr[-3000:]
    found = results(tmp_path, "together")
    assert len(found) == 2
    for each in found:
        assert_close(each["weights"], expected["weights"], 1e-6)
        assert_close(each["history"], expected["history"], 1e-5)
        assert_close(each["evaluation"], expected["evaluation"], 1e-5)
        assert_close(each["predictions"], expected["predictions"], 1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        # Without the launcher, test_consistency.py and data/test_workers.py have these in clusters that cases share.
        pytest.param({"rows": [90, 80]}, "examples: 72 on worker 0, 64 on worker 1", id="data", marks=pytest.mark.long),
        pytest.param({"hidden": [8, 9]}, "their models differ", id="another model", marks=pytest.mark.long),
        pytest.param(
            {"clips": [0.1, 0.2]}, "global_clipnorm: 0.1 on worker 0, 0.2 on worker 1", id="another optimizer"
        ),
        pytest.param({"batch_size": 1}, "batch_size", id="a batch smaller than the replicas", marks=pytest.mark.long),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, settings, says):
    refused = run(tmp_path, 2, "refused", devices=["CPU:0"], **settings)
    assert refused.returncode != 0
    # Every worker raises it, as test_consistency.py shows; the launcher may stop one before it has printed anything.
    assert says in refused.stderr, refused.stderr[-3000:]
    assert results(tmp_path, "refused") == []


def test_parameter_servers_count_exactly(tmp_path):
    script = tmp_path / "served.py"
    script.write_text(SERVED)
    ended = launched(script, ["--workers", "2", "--ps", "1"], str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    (found,) = results(tmp_path, "served")
    assert found["iterations"] == 3 * 9
    assert found["history"]["loss"][-1] < found["history"]["loss"][0]
    assert len(found["history"]["val_loss"]) == 3


def test_tensors_made_too_early_are_named():
    with pytest.raises(RuntimeError, match=r"Write DistributedFit\(\.\.\.\) before the first optimizer"):
        own_process.on_workers(consistency_worker.too_late, None, seconds=120)


def test_what_is_only_traced_has_the_values_of_this_worker(monkeypatch):
    """Of the third worker, which has none of the first replica's."""
    monkeypatch.setattr(collectives, "replica_placement", lambda strategy: ReplicaPlacement(3, 1, 2))
    with collectives.as_on_replica(tf.distribute.get_strategy()):
        assert tf.distribute.get_replica_context().replica_id_in_sync_group == 2


@pytest.mark.long
def test_three_workers_end_where_one_process_ends(tmp_path):
    run(tmp_path, 1, "alone", devices=["CPU:0"])
    (expected,) = results(tmp_path, "alone")
    settings = {"rows": [90] * 3, "hidden": [8] * 3, "clips": [0.1] * 3}
    together = run(tmp_path, 3, "together", devices=["CPU:0"], **settings)
    assert together.returncode == 0, together.stderr[-3000:]
    for each in results(tmp_path, "together"):
        assert_close(each["weights"], expected["weights"], 1e-6)
