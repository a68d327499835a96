"""Two workers: the first is traced, and says what it saw; TensorFlow's profiler would crash the other now and then."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from keras_paragrad.profiling.summary import ProfileSummary

SCRIPT = """
import os, signal, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
from keras_paragrad import DistributedFit
from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.tracer import Profiler

class AskTheSecond(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and dist.strategy.cluster_resolver.task_id == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

dist = DistributedFit(startup_timeout=60)
with dist.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, name="hidden"), keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=int(sys.argv[2]))
x = np.random.default_rng(0).normal(size=(330, 6)).astype("float32")
schedule = ProfileSchedule(skip_first=6, warmup=1, active=8, repeat=3)
profiler = Profiler(sys.argv[1], schedule, report=None, keep=2)
dist.fit(model, x, x[:, :1], batch_size=10, verbose=0, callbacks=[AskTheSecond(), profiler])
print(len(profiler.summaries), "windows")
"""


def trained(folder, per_call):
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    launch = ["-m", "keras_paragrad", "launch", "--workers", "2", "--grace-seconds", "20"]
    command = [sys.executable, "-P", *launch, str(folder / "train.py"), str(folder / "logs"), str(per_call)]
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    summaries = [
        ProfileSummary.from_dict(json.loads(path.read_text()))
        for path in sorted((folder / "logs").rglob("keras_paragrad.json"))
    ]
    assert {summary.run.worker for summary in summaries} == {0}
    assert len(list((folder / "logs").rglob("*.xplane.pb"))) == len(summaries)
    assert "[worker 1] 0 windows" in ran.stdout
    assert ran.stderr.count("Profiler traces the first worker only") == 1
    return [[step.step for step in summary.steps] for summary in summaries], ran.stdout


def test_the_first_worker_is_traced(tmp_path):
    found, printed = trained(tmp_path, 1)
    # The last two of three windows.
    assert found == [list(range(16, 24)), list(range(25, 33))]
    assert printed.count("Profile of batches") == 3
    assert json.loads((tmp_path / "logs" / "run.json").read_text())["replicas"] == 2


# In one process, test_several_batches_in_a_call of test_tracer.py has such windows.
@pytest.mark.long
def test_with_several_batches_in_a_call(tmp_path):
    found, _ = trained(tmp_path, 4)
    # Windows begin with a call; 33 batches end with a call of one.
    assert found == [list(range(16, 24)), list(range(28, 33))]
