"""The stages of a pipeline in a profile, where XLA compiles them."""

import json

import keras
import numpy as np
import pytest

from keras_paragrad import DistributedFit, Profiler, ProfileSchedule
from keras_paragrad.distribution import Pipeline


@pytest.mark.long
def test_stages_that_xla_compiled_have_lanes(tmp_path):
    dist = DistributedFit(Pipeline(cuts=["second"], microbatches=3), devices=["CPU:0", "CPU:1"], jit=True)
    with dist.scope():
        layers = [keras.layers.Dense(256, "tanh", name=name) for name in ("first", "second", "third")]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    profiler = Profiler(tmp_path, ProfileSchedule(skip_first=1, warmup=0, active=3), summary=False, report=None)
    dist.fit(model, np.ones((768, 8)), np.ones((768, 1)), batch_size=192, verbose=0, callbacks=[profiler])
    found = json.loads(next(tmp_path.rglob("keras_paragrad.json")).read_text())["pipeline"]
    assert (found["stages"], found["columns"], found["microbatches"]) == (2, 1, 3)
    drawn = {(work["stage"], work["micro_batch"], work["backward"]) for work in found["work"]}
    assert drawn == {
        (stage, micro_batch, backward) for stage in (0, 1) for micro_batch in range(3) for backward in (0, 1)
    }
    # Operations around the programs take next to no time: without what XLA compiled, the stages seemed to wait.
    assert 0 < found["bubble"] < 0.9
    backward = {(work["stage"], work["micro_batch"]): work["begins"] for work in found["work"] if work["backward"]}
    assert all(backward[1, each] < backward[0, each] for each in range(3)), backward
