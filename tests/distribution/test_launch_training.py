"""Two launched workers reach each other through TensorFlow, on one machine or, by addresses of loopback, on two."""

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
)

@tf.function
def total():
    def mine():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.cast(context.replica_id_in_sync_group + 1, tf.float32))

    return strategy.run(mine)

print("total", strategy.experimental_local_results(total())[0].numpy())
"""


# In `make test`, the launched workers of test_workers.py train.
@pytest.mark.long
def test_two_workers_add_up(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "keras_paragrad", "launch", "--workers", "2", "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=150)
        finally:
            # Ends the workers too.
            process.kill()
    assert process.returncode == 0, err[-3000:]
    assert out == "total 3.0\n"


@pytest.mark.long
def test_two_machines_add_up(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        rendezvous = f"127.0.0.2:{free.getsockname()[1]}"
    command = [sys.executable, "-P", "-m", "keras_paragrad", "launch", "--nodes", "2", "--rendezvous", rendezvous]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KERAS_PARAGRAD_TOKEN": "0123456789abcdef"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [
        subprocess.Popen(
            [*command, f"--node-rank={rank}", f"--node-address=127.0.0.{2 + rank}", "train.py"],
            cwd=tmp_path,
            env=environment,
            **pipes,
        )
        for rank in (1, 0)
    ]
    try:
        shown = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], [err[-3000:] for _, err in shown]
    assert [out for out, _ in shown] == ["total 3.0\n"] * 2
