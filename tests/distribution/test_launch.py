"""`python -m keras_paragrad launch`: processes that start, fail, are told to end, and leave nobody behind."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keras_paragrad.distribution.launch.worlds import Supervision, _Worlds

pytestmark = pytest.mark.fast

# The launcher as it is, in a package whose own import, of TensorFlow, is left out: it takes seconds. With SIGINT as at
# a terminal: a shell has it ignored where the tests run in the background.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "keras-paragrad"
from keras_paragrad.cli.main import main
"""
# What every script begins with. A worker says who it is by a file, for its output is what is tested.
COMMON = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]

def started(*pids):
    with Path("starts").open("a") as file:
        file.write(json.dumps([job, index, config["cluster"], [os.getpid(), *pids]]) + "\\n")

def wait_for(path):
    deadline = time.monotonic() + 20
    while not Path(path).exists():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)

"""
# Whatever is set where the tests run, a script's output is buffered, as is usual.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
SECONDS = 30
RESUMES = "[launch] the same command resumes, from the newest backup"


def said(err: str) -> list[str]:
    """The lines on standard error, without those that say which processes there are."""
    return [line for line in err.splitlines() if not re.match(r"\[launch\] [\w ]+ is process \d+", line)]


class Launcher:
    """Starts the launcher in a directory, and reads what the scripts left there."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.processes = []

    def start(self, script: str, *options: str, words=("train.py",), environment=None, **streams) -> subprocess.Popen:
        (self.directory / "train.py").write_text(COMMON + script)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START + "sys.exit(main())", "launch", *options, *words],
            cwd=self.directory,
            env={**BUFFERED, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.directory), **(environment or {})},
            text=True,
            **streams,
        )
        self.processes.append(process)
        return process

    def run(self, script: str, *options: str, **others) -> tuple[int, list[str], list[str]]:
        """The exit status, the lines of all processes, those of the first on standard output, and the launcher's."""
        process = self.start(script, "--log-dir", "logs", *options, **others)
        out, err = process.communicate(timeout=SECONDS)
        files = sorted((self.directory / "logs").glob("*.log"))
        return process.returncode, "".join([out, *(file.read_text() for file in files)]).splitlines(), said(err)

    def starts(self) -> list:
        """The job, the index, the cluster and the process ids of each start there was."""
        path = self.directory / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_starts(self, count: int) -> None:
        wait_until(lambda: len(self.starts()) >= count)

    def pids(self) -> list[int]:
        return [pid for start in self.starts() for pid in start[3]]


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.processes:
        process.kill()
        process.communicate()
    left = [pid for pid in launcher.pids() if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived their launcher"


def wait_until(holds, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process is there, and not only waits for its parent to notice that it has ended."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_every_worker_gets_its_place_and_the_words(launcher):
    status, out, err = launcher.run("started(); print(sys.argv)", "--workers", "3", words=("train.py", "-m", "--ps"))
    assert (status, out, err) == (0, ["['train.py', '-m', '--ps']"] * 3, [])
    starts = launcher.starts()
    assert sorted(start[:2] for start in starts) == [["worker", index] for index in range(3)]
    cluster = starts[0][2]
    assert all(start[2] == cluster for start in starts)
    assert list(cluster) == ["worker"]
    assert len(set(cluster["worker"])) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in cluster["worker"])


def test_a_module(launcher):
    words = ("-m", "train", "--epochs", "3")
    status, out, err = launcher.run("print(sys.argv[1:], __name__)", "--workers", "1", words=words)
    assert (status, out, err) == (0, ["['--epochs', '3'] __main__"], [])


def test_the_first_prints_here_at_once_and_the_others_to_files(launcher):
    script = """
print("of", index)
print("error of", index, file=sys.stderr)
wait_for("go")
"""
    process = launcher.start(script, "--workers", "2", "--log-dir", "logs")
    assert process.stdout.readline() == "of 0\n"
    path = launcher.directory / "logs" / "worker-1.log"
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) == 2)
    (launcher.directory / "go").touch()
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, said(err)) == (0, "", ["error of 0"])
    assert sorted(path.read_text().splitlines()) == ["error of 1", "of 1"]
    told = dict(re.findall(r"\[launch\] (worker \d) is process \d+(.*)", err))
    assert told == {"worker 0": "", "worker 1": ", and prints to logs/worker-1.log"}


