"""Workers meet before TensorFlow starts, or are told on all sides why not."""

import contextlib
import json
import socket
import threading
import time

import pytest

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.messages import LONGEST, MessageSigner
from keras_paragrad.distribution.rendezvous import _describe_cluster, rendezvous

pytestmark = pytest.mark.fast


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
            found[task] = rendezvous(Cluster(jobs, *task, "TF_CONFIG"), seconds, facts(task), {})
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
        assert f"worker 1 ({hosts[1]}) did not connect" in str(error)
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


def port(host):
    return int(host.rpartition(":")[2])


def visit(host, *lines, answer=False):
    """Says something to who listens at an address, once somebody does."""
    for _ in range(200):
        try:
            with socket.create_connection((host.rpartition(":")[0].strip("[]"), port(host)), timeout=2) as stranger:
                for line in lines:
                    stranger.sendall(line)
                return stranger.recv(100) if answer else b""
        except OSError:
            time.sleep(0.02)
    return None


def test_who_was_given_another_cluster_is_turned_away_and_both_say_so():
    hosts, elsewhere = addresses(2), addresses(1)
    found = {}

    def take_part(index, jobs):
        try:
            rendezvous(Cluster(jobs, "worker", index, "TF_CONFIG"), 2, {}, {})
        except ConnectionError as error:
            found[index] = str(error)

    threads = [
        threading.Thread(target=take_part, args=case)
        for case in ((0, {"worker": hosts}), (1, {"worker": (hosts[0], *elsewhere)}))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert f"worker 1 ({hosts[1]}) did not connect" in found[0]
    assert "127.0.0.1 belongs to another run or has another cluster description" in found[0]
    assert "belongs to another run, or has another cluster description" in found[1]


STRAY = (
    b"\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b'{"rank": 1, "facts": {}}\n',
    b'["rank"]\n',
    b"[" * 60_000 + b"\n",
    b"\xff" * 200 + b"\n",
    b"0" * 64 + b' {"rank": 1, "facts": {}}\n',
    b"0" * 1_000_000,
)


def test_strangers_keep_nobody_from_meeting():
    """Whatever they say, and if they say nothing and stay."""
    hosts = addresses(3)
    stayed = []

    def knock():
        for line in STRAY:
            visit(hosts[0], line)
        while not stayed:
            try:
                stayed.extend(socket.create_connection(("127.0.0.1", port(hosts[0])), timeout=2) for _ in range(80))
            except OSError:
                time.sleep(0.02)
        # Only now the others come.
        for rank in (1, 2):
            threading.Thread(target=take_part, args=(rank,)).start()

    found = {}

    def take_part(rank):
        found[rank] = rendezvous(Cluster({"worker": hosts}, "worker", rank, "TF_CONFIG"), 20, {"keras": "3.15"}, {})

    thread = threading.Thread(target=knock)
    thread.start()
    take_part(0)
    thread.join()
    for _ in range(100):
        if len(found) == 3:
            break
        time.sleep(0.05)
    assert found == {0: None, 1: None, 2: None}
    for each in stayed:
        each.close()


def test_workers_of_another_run_are_turned_away():
    """The same addresses, and another token."""
    hosts = addresses(2)
    jobs = {"worker": hosts}
    found = {}

    def take_part(name, rank, token, seconds):
        try:
            rendezvous(Cluster(jobs, "worker", rank, "TF_CONFIG"), seconds, {}, {"KERAS_PARAGRAD_TOKEN": token})
            found[name] = None
        except ConnectionError as error:
            found[name] = str(error)

    cases = (("first", 0, "a", 15), ("old", 1, "b", 1.5))
    threads = [threading.Thread(target=take_part, args=case) for case in cases]
    for thread in threads:
        thread.start()
    threads[1].join(timeout=20)
    assert "cluster description or KERAS_PARAGRAD_TOKEN" in found["old"]
    assert "first" not in found
    take_part("second", 1, "a", 15)
    threads[0].join(timeout=20)
    assert found["first"] is found["second"] is None


def test_the_token_is_not_sent():
    hosts = addresses(2)
    heard = []
    with socket.create_server(("127.0.0.1", port(hosts[0]))) as server:

        def listen():
            connection, _ = server.accept()
            with connection:
                heard.append(connection.recv(65536))
            server.close()

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(ConnectionError):
            rendezvous(Cluster({"worker": hosts}, "worker", 1, "TF_CONFIG"), 1, {}, {"KERAS_PARAGRAD_TOKEN": "secret"})
        thread.join()
    assert heard[0]
    assert b"secret" not in heard[0]


def leader(host, others=(), seconds=3.0):
    """A first worker that waits, in a thread."""

    def wait():
        with contextlib.suppress(ConnectionError):
            rendezvous(Cluster({"worker": (host, *others)}, "worker", 0, "TF_CONFIG"), seconds, {}, {})

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_it_listens_at_its_own_address_alone():
    hosts = addresses(2)
    thread = leader(hosts[0], hosts[1:], seconds=1)
    assert visit(hosts[0], b"\n") is not None
    # Another address of this machine.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port(hosts[0])), timeout=2)
    thread.join()


def test_ipv6_works():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            number = free.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    hosts = (f"[::1]:{number}", *addresses(1))
    found, _ = outcomes({"worker": hosts}, [("worker", 0), ("worker", 1)], 20)
    assert found == [None, None]


def test_a_name_of_this_machine_works():
    hosts = tuple(f"localhost:{port(host)}" for host in addresses(2))
    found, _ = outcomes({"worker": hosts}, [("worker", 0), ("worker", 1)], 20)
    assert found == [None, None]


def test_an_address_of_another_machine_is_said(caplog):
    (host,) = addresses(1)
    thread = leader(f"192.0.2.7:{port(host)}", ["elsewhere:2222"], seconds=0.6)
    assert visit(host, b"\n") is not None
    thread.join()
    assert "listens on port" in caplog.text


def test_a_taken_port_is_said():
    hosts = addresses(2)
    with socket.create_server(("127.0.0.1", port(hosts[0]))):
        (error,), _ = outcomes({"worker": hosts}, [("worker", 0)], 1)
    assert isinstance(error, ConnectionError)
    assert f"can't listen on {hosts[0]}" in str(error)


def test_a_worker_that_left_again_is_not_counted():
    hosts = addresses(3)
    thread_found = {}

    def first():
        (thread_found[0],), _ = outcomes({"worker": hosts}, [("worker", 0)], 2)

    thread = threading.Thread(target=first)
    thread.start()
    cluster = Cluster({"worker": hosts}, "worker", 1, "TF_CONFIG")
    line = MessageSigner.of(cluster, {}).sign({"rank": 1, "facts": {}})
    assert visit(hosts[0], line) is not None
    thread.join()
    assert "worker 1" in str(thread_found[0])
    assert "worker 1 connected and disconnected again" in str(thread_found[0])


def test_the_others_learn_why_the_first_worker_failed(monkeypatch):
    def fail(*_):
        raise RuntimeError("no reason")

    monkeypatch.setattr("keras_paragrad.distribution.rendezvous._compare_facts", fail)
    hosts = addresses(2)
    found = {}

    def second():
        (found[1],), _ = outcomes({"worker": hosts}, [("worker", 1)], 10)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(RuntimeError):
        rendezvous(Cluster({"worker": hosts}, "worker", 0, "TF_CONFIG"), 10, {}, {})
    thread.join()
    assert "RuntimeError: no reason" in str(found[1])


def test_a_large_cluster_fits_into_a_message():
    hosts = tuple(f"node{number:05}.cluster.example.org:2222" for number in range(5000))
    description = _describe_cluster(Cluster({"worker": hosts}, "worker", 1, "TF_CONFIG"))
    assert len(json.dumps(description)) < LONGEST
    assert description != _describe_cluster(Cluster({"worker": hosts[1:]}, "worker", 1, "TF_CONFIG"))


def test_messages_are_bounded():
    with pytest.raises(ValueError, match="bytes"):
        MessageSigner(b"key").sign({"rank": 1, "facts": {"text": "a" * LONGEST}})
