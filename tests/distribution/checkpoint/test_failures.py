"""TensorFlow's errors of lost workers are explained, and no others."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import DistributedFit
from keras_paragrad.distribution.checkpoint.interruptions import WorkerLostError, explained_failures
from keras_paragrad.distribution.cluster import Cluster

pytestmark = pytest.mark.fast

ADDRESSES = tuple(f"host{index}:2222" for index in range(3))
LOST = tf.errors.UnavailableError(None, None, "Graph execution error:\n\nCollective ops is aborted by: Socket closed\n")
SILENT = tf.errors.DeadlineExceededError(None, None, "RPC error in CoordinationService/Heartbeat: Deadline Exceeded")
NAMED = tf.errors.UnavailableError(
    None,
    None,
    "{{node on /job:worker/replica:0/task:2/device:CPU:0}} Collective ops is aborted by: The following tasks are "
    "unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:0\nThe tasks have crashed.",
)
OTHER = tf.errors.InternalError(None, None, "Blas SGEMM launch failed")


def cluster(count, rank=0):
    return Cluster({"worker": ADDRESSES[:count]}, "worker", rank, "TF_CONFIG")


@pytest.mark.parametrize("error", [LOST, SILENT], ids=["gone", "silent"])
def test_a_lost_worker_is_named_as_the_likely_cause(error):
    with pytest.raises(WorkerLostError, match=r"Worker 1 of 3 lost") as caught, explained_failures(cluster(3, 1)):
        raise error
    text = str(caught.value)
    assert "lost its connection to one of worker 0 (host0:2222), worker 2 (host2:2222). Most likely" in text
    assert text.endswith(error.message.strip().splitlines()[-1])
    assert caught.value.__cause__ is error


def test_a_worker_that_tensorflow_names_is_named():
    named = pytest.raises(WorkerLostError, match=r"to worker 0 \(host0:2222\)\. Most")
    with named as caught, explained_failures(cluster(3, 1)):
        raise NAMED
    said = "TensorFlow said: Collective ops is aborted by: The following tasks are unhealthy"
    assert said in str(caught.value)


def test_a_long_list_is_cut():
    many = Cluster({"chief": ("c:1",), "worker": tuple(f"w{n}:1" for n in range(20))}, "worker", 0, "TF_CONFIG")
    cut = pytest.raises(WorkerLostError, match=r"one of worker 0 \(c:1\), worker 2 .* 12 more\.")
    with cut, explained_failures(many):
        raise LOST


@pytest.mark.parametrize(
    ("error", "where"),
    [(OTHER, cluster(2)), (LOST, cluster(1)), (LOST, None), (ValueError("Socket closed"), cluster(2))],
    ids=["other", "alone", "no cluster", "not TensorFlow's"],
)
def test_other_errors_stay_as_they_are(error, where):
    with pytest.raises(type(error)) as caught, explained_failures(where):
        raise error
    assert caught.value is error


def compares(dist, model):
    dist.fit(model, np.ones((4, 2)), np.ones((4, 1)))


def reads_data(dist, model):
    dist.dataset(np.ones((4, 2)), np.ones((4, 1)))


def prepares(dist, model):
    dist.prepare(model)


@pytest.mark.parametrize("does", [compares, prepares, reads_data])
def test_a_worker_may_be_lost_before_training_begins(does, monkeypatch):
    """Workers talk to each other as they compare their arguments and open their data."""

    def lost(*args, **options):
        raise LOST

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dist = DistributedFit("none")
    dist.hardware = dataclasses.replace(dist.hardware, cluster=cluster(2))
    monkeypatch.setattr(dist, "_check_consistent", lost)
    monkeypatch.setattr(type(dist._parallelism), "data", lost)
    with pytest.raises(WorkerLostError, match="Worker 0 of 2 lost its connection to worker 1"):
        does(dist, model)