def test_the_launchers_name_is_bold_on_a_terminal(launcher):
    ours, theirs = os.openpty()
    process = launcher.start("", "--workers", "1", stderr=theirs, environment={"TERM": "xterm-256color"})
    os.close(theirs)
    assert process.wait(SECONDS) == 0
    assert os.read(ours, 4096).startswith(b"\x1b[1m[launch]\x1b[0m worker 0 is process")
    os.close(ours)


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("raise ValueError('no')", 1, "exited with status 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was killed by SIGTERM"),
    ],
    ids=["status", "exception", "killed", "terminated"],
)
def test_one_failure_ends_all(launcher, end, status, says):
    script = f"""
def fail(*_):
    sys.exit("Traceback of another")

signal.signal(signal.SIGTERM, fail if index != 1 else signal.SIG_DFL)
started()
if index == 1:
    wait_for("go")
    {end}
time.sleep(60)
"""
    # Longer than the test may take.
    process = launcher.start(script, "--workers", "3", "--grace-seconds", "600")
    launcher.wait_for_starts(3)
    (launcher.directory / "go").touch()
    printed = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == status
    # Python writes the end of its line by itself, and the launcher may write in between.
    assert "Traceback of another" in printed
    err = [line for line in said(printed.replace("Traceback of another", "")) if line]
    stopped = r"stopping worker 0, worker 2: SIGTERM, then SIGKILL after 600 s"
    assert re.fullmatch(rf"\[launch\] worker 1 {says} after \d+(?:\.\d)? s; {stopped}", err[0])
    assert re.fullmatch(r"\[launch\] the end of \S+/worker-1.log:", err[1])
    assert err[-1] == ("ValueError: no" if end.startswith("raise") else err[1])
    assert not any(map(runs, launcher.pids()))


def test_who_does_not_end_in_time_is_killed(launcher):
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
started()
if index == 1:
    wait_for("go")
    sys.exit(5)
time.sleep(60)
"""
    process = launcher.start(script, "--workers", "2", "--grace-seconds", "1.5")
    launcher.wait_for_starts(2)
    (launcher.directory / "go").touch()
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 5
    assert "[launch] worker 0 did not exit within 1.5 s and is killed" in err
    assert not any(map(runs, launcher.pids()))


def test_time_to_save(launcher):
    script = """
def save(*_):
    time.sleep(1)
    Path("saved").touch()
    sys.exit()

signal.signal(signal.SIGTERM, save)
started()
if index == 1:
    wait_for("go")
    sys.exit(5)
time.sleep(60)
"""
    process = launcher.start(script, "--workers", "2")
    launcher.wait_for_starts(2)
    (launcher.directory / "go").touch()
    process.communicate(timeout=SECONDS)
    assert process.returncode == 5
    assert (launcher.directory / "saved").exists()


def test_what_a_worker_leaves_behind_ends_with_it(launcher):
    script = "started(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    assert launcher.run(script, "--workers", "2")[0] == 0
    assert len(launcher.pids()) == 4
    assert not any(map(runs, launcher.pids()))


def test_all_start_again_at_other_ports(launcher):
    script = """
started()
if index == 1 and not Path("failed").exists():
    Path("failed").touch()
    sys.exit(3)
