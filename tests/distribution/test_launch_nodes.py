"""Launchers of several machines, by addresses of loopback and in network namespaces: they meet, and end together."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keras_paragrad.cli.main import main

pytestmark = pytest.mark.fast

TOKEN = "0123456789abcdef"
# With SIGINT as at a terminal: a shell has it ignored where the tests run in the background.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "keras-paragrad"
from keras_paragrad.cli.main import main
sys.exit(main())
"""
# What every script begins with: who it is, and its process, in a file.
COMMON = """
import json, os, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
with Path("starts").open("a") as file:
    file.write(json.dumps([index, config["cluster"], os.getpid(), os.environ["KERAS_PARAGRAD_TOKEN"]]) + "\\n")

def wait_for(path):
    deadline = time.monotonic() + 20
    while not Path(path).exists():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)

"""
SECONDS = 120


def runs(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def wait_until(holds, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


class Machines:
    """Launchers in one directory, the first of them at 127.0.0.2, the second at 127.0.0.3."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.processes = []
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self.rendezvous = f"127.0.0.2:{free.getsockname()[1]}"

    def script(self, text: str) -> None:
        (self.directory / "train.py").write_text(COMMON + text)

    def start(self, rank: int, *options: str, nodes: int | str = 2, token: str | None = TOKEN, before: str = ""):
        words = [f"--nodes={nodes}", f"--node-rank={rank}", f"--rendezvous={self.rendezvous}"]
        words += [f"--node-address=127.0.0.{2 + rank}", *options, "train.py"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.directory)}
        environment.pop("KERAS_PARAGRAD_TOKEN", None)
        environment |= {"KERAS_PARAGRAD_TOKEN": token} if token else {}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", before + START, "launch", *words],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def starts(self) -> list:
        path = self.directory / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path)
    yield machines
    for process in machines.processes:
        process.kill()
        process.communicate()
    pids = [start[2] for start in machines.starts()]
    # The workers of a killed launcher end with it.
    deadline = time.monotonic() + 5
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived their launcher"


def said(err):
    """The lines on standard error, without those that say which processes there are."""
    return [line for line in err.splitlines() if not re.match(r"\[launch\] [\w ]+ is process \d+", line)]


def ended(*processes):
    """The status and the lines on standard error of each."""
    found = []
    for process in processes:
        err = process.communicate(timeout=SECONDS)[1]
        found.append((process.returncode, said(err)))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first node first", "last node first"])
def test_machines_meet_in_any_order(machines, order):
    machines.script("print('I am', index)")
    started = {}
    for rank in order:
        started[rank] = machines.start(rank, f"--workers-per-node={rank + 1}", "--grace-seconds=1")
        assert started[rank].stderr.readline().startswith(f"[launch] node {rank} ")
    out = {rank: process.communicate(timeout=SECONDS) for rank, process in started.items()}
    assert [started[rank].returncode for rank in (0, 1)] == [0, 0], out
    assert [out[rank][0] for rank in (0, 1)] == ["I am 0\n", "I am 1\n"]
    for _, err in out.values():
        assert said(err)[-1] == "[launch] all 2 nodes have joined, with 3 workers"
    starts = machines.starts()
    assert sorted(start[0] for start in starts) == [0, 1, 2]
    (cluster,) = {json.dumps(start[1]) for start in starts}
    hosts = [address.rpartition(":")[0] for address in json.loads(cluster)["worker"]]
    assert hosts == ["127.0.0.2", "127.0.0.3", "127.0.0.3"]
    # Of the run, and not what the machines share.
    (token,) = {start[3] for start in starts}
    assert TOKEN not in token and len(token) == 64


@pytest.mark.not_fast
def test_a_node_that_does_not_come_is_named_on_all_that_have(machines):
    machines.script("")
    found = ended(*(machines.start(rank, "--startup-timeout=5", nodes=3) for rank in (0, 2)))
    for status, err in found:
        assert status == 1
        assert err[-1].startswith("keras-paragrad launch: error: node 1 did not join at 127.0.0.2:")
        assert "within 5 s. Start the same command there, with its --node-rank and the same token" in err[-1]
    assert any(re.fullmatch(r"\[launch\] node 0 waits at \S+ for node 1", line) for line in found[0][1])
    assert machines.starts() == []


def test_a_first_node_that_is_not_there_is_named(machines):
    machines.script("")
    ((status, err),) = ended(machines.start(1, "--startup-timeout=1"))
    assert status == 1
    assert err[-1].startswith("keras-paragrad launch: error: Node 1 could not reach node 0 at 127.0.0.2:")
    assert "Connection refused" in err[-1] and "--node-rank 0" in err[-1]


FAILS = "wait_for('go')\nif index == 1:\n    sys.exit(7)\ntime.sleep(60)"


@pytest.mark.few(1)
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_failure_on_one_ends_all_with_its_status(machines, nodes):
    machines.script(FAILS)
    started = [machines.start(rank, "--grace-seconds=5", nodes=nodes) for rank in range(nodes)]
    wait_until(lambda: len(machines.starts()) == nodes)
    (machines.directory / "go").touch()
    for rank, (status, err) in enumerate(ended(*started)):
        assert status == 7, err
        said = "\n".join(err)
        assert (
            "[launch] worker 1 exited with status 7" if rank == 1 else "[launch] node 1: worker 1 exited with"
        ) in said
        assert "stopping" not in said or f"stopping worker {rank}" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_ends_all(machines, rank):
    machines.script("time.sleep(60)")
    started = [machines.start(each) for each in range(2)]
    wait_until(lambda: len(machines.starts()) == 2)
    started[rank].send_signal(signal.SIGTERM)
    found = ended(*started)
    assert [status for status, _ in found] == [143, 143]
    assert any(line.startswith(f"[launch] node {rank}: received SIGTERM; stopping") for line in found[1 - rank][1])


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_node_ends_the_others(machines, rank):
    machines.script("time.sleep(60)")
    started = [machines.start(each) for each in range(2)]
    wait_until(lambda: len(machines.starts()) == 2)
    started[rank].kill()
    ((status, err),) = ended(started[1 - rank])
    assert status == 1
    assert any(line.startswith(f"[launch] node {rank}: was lost: its launcher was killed") for line in err)


def test_the_first_waits_for_all_and_hears_of_a_late_failure(machines):
    machines.script("if index:\n    wait_for('go')\n    sys.exit(5)")
    started = [machines.start(rank) for rank in range(2)]
    wait_until(lambda: len(machines.starts()) == 2)
    time.sleep(0.5)
    assert started[0].poll() is None
    (machines.directory / "go").touch()
    (first, err), (second, _) = ended(*started)
    assert (first, second) == (5, 5)
    assert any(line.startswith("[launch] node 1: worker 1 exited with status 5") for line in err)


# Told to stop, it leaves as after a backup; it is done when there is a file `done`.
TRAINS = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
while not Path("done").exists():
    time.sleep(0.02)
"""


class Worlds:
    """Machines whose number changes, and the clusters that their workers have been in."""

    def __init__(self, machines, nodes: str):
        self.machines, self.nodes, self.launchers = machines, nodes, {}
        machines.script(TRAINS)

    def start(self, *ranks: int, wait: int = 30) -> None:
        for rank in ranks:
            options = (f"--wait={wait}", "--grace-seconds=5", "--max-restarts=5")
            self.launchers[rank] = self.machines.start(rank, *options, nodes=self.nodes)

    def hosts(self) -> list[list[str]]:
        """The last number of the addresses of each cluster whose workers have all started, in order."""
        starts = self.machines.starts()
        clusters = dict.fromkeys(tuple(start[1]["worker"]) for start in starts)
        counts = [sum(tuple(start[1]["worker"]) == cluster for start in starts) for cluster in clusters]
        return [
            [address.partition(":")[0][-1] for address in cluster]
            for cluster, count in zip(clusters, counts, strict=True)
            if count == len(cluster)
        ]

    def wait_for(self, *hosts: str) -> None:
        wait_until(lambda: self.hosts() and self.hosts()[-1] == list(hosts))

    def end(self) -> dict[int, tuple[int, list[str]]]:
        (self.machines.directory / "done").touch()
        return dict(zip(self.launchers, ended(*self.launchers.values()), strict=True))


def test_machines_come_and_go(machines):
    worlds = Worlds(machines, "1:3")
    worlds.start(0, 1)
    worlds.wait_for("2", "3")
    # One more comes while the others train.
    worlds.start(2)
    worlds.wait_for("2", "3", "4")
    # One is lost, and comes again.
    lost = worlds.launchers.pop(1)
    lost.kill()
    worlds.wait_for("2", "4")
    worlds.start(1)
    worlds.wait_for("2", "3", "4")
    # One is told to leave.
    leaves = worlds.launchers.pop(2)
    leaves.terminate()
    worlds.wait_for("2", "3")
    ((status, said),) = ended(leaves)
    assert status == 143, said
    found = worlds.end()
    assert [status for status, _ in found.values()] == [0, 0], found
    err = "\n".join(found[0][1])
    assert "[launch] node 2 joined: all make a backup, and go on together" in err
    assert "[launch] node 1: was lost" in err
    assert "[launch] restarting all processes, restart 1 of 5" in err
    assert "[launch] restarting all processes, as one was told to stop" in err
    assert err.count("[launch] all 3 nodes have joined, with 3 workers") == 2
    assert err.count("[launch] nodes 0, 1 have joined, with 2 workers") == 2


def test_the_first_machine_comes_again(machines):
    worlds = Worlds(machines, "2")
    worlds.start(0, 1)
    worlds.wait_for("2", "3")
    before = len(worlds.hosts())
    worlds.launchers.pop(0).kill()
    wait_until(lambda: "waits for node 0" in worlds.launchers[1].stderr.readline())
    worlds.start(0)
    wait_until(lambda: len(worlds.hosts()) > before)
    assert [status for status, _ in worlds.end().values()] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_too_few_machines_are_left(machines, lost):
    worlds = Worlds(machines, "2:3")
    worlds.start(0, 1, wait=1)
    worlds.wait_for("2", "3")
    worlds.launchers.pop(lost).kill()
    ((status, err),) = ended(*worlds.launchers.values())
    assert status == 75
    said = "\n".join(err)
    assert "[launch] too few nodes are left: " in said
    assert "--wait 3600" in said


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_first_waits_for_the_others(machines, number):
    """Its own workers are done; the signal ends it, and isn't taken for a failure after which all begin again."""
    machines.script("if index:\n    wait_for('go')")
    first, second = [machines.start(rank, "--max-restarts=3", "--wait=1") for rank in range(2)]
    wait_until(lambda: len(machines.starts()) == 2)
    time.sleep(0.5)
    first.send_signal(number)
    ((status, err),) = ended(first)
    assert status == 128 + number, err
    assert not any("restarting" in line for line in err)
    assert ended(second)[0][0] == 75


def test_a_status_of_75_is_a_failure(machines):
    machines.script("if index:\n    wait_for('go')\n    sys.exit(75)\nwait_for('ends')")
    started = [machines.start(rank, "--max-restarts=1") for rank in range(2)]
    (machines.directory / "go").touch()
    for status, err in ended(*started):
        assert status == 75, err
        assert any("restart 1 of 1" in line for line in err)
    assert sum(start[0] == 1 for start in machines.starts()) == 2


def test_the_first_hears_of_a_status_of_75(machines):
    machines.script("if index:\n    wait_for('go')\n    sys.exit(75)")
    started = [machines.start(rank) for rank in range(2)]
    wait_until(lambda: len(machines.starts()) == 2)
    time.sleep(0.5)
    (machines.directory / "go").touch()
    assert [status for status, _ in ended(*started)] == [75, 75]


@pytest.mark.long
def test_a_machine_with_other_options_comes_late(machines):
    """It is refused alone; the others train on."""
    worlds = Worlds(machines, "1:3")
    worlds.start(0, 1)
    worlds.wait_for("2", "3")
    ((status, err),) = ended(machines.start(2, nodes="1:4"))
    assert status == 2
    assert err[-1].endswith("Node 0 has --nodes 1:3, and node 2 1:4. Start all machines with the same.")
    found = worlds.end()
    assert [status for status, _ in found.values()] == [0, 0], found
    assert len(machines.starts()) == 2


@pytest.mark.long
def test_a_machine_that_comes_when_another_is_done(machines):
    """There is nothing left to go on with: backups are removed, and all would begin anew."""
    machines.script("if index:\n    wait_for('go')")
    started = [machines.start(rank, nodes="1:3") for rank in range(2)]
    wait_until(lambda: len(machines.starts()) == 2)
    time.sleep(0.5)
    late = machines.start(2, "--startup-timeout=1", nodes="1:3")
    assert "has reached" in late.stderr.readline()
    time.sleep(0.5)
    (machines.directory / "go").touch()
    found = ended(*started, late)
    assert [status for status, _ in found] == [0, 0, 1], found
    assert len(machines.starts()) == 2


# Told to stop, it takes a second to make a backup.
STOPS = """
import signal
def stop(*_):
    Path("told").touch()
    time.sleep(1)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
Path(f"ready{index}").touch()
while not Path("done").exists():
    time.sleep(0.02)
"""


@pytest.mark.long
def test_a_signal_while_all_make_a_backup(machines):
    """The launcher's status is that of the signal, though its workers were told to stop for another reason."""
    machines.script(STOPS)
    first = machines.start(0, nodes="1:2")
    wait_until((machines.directory / "ready0").exists)
    second = machines.start(1, "--startup-timeout=1", nodes="1:2")
    wait_until((machines.directory / "told").exists)
    first.send_signal(signal.SIGTERM)
    ((status, err),) = ended(first)
    assert status == 143, err
    assert ended(second)[0][0] == 1


@pytest.mark.long
def test_a_machine_that_ends_first_is_waited_for(machines):
    """It has not gone, though it has closed its connection and takes a moment to come again."""
    machines.script(STOPS.replace("time.sleep(1)", "time.sleep(1 - index)"))
    slow = "import time; from keras_paragrad.distribution.launch import nodes; join = nodes.join; times = []; "
    slow += (
        "nodes.join = lambda *words, **named: (times and time.sleep(2), times.append(1), join(*words, **named))[2]; "
    )
    started = {0: machines.start(0, nodes="2:3"), 1: machines.start(1, nodes="2:3", before=slow)}
    wait_until(lambda: (machines.directory / "ready0").exists() and (machines.directory / "ready1").exists())
    started[2] = machines.start(2, nodes="2:3")
    wait_until(lambda: len(machines.starts()) >= 4)
    time.sleep(3)
    (machines.directory / "done").touch()
    found = ended(*started.values())
    assert [status for status, _ in found] == [0, 0, 0], found
    assert not any("nodes 0, 2 have joined" in line for line in found[0][1])
    assert len(machines.starts()) == 5


def test_a_signal_while_waiting(machines):
    machines.script("")
    process = machines.start(0)
    assert "waits at" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert ended(process) == [(130, ["[launch] received SIGINT before all nodes had come"])]


def test_two_machines_of_one_rank(machines):
    """The second is told, and the first is still counted."""
    machines.script("")
    first, one = machines.start(0, nodes=3), machines.start(1, nodes=3)
    wait_until(lambda: "has reached" in one.stderr.readline())
    ((status, err),) = ended(machines.start(1, nodes=3))
    assert status == 2
    assert err[-1].endswith("Node 1 has already joined, from 127.0.0.3. Give each machine its own --node-rank, from 0.")
    found = ended(first, one, machines.start(2, nodes=3))
    assert [status for status, _ in found] == [0, 0, 0]


@pytest.mark.long
@pytest.mark.not_fast
def test_another_token(machines):
    machines.script("")
    first = machines.start(0, "--startup-timeout=6")
    assert "waits at" in first.stderr.readline()
    ((status, err),) = ended(machines.start(1, "--startup-timeout=1.5", token="another" * 3))
    assert status == 1 and "the listener there has a different token" in err[-1]
    ((status, err),) = ended(first)
    assert status == 1
    assert "node 1 did not join" in err[-1] and "a connection from 127.0.0.3 has a different token" in err[-1]


def test_other_options(machines):
    machines.script("")
    found = ended(machines.start(0, nodes=2), machines.start(1, nodes=3))
    for status, err in found:
        assert status == 2
        assert err[-1].endswith("Node 0 has --nodes 2, and node 1 3. Start all machines with the same.")


def test_a_token_file(machines):
    machines.script("")
    (machines.directory / "token").write_text(f"{TOKEN}\n")
    found = ended(machines.start(0, "--token-file=token", token="x" * 16), machines.start(1))
    assert [status for status, _ in found] == [0, 0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nodes 2 train.py", "--nodes needs the rank of this machine, from 0, and the address of node 0"),
        ("--node-rank 1 train.py", "--node-rank is for several machines. Add --nodes N"),
        ("--workers 2 --token-file token train.py", "--token-file is for several machines"),
        ("--nodes 2 --node-rank 2 --rendezvous a:1 train.py", "--node-rank is 2, and must be from 0 to 1."),
        ("--nodes 2 --node-rank 0 --rendezvous a train.py", "'a' is not a host and a port"),
        ("--nodes 2 --node-rank 0 --rendezvous a:99999 train.py", "is not a host and a port"),
        ("--nodes 2 --node-rank 0 --rendezvous a:1 --workers 2 train.py", "Write --workers-per-node N."),
        ("--nodes 2 --node-rank 0 --rendezvous a:1 --ps 1 train.py", "--ps is for one machine."),
        ("--nodes 2:1 --node-rank 0 --rendezvous a:1 train.py", "the least comes first, as in 1:2"),
        (
            "--nodes 1:2 --node-rank 0 --rendezvous a:1 --regrow-seconds 1 train.py",
            "--regrow-seconds is for one machine.",
        ),
        ("--nodes 2 --node-rank 0 --rendezvous a:1 train.py", "KERAS_PARAGRAD_TOKEN is not set"),
        ("--nodes 2 --node-rank 0 --rendezvous a:1 --token-file empty train.py", "empty is empty"),
        ("--nodes 2 --node-rank 0 --rendezvous a:1 --token-file nowhere train.py", "can't be read from 'nowhere'"),
        ("--nodes 0 train.py", "--nodes: expected an integer from 1 to 1024"),
        ("--node train.py", "Did you mean `--nodes`?"),
    ],
)
def test_wrong_words(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KERAS_PARAGRAD_TOKEN", raising=False)
    for name in ("train.py", "empty", "token"):
        (tmp_path / name).touch()
    try:
        status = main(["launch", *words.split()])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert says in capsys.readouterr().err


def test_a_short_token(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("KERAS_PARAGRAD_TOKEN", "secret")
    words = "--nodes 1 --node-rank 0 --rendezvous 127.0.0.1:2000 train.py"
    assert main(["launch", *words.split()]) == 2
    said = capsys.readouterr().err
    assert "KERAS_PARAGRAD_TOKEN has 6 characters" in said and "openssl rand -hex 16 > token" in said
    assert "secret" not in said


# Two namespaces, joined by a cable; CUT takes it out.
NAMESPACES = """
set -e
unshare -n sleep 100 & one=$!
unshare -n sleep 100 & other=$!
trap 'kill $one $other' EXIT
until [ "$(readlink /proc/$one/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add cable netns $one type veth peer name cable netns $other
nsenter -t $one -n sh -c 'ip link set lo up; ip addr add 10.98.7.1/24 dev cable; ip link set cable up'
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.98.7.2/24 dev cable; ip link set cable up'
if [ -n "$PROBE" ]; then exit 0; fi
nsenter -t $other -n $LAUNCH --node-rank 1 train.py >other.out 2>other.err & theirs=$!
nsenter -t $one -n $LAUNCH --node-rank 0 train.py >one.out 2>one.err & ours=$!
if [ -n "$CUT" ]; then
    until [ -e starts ] && [ "$(wc -l < starts)" = 2 ]; do sleep 0.1; done
    nsenter -t $one -n ip link set cable down
fi
set +e
wait $ours; echo $? > one.status
wait $theirs; echo $? > other.status
"""


def in_namespaces(directory, seconds, **environment):
    launch = [sys.executable, "-P", "-c", "LAUNCH", "launch", "--nodes", "2", "--rendezvous", "10.98.7.1:29500"]
    starter = directory / "start.py"
    starter.write_text(START)
    launch[2:4] = [str(starter)]
    environment = {**os.environ, "LAUNCH": shlex.join(launch), "KERAS_PARAGRAD_TOKEN": TOKEN, **environment}
    # Whatever it has started ends with it.
    alone = ["--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["unshare", "-rn", *alone, "bash", "-c", NAMESPACES]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.fixture
def namespaces(tmp_path):
    try:
        failed = in_namespaces(tmp_path, 20, PROBE="1")
        why = failed.stderr if failed.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        pytest.skip(f"no network namespaces can be made here: {why.strip()[:200]}")
    (tmp_path / "train.py").write_text(COMMON)
    return tmp_path


def test_machines_with_networks_of_their_own(namespaces):
    """They find out their own addresses."""
    done = in_namespaces(namespaces, SECONDS)
    read = {name: (namespaces / name).read_text() for name in ("one.err", "other.err", "one.status", "other.status")}
    assert (read["one.status"], read["other.status"]) == ("0\n", "0\n"), (read, done.stderr)
    starts = [json.loads(line) for line in (namespaces / "starts").read_text().splitlines()]
    (cluster,) = {json.dumps(start[1]) for start in starts}
    hosts = [address.rpartition(":")[0] for address in json.loads(cluster)["worker"]]
    assert hosts == ["10.98.7.1", "10.98.7.2"]


@pytest.mark.long
def test_a_machine_whose_network_fails_is_given_up(namespaces):
    (namespaces / "train.py").write_text(COMMON + "time.sleep(90)")
    began = time.monotonic()
    in_namespaces(namespaces, 90, CUT="1")
    assert time.monotonic() - began < 60
    for name, other in (("one", 1), ("other", 0)):
        assert (namespaces / f"{name}.status").read_text() == "1\n"
        assert f"[launch] node {other}: was lost: " in (namespaces / f"{name}.err").read_text()
