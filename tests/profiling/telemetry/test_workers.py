"""Two workers: each has the figures of the whole batch, and the first writes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
from telemetry_loops import expected

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 180


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start(index, addresses, folder):
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    paths = os.pathsep.join([str(WORKER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", str(WORKER), str(folder / f"log{index}"), str(folder / f"answer{index}")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_workers(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = [start(index, addresses, tmp_path) for index in range(2)]
    try:
        printed = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, text in zip(workers, printed, strict=True):
        assert worker.returncode == 0, text[-4000:]
    first, second = (json.loads((tmp_path / f"answer{index}").read_text()) for index in range(2))
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