wait_for("failed")
time.sleep(0.5)
print("done")
"""
    status, out, err = launcher.run(script, "--workers", "2", "--max-restarts", "3")
    assert status == 0
    assert out == ["done", "done"]
    assert err[-1] == "[launch] restarting all processes, restart 1 of 3"
    first, second = ({tuple(start[2]["worker"]) for start in starts} for starts in halves(launcher.starts()))
    assert len(first) == len(second) == 1
    assert first != second


def halves(items: list) -> tuple[list, list]:
    return items[: len(items) // 2], items[len(items) // 2 :]


def test_restarts_run_out(launcher):
    status, _, err = launcher.run("started(); sys.exit(index and 4)", "--workers", "2", "--max-restarts", "2")
    assert status == 4
    assert [start[1] for start in launcher.starts()].count(1) == 3
    assert sum("restarting all processes" in line for line in err) == 2


# Trains until there is a file of this name; told to stop, it leaves as after a backup.
TRAINS = """
size = len(config["cluster"]["worker"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
started()
"""


def sizes(starts: list) -> list[int]:
    """The number of workers of each cluster that there was."""
    return [len(cluster) for cluster in dict.fromkeys(tuple(start[2]["worker"]) for start in starts)]


def test_the_workers_that_are_left_go_on(launcher):
    script = TRAINS + "if size == 3 and index == 1: os.kill(os.getpid(), signal.SIGKILL)\nif size == 3: time.sleep(60)"
    devices = {"CUDA_VISIBLE_DEVICES": "3,5,7"}
    script += "\nprint(os.environ['CUDA_VISIBLE_DEVICES'])"
    options = ("--workers", "2:3", "--regrow-seconds", "0", "--devices-per-worker", "1")
    status, out, err = launcher.run(script, *options, environment=devices)
    assert status == 0, err
    assert sizes(launcher.starts()) == [3, 2]
    # Without what the lost one used.
    assert out == ["3", "7"]
    assert err[-1] == "[launch] restarting all processes with 2 workers, restart 1 of 10"


def test_never_fewer_than_the_least(launcher):
    status, _, err = launcher.run(TRAINS + "sys.exit(4)", "--workers", "2:3", "--max-restarts", "2")
    assert (status, sizes(launcher.starts())) == (4, [3, 2, 2]), err


def test_lost_workers_are_started_again(launcher):
    script = (
        TRAINS
        + """
if size == 3 and not Path("lost").exists():
    if index == 1:
        wait_for("go")
        Path("lost").touch()
        sys.exit(3)
    time.sleep(60)
elif size == 2:
    time.sleep(60)
"""
    )
    process = launcher.start(script, "--workers", "2:3", "--regrow-seconds", "1")
    launcher.wait_for_starts(3)
    (launcher.directory / "go").touch()
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert sizes(launcher.starts()) == [3, 2, 3]
    assert "[launch] the workers that were lost are started again: all make a backup, and go on together" in err
    assert said(err)[-1] == "[launch] going on with 3 workers"


@pytest.mark.long
def test_lost_workers_are_not_started_again_for_what_is_done(launcher):
    """A worker has ended well: the others, killed by SIGTERM, would have all begin anew, without backups."""
    script = TRAINS + "if size == 3 and index == 1: sys.exit(3)\nif size == 3: time.sleep(60)\n"
    script += "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nif index == 1: time.sleep(3)"
    status, _, err = launcher.run(script, "--workers", "2:3", "--regrow-seconds", "1.5")
    assert (status, sizes(launcher.starts())) == (0, [3, 2]), err


@pytest.mark.parametrize("losses", [1, 30, 1100])
def test_many_workers_are_lost(losses):
    """The time until they are started again, doubled each time, stays one that a timer can wait for."""
    worlds = _Worlds([], Supervision(1, 2000, 1.0, 60.0), None, queue.SimpleQueue())
    timer = worlds._regrowth(1, losses)
    assert timer.interval == min(60 * 2 ** (losses - 1), 86400)
    timer.cancel()


def test_workers_that_are_killed_by_sigterm_have_failed(launcher):
    """They made no backup to go on from, so that they are not started again without end."""
    script = "started(); os.kill(os.getpid(), signal.SIGTERM)"
    status, _, err = launcher.run(script, "--workers", "2", "--max-restarts", "2")
    assert status == 143
    assert sum("restarting all processes, restart" in line for line in err) == 2


def test_a_worker_that_is_told_to_stop_leaves(launcher):
    process = launcher.start(TRAINS + "if size == 2: time.sleep(60)", "--workers", "1:2", "--regrow-seconds", "0")
    launcher.wait_for_starts(2)
    os.kill(launcher.pids()[0], signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, sizes(launcher.starts())) == (0, [2, 1]), err
    assert said(err)[-1] == "[launch] restarting all processes with 1 worker, as one was told to stop"


def test_a_worker_may_finish_before_the_others(launcher):
    script = "started()\nif index == 0: sys.exit()\ntime.sleep(1)\nprint('last')"
    assert launcher.run(script, "--workers", "2") == (0, ["last"], [])


def test_servers_end_with_the_chief(launcher):
    script = "started()\nif job != 'chief': time.sleep(60)\nwait_for('go')\nprint('done')"
    process = launcher.start(script, "--workers", "2", "--ps", "2")
    launcher.wait_for_starts(5)
    (launcher.directory / "go").touch()
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, said(err)) == (0, "done\n", [])
    counts = {job: len(addresses) for job, addresses in launcher.starts()[0][2].items()}
    assert counts == {"chief": 1, "worker": 2, "ps": 2}
    assert not any(map(runs, launcher.pids()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("saves", [True, False], ids=["saves", "no backup"])
def test_a_signal_has_workers_save_and_end(launcher, number, saves):
    """Ctrl-C too: a backup is made after the running step, and no worker ends with a traceback."""
    script = f"""
def note(*_):
    with Path(f"got{{index}}").open("a") as file:
        file.write("x")
    if {saves}:
        Path(os.environ["KERAS_PARAGRAD_SAVED"]).touch()

signal.signal(signal.SIGTERM, note)
started()
wait_for(f"got{{index}}")
time.sleep(1)
"""
    process = launcher.start(script, "--workers", "2", "--max-restarts", "5")
    launcher.wait_for_starts(2)
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number
    assert [(launcher.directory / f"got{index}").read_text() for index in range(2)] == ["x", "x"]
    received = f"[launch] received {signal.Signals(number).name}; what still runs after 30 s is killed"
    assert said(err) == [received, *([RESUMES] if saves else [])]
    assert len(launcher.starts()) == 2


def test_a_second_interrupt_kills(launcher):
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstarted()\ntime.sleep(60)"
    process = launcher.start(script, "--workers", "2", "--grace-seconds", "60")
    launcher.wait_for_starts(2)
    process.send_signal(signal.SIGINT)
    assert "received SIGINT" in [process.stderr.readline() for _ in range(3)][-1]
    assert all(map(runs, launcher.pids()))
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert not any(map(runs, launcher.pids()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills the children of a killed process")
def test_no_worker_outlives_a_killed_launcher(launcher):
    process = launcher.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstarted()\ntime.sleep(60)", "--workers", "2"
    )
    launcher.wait_for_starts(2)
    pids = launcher.pids()
    assert all(map(runs, pids))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(runs, pids)), seconds=6)


def test_it_ends_when_nobody_reads_on(launcher):
    script = "started()\nwhile True:\n    print('more')\n    time.sleep(0.05)"
    process = launcher.start(script, "--workers", "2")
    launcher.wait_for_starts(2)
    process.stdout.close()
    assert process.wait(SECONDS) == 1
    assert not any(map(runs, launcher.pids()))


def test_it_starts_without_tensorflow():
    code = (
        START
        + "\ntry:\n    main(['launch', '--help'])\nfinally:\n    print({'keras', 'tensorflow'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert finished.stdout.splitlines()[-1] == "set()"
    assert "Start a training script" in finished.stdout


def test_no_more_than_the_end_of_a_file_is_shown(launcher):
    script = "if index == 1:\n    print('\\n'.join(map(str, range(10**5))))\n    sys.exit(3)\ntime.sleep(60)"
    status, _, err = launcher.run(script, "--workers", "2")
    assert (status, err[2:]) == (3, [str(line) for line in range(10**5 - 30, 10**5)])


def test_no_file_is_left_after_a_run_that_went_well(launcher):
    script = """
if index == 1 and not Path("failed").exists():
    Path("failed").touch()
    sys.exit(3)
wait_for("failed")
time.sleep(0.3)
"""
    before = {*launcher.directory.iterdir(), launcher.directory / "failed", launcher.directory / "train.py"}
    process = launcher.start(script, "--workers", "2", "--max-restarts", "1")
    assert process.wait(SECONDS) == 0
    assert {*launcher.directory.iterdir()} == before


def test_what_is_in_the_directory_of_logs_stays(launcher):
    (launcher.directory / "logs").mkdir()
    (launcher.directory / "logs" / "saved").write_text("the user's")
    assert launcher.run("", "--workers", "2")[0] == 0
    assert (launcher.directory / "logs" / "saved").read_text() == "the user's"


def test_a_directory_of_logs_that_cannot_be_is_refused(launcher):
    status, _, err = launcher.run("", "--workers", "2", "--log-dir", "train.py")
    assert status == 1 and len(err) == 1 and "launch: error: " in err[0] and "train.py" in err[0]
