"""Where the launcher's processes are: on this machine, or tasks that a scheduler made."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from runner import forked_scripts, own_process

from keras_paragrad.cli.main import main
from keras_paragrad.distribution.cluster import find_cluster
from keras_paragrad.distribution.launch.tasks import HOST, Layout, free_ports

pytestmark = pytest.mark.fast

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
KUBERNETES = {
    "KERAS_PARAGRAD_WORKERS": "2",
    "KERAS_PARAGRAD_SERVICE": "train",
    "HOSTNAME": "train-1",
    "JOB_COMPLETION_INDEX": "1",
}
TWO = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
START = """
import sys
sys.argv[0] = "keras-paragrad"
from keras_paragrad.cli.main import main
sys.exit(main())
"""


def launched(directory, script, environment, *options):
    (directory / "train.py").write_text(f"import json, os, signal, sys\n{script}\n")
    return subprocess.run(
        [sys.executable, "-P", "-c", START, "launch", *options, "train.py", "--epochs", "3"],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "hosts", "source"),
    [
        (SLURM, ["node1", "node2"], "Slurm"),
        (KUBERNETES, ["train-0.train", "train-1.train"], "Kubernetes"),
        ({"TF_CONFIG": json.dumps(TWO)}, ["a", "b"], "TF_CONFIG"),
    ],
    ids=["Slurm", "Kubernetes", "TF_CONFIG"],
)
def test_a_task_of_a_job_becomes_its_process(tmp_path, environment, hosts, source):
    script = "print(json.dumps([json.loads(os.environ['TF_CONFIG']), sys.argv])); sys.exit(4)"
    finished = launched(tmp_path, script, environment, "--max-restarts", "2")
    assert finished.returncode == 4, finished.stderr
    config, words = json.loads(finished.stdout)
    assert [address.split(":")[0] for address in config["cluster"]["worker"]] == hosts
    assert config["task"] == {"type": "worker", "index": 1}
    assert words == ["train.py", "--epochs", "3"]
    assert finished.stderr == (
        f"launch: worker 1 of the cluster described by {source}; restarts are left to the scheduler. --max-restarts "
        "has no effect here.\n"
    )


def test_the_scheduler_sees_the_signal_itself(tmp_path):
    finished = launched(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", SLURM)
    assert finished.returncode == -signal.SIGKILL


def test_workers_here_where_the_cluster_is_this_process_alone(tmp_path):
    alone = {**SLURM, "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    alone |= {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    finished = launched(tmp_path, "print(json.loads(os.environ['TF_CONFIG'])['task'])", alone, "--workers", "2")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "{'type': 'worker', 'index': 0}\n" and HOST not in finished.stdout


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return monkeypatch


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        ("", {}, "No script is given"),
        ("--workers 2", {}, "launch --workers 2 train.py"),
        ("--workers 2 nowhere.py", {}, "There is no script 'nowhere.py' in "),
        ("--workers 2 folder", {}, "There is no script 'folder' in "),
        ("--workers 2 -m", {}, "-m needs a module name"),
        ("--workers 2 -m nowhere.train", {}, "There is no module named 'nowhere.train'"),
        ("--workers 0 train.py", {}, "--workers: expected an integer from 1 to 1024, got '0'"),
        ("--workers two train.py", {}, "--workers: expected an integer from 1 to 1024, got 'two'"),
        ("--workers 2 --max-restarts -1 train.py", {}, "--max-restarts"),
        ("--workers 2 --grace-seconds -1 train.py", {}, "--grace-seconds"),
        ("--workers 2 --grace-seconds nan train.py", {}, "expected a finite number from 0 to 86400, got 'nan'"),
        ("--workers 2 --port-base 80 train.py", {}, "--port-base: expected an integer from 1024 to 65535"),
        ("--workers 2 --port-base 65535 train.py", {}, "free ports from 65535 up, but 2 are needed"),
        ("train.py", {}, "Write --workers N for N workers on this machine"),
        ("--ps 1 train.py", {}, "--ps is for a cluster on this machine. Add --workers N"),
        ("--ps 1 train.py", SLURM, "--ps is for a cluster on this machine"),
        ("--workers 2 train.py", SLURM, "This process is worker 1 of a cluster described by Slurm"),
        ("train.py", {"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
        (
            "--workers 2 --devices-per-worker 2 train.py",
            {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            "2 workers with 2 GPUs each need 4, but CUDA_VISIBLE_DEVICES lists 3: 0,1,2",
        ),
    ],
    ids=[
        "nothing", "no script", "script not found", "folder", "no module", "module not found", "no workers",
        "workers no number", "restarts", "grace", "grace no number", "port", "ports", "no cluster", "servers alone",
        "servers in a job", "workers in a job", "TF_CONFIG", "devices",
    ],
)  # fmt: skip
def test_wrong_words(here, capsys, words, environment, says):
    for name, value in environment.items():
        here.setenv(name, value)
    try:
        status = main(["launch", *words.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert says in capsys.readouterr().err


def test_every_command_has_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.search(r"launch +Start a training script", capsys.readouterr().out)


def test_a_script_after_two_dashes(here):
    assert main(["launch", "--workers", "1", "--", "train.py"]) == 0


def test_ports_are_free_and_different():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        first = taken.getsockname()[1]
        ports = free_ports(3, first)
        assert len(set(ports)) == 3
        assert min(ports) > first


def visible(environment, **options):
    return [task.environment.get("CUDA_VISIBLE_DEVICES") for task in Layout(**options).tasks(environment)]


def test_each_worker_sees_its_share_of_the_devices():
    assert visible({}, workers=2) == [None, None]
    assert visible({}, workers=2, devices=2) == ["0,1", "2,3"]
    assert visible({"CUDA_VISIBLE_DEVICES": "5,7,9"}, workers=3, devices=1) == ["5", "7", "9"]
    assert visible({}, workers=2, servers=1, devices=1) == ["-1", "0", "1", "-1"]


@pytest.mark.parametrize("name", ["PYTHONUNBUFFERED", "TF_CPP_MIN_LOG_LEVEL"])
def test_what_is_set_for_output_stays(name):
    assert [task.environment[name] for task in Layout(1).tasks({name: "0"})] == ["0"]
    assert [task.environment[name] for task in Layout(1).tasks({})] == ["1"]


CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def test_the_manifest_gives_each_pod_its_place():
    manifest = (CLUSTER / "kubernetes.yaml").read_text()
    variables = dict(re.findall(r'- name: ([A-Z_]+)\n +value: "(.*)"', manifest))
    count = int(re.search(r"\n  completions: (\d+)", manifest)[1])
    assert f"parallelism: {count}" in manifest
    service, job = re.findall(r"kind: (?:Service|Job)\nmetadata:\n  name: (\S+)", manifest)
    assert f"subdomain: {service}\n" in manifest
    assert f"job-name: {job}\n" in manifest
    places = [
        find_cluster({**variables, "HOSTNAME": f"{job}-{index}", "JOB_COMPLETION_INDEX": str(index)})
        for index in range(count)
    ]
    port = re.search(r"containerPort: (\d+)", manifest)[1]
    expected = tuple(f"{job}-{index}.{service}:{port}" for index in range(count))
    assert [place.index for place in places] == list(range(count))
    assert all(place.jobs == {"worker": expected} for place in places)


@pytest.mark.parametrize(("failures", "status"), [(0, 0), (2, 0), (3, 1)])
def test_the_batch_file_starts_a_step_again(tmp_path, failures, status):
    commands = {
        "srun": 'shift 3; echo "$@" >> steps; "$@"',
        "python": f"[ $(wc -l < steps) -gt {failures} ]",
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    finished = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sbatch")],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"},
        stderr=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    assert finished.returncode == status
    steps = (tmp_path / "steps").read_text().splitlines()
    assert steps == ["python -m keras_paragrad launch train.py --backups backups/7"] * min(failures + 1, 3)


def test_what_the_files_start_is_there_and_takes_their_words():
    """The script beside them, by the words after `launch`; and GPUs are asked for where there may be some."""
    batch, manifest = ((CLUSTER / name).read_text() for name in ("slurm.sbatch", "kubernetes.yaml"))
    assert re.search(r"^#SBATCH --gpus-per-node=\d", batch, re.MULTILINE)
    started = [batch.partition("launch ")[2].split()[:2], re.findall(r'"launch", "(.*?)", "(.*?)"', manifest)[0]]
    for script, option in started:
        assert f'add_argument("{option}"' in (CLUSTER / script).read_text()


@pytest.mark.long
@pytest.mark.own_process(seconds=200)
def test_the_example_backs_up_and_goes_on(tmp_path):
    printed = tmp_path / "printed"

    def started(epochs):
        words = ["--backups", str(tmp_path / "backups"), "--epochs", str(epochs)]
        script = str(CLUSTER / "train.py"), words, str(tmp_path)
        return own_process.start(forked_scripts.run_script, script, {}, printed)

    process = started(9999)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("backups/*.backup")):
            assert process.exitcode is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.terminate()
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 143, printed.read_text()
    (backup, *_) = sorted(tmp_path.glob("backups/*.backup"), reverse=True)
    epoch = int(backup.name.split("-")[1])
    process = started(epoch + 2)
    process.join(120)
    process.kill()
    said = printed.read_text()
    assert process.exitcode == 0, said
    assert f"Epoch {epoch + 2}/{epoch + 2}" in said
    assert not epoch or "Epoch 1/" not in said
    assert not list(tmp_path.glob("backups/*.backup"))


@pytest.mark.long
def test_the_example_that_loses_a_worker_ends_where_an_undisturbed_one_does(tmp_path):
    """Two workers, started by the launcher; one is killed, and all are started again."""

    def launched(name):
        places = ["--backups", str(tmp_path / name), "--weights", str(tmp_path / f"{name}.weights.h5")]
        launch = [sys.executable, "-P", "-m", "keras_paragrad", "launch", "--workers", "2", "--grace-seconds", "10"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*launch, str(CLUSTER / "train.py"), "--epochs", "12", *places], **streams)

    def ended(process):
        try:
            said = process.communicate(timeout=200)[0]
        finally:
            process.kill()
        return process.returncode, said

    with launched("undisturbed") as undisturbed:
        status, expected = ended(undisturbed)
    assert status == 0, expected[-3000:]
    with launched("killed") as killed:
        try:
            deadline = time.monotonic() + 150
            while not list(tmp_path.glob("killed/epoch-00000[2-9]*.backup")):
                assert killed.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(_worker_of(killed.pid), signal.SIGKILL)
        finally:
            status, said = ended(killed)
    assert status not in (0, None), said[-3000:]
    assert not (tmp_path / "killed.weights.h5").exists()
    with launched("killed") as again:
        status, said = ended(again)
    assert status == 0, said[-3000:]
    assert "Epoch 12/12" in said and "Epoch 1/12" not in said
    assert said.splitlines()[-1] == expected.splitlines()[-1]
    with h5py.File(tmp_path / "undisturbed.weights.h5") as one, h5py.File(tmp_path / "killed.weights.h5") as other:
        names = []
        one.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            np.testing.assert_allclose(other[name][()], one[name][()], rtol=0, atol=1e-6, err_msg=name)
    assert len(names) >= 4


def _worker_of(launcher):
    """A process that runs the example, started by the launcher or by one of its children."""
    waiting = [launcher]
    while waiting:
        pid = waiting.pop()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if pid != launcher and any(word.endswith(b"train.py") for word in words) and b"launch" not in words:
            return pid
        waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    raise AssertionError("the launcher runs no worker")
