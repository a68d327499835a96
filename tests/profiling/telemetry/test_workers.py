"""Two workers: each has the figures of the whole batch, and the first writes."""

import keras
import numpy as np
import pytest
from oracles.telemetry_loops import expected
from runner.own_process import on_workers
from workers.telemetry_worker import reported_by_worker


@pytest.mark.long
def test_two_workers(tmp_path):
    first, second = on_workers(reported_by_worker, tmp_path, seconds=180)
    wanted = expected(lambda **more: keras.optimizers.Adam(0.01, **more), 16, epochs=2, clip={"clipnorm": 0.3})
    for found in (first, second):
        assert found["steps"] == [2, 4, 6, 8, 10, 12]
        for part, name in ((1, "norms"), (2, "clipped")):
            norms = np.array([wanted[step - 1][part] for step in found["steps"]])
            np.testing.assert_allclose(found[name], norms, rtol=1e-3, atol=1e-5)
        # Of both workers: a batch has 16.
        np.testing.assert_allclose(found["examples_per_update"], 16, rtol=1e-6)
    assert {"telemetry.csv", "throughput.csv", "retraces.csv"} < set(first["log_dir"])
    assert second["log_dir"] == []
