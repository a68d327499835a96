"""Workers meet before TensorFlow starts, or are told on all sides why not."""

import socket
import threading
import time

import pytest

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.meeting import meet


def addresses(count):
    """Addresses where nothing listens."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return tuple(f"127.0.0.1:{port}" for port in ports)


def outcomes(jobs, tasks, seconds, facts=lambda task: {"keras": "3.15"}):
    """What the meeting came to for each of the tasks that take part, and when the last was done."""
    found = {}

    def take_part(task):
        try:
            found[task] = meet(Cluster(jobs, *task, "TF_CONFIG"), seconds, facts(task))
        except (ConnectionError, ValueError) as error:
            found[task] = error

    threads = [threading.Thread(target=take_part, args=(task,)) for task in tasks]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [found[task] for task in tasks], time.monotonic() - began


@pytest.mark.parametrize("chief", [False, True], ids=["workers", "chief and workers"])
def test_all_who_come_in_time_go_on(chief):
    hosts = addresses(3)
    jobs = {"chief": hosts[:1], "worker": hosts[1:]} if chief else {"worker": hosts}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1)] if chief else [("worker", index) for index in range(3)]
    found, took = outcomes(jobs, tasks, 20)
    assert found == [None] * 3
    assert took < 10
    with socket.create_server(("127.0.0.1", int(hosts[0].rpartition(":")[2]))):
        pass  # The port is free again, for TensorFlow.


def test_those_who_came_learn_who_did_not():
    hosts = addresses(3)
    found, took = outcomes({"worker": hosts}, [("worker", 0), ("worker", 2)], 2)
    for error in found:
        assert isinstance(error, ConnectionError)
        assert f"worker 1 ({hosts[1]}) did not come" in str(error)
        assert "startup_timeout=600" in str(error)
    assert took < 12


def test_a_first_worker_that_is_not_there_is_named():
    hosts = addresses(2)
    (error,), took = outcomes({"worker": hosts}, [("worker", 1)], 2)
    assert f"at {hosts[0]}" in str(error)
    assert "refused" in str(error)
    assert took < 10


def test_other_versions_are_refused_on_every_worker():
    found, _ = outcomes(
        {"worker": addresses(2)}, [("worker", 0), ("worker", 1)], 20, lambda task: {"keras": f"3.{task[1]}"}
    )
    for error in found:
        assert isinstance(error, ValueError)
        assert "worker 0 has keras 3.0, and worker 1 3.1" in str(error)


def test_other_clusters_are_refused_on_every_worker():
    hosts, elsewhere = addresses(2), addresses(1)
    found = {}

    def take_part(index, jobs):
        try:
            meet(Cluster(jobs, "worker", index, "TF_CONFIG"), 20, {})
        except ValueError as error:
            found[index] = str(error)

    threads = [
        threading.Thread(target=take_part, args=case)
        for case in ((0, {"worker": hosts}), (1, {"worker": (hosts[0], *elsewhere)}))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found[0] == found[1]
    assert elsewhere[0] in found[0]


def test_strangers_are_not_counted():
    hosts = addresses(2)
    stop = threading.Event()

    def knock():
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", int(hosts[0].rpartition(":")[2])), timeout=1) as stranger:
                    stranger.sendall(b'GET / HTTP/1.1\r\n["rank"]\n')
                return
            except OSError:
                time.sleep(0.05)

    thread = threading.Thread(target=knock)
    thread.start()
    found, _ = outcomes({"worker": hosts}, [("worker", 0)], 2)
    stop.set()
    thread.join()
    assert isinstance(found[0], ConnectionError)
