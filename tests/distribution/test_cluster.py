"""Clusters are read from what launchers write, and what they can't have written is refused."""

import json
import re
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from runner.covering import examples

from keras_paragrad.distribution import clusters
from keras_paragrad.distribution.cluster import Cluster, cluster_kinds, find_cluster, sources_in_words
from keras_paragrad.distribution.clusters.slurm import expand_nodes, expand_numbers, expand_tasks
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.messages import MessageSigner
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import Explanation, make_plan

pytestmark = pytest.mark.fast

SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "KERAS_PARAGRAD_PORT": "12000",
}
PODS = {
    "KERAS_PARAGRAD_WORKERS": "3",
    "KERAS_PARAGRAD_SERVICE": "train.default.svc.cluster.local",
    "HOSTNAME": "digits-2",
}
INSTANCES = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


def tf_config(jobs, job="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def found(environment):
    cluster = find_cluster(environment)
    assert cluster is not None
    return cluster


def test_no_variables_are_no_cluster():
    assert find_cluster({}) is None
    assert find_cluster({"TF_CONFIG": " "}) is None
    assert find_cluster({"TF_CONFIG": '{"cluster": {}}'}) is None


def test_tf_config():
    cluster = found(tf_config({"chief": ["c:1"], "worker": ["a:1", "[::1]:2"], "ps": ["p:3"]}, "worker", "1"))
    assert cluster == Cluster(
        {"chief": ("c:1",), "worker": ("a:1", "[::1]:2"), "ps": ("p:3",)}, "worker", 1, "TF_CONFIG"
    )
    assert (cluster.worker_count, cluster.rank, cluster.is_chief) == (3, 2, False)


@pytest.mark.parametrize(
    ("jobs", "job", "index", "rank", "is_chief"),
    [
        pytest.param({"worker": ["a:1", "b:1"]}, "worker", 0, 0, True, id="first-worker"),
        pytest.param({"worker": ["a:1", "b:1"]}, "worker", 1, 1, False, id="second-worker"),
        pytest.param({"chief": ["c:1"], "worker": ["a:1"]}, "chief", 0, 0, True, id="chief"),
        pytest.param({"chief": ["c:1"], "worker": ["a:1"]}, "worker", 0, 1, False, id="worker-after-chief"),
    ],
)
def test_ranks(jobs, job, index, rank, is_chief):
    cluster = found(tf_config(jobs, job, index))
    assert (cluster.rank, cluster.is_chief) == (rank, is_chief)


def test_a_parameter_server_has_no_rank():
    cluster = found(tf_config({"chief": ["c:1"], "ps": ["p:1"]}, "ps"))
    assert not cluster.is_chief
    with pytest.raises(ValueError, match="ps 0. Only the chief and the workers"):
        _ = cluster.rank


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        pytest.param({"TF_CONFIG": "{cluster"}, "TF_CONFIG is not JSON.*Expected", id="no-json"),
        pytest.param({"TF_CONFIG": "[1]"}, "TF_CONFIG is", id="no-object"),
        pytest.param({"TF_CONFIG": '{"cluster": ["a:1"]}'}, "`cluster` is", id="no-jobs"),
        pytest.param({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "`task` is None", id="no-task"),
        pytest.param(tf_config({"worker": "a:1"}), "`cluster.worker` is 'a:1'", id="no-list"),
        pytest.param(tf_config({"worker": [1]}), "an address in", id="no-address"),
        pytest.param(tf_config({"worker": ["a:1"]}, None), "`task.type`", id="no-type"),
        pytest.param(tf_config({"worker": ["a:1"]}, "worker", True), "`task.index`", id="index-is-no-number"),
        pytest.param(tf_config({"worker": ["a:1"]}, "worker", -1), "no worker -1", id="negative-index"),
        pytest.param(tf_config({"worker": ["a:1"]}, "worker", 1), "no worker 1: there are 1", id="index-too-large"),
        pytest.param(tf_config({"worker": ["a:1"]}, "chief"), "it is a 'chief'", id="job-without-tasks"),
        pytest.param(tf_config({"worker": []}), "no task for this process", id="empty-job"),
        pytest.param(tf_config({"master": ["a:1"]}, "master"), "`master` is called `chief`", id="master"),
        pytest.param(tf_config({"driver": ["a:1"]}, "driver"), "Jobs are chief, worker", id="unknown-job"),
        pytest.param(tf_config({"chief": ["a:1", "b:1"]}, "chief"), "2 chiefs", id="two-chiefs"),
        pytest.param(tf_config({"worker": ["a"]}), "address 'a'", id="no-port"),
        pytest.param(tf_config({"worker": ["a:0"]}), "address 'a:0'", id="port-0"),
        pytest.param(tf_config({"worker": ["a:65536"]}), "from 1 to 65535", id="port-too-large"),
        pytest.param(tf_config({"worker": ["http://a:1"]}), "address 'http", id="not-a-host"),
        pytest.param(tf_config({"worker": ["a:1", "a:1"]}), r"\['a:1'\] more than once", id="twice"),
        pytest.param(tf_config({"worker": ["a:1"], "ps": ["a:1"]}), "more than once", id="twice-in-two-jobs"),
    ],
)
def test_malformed_tf_config(environment, says):
    with pytest.raises(ValueError, match=says):
        find_cluster(environment)


HOSTS = st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), unique=True, min_size=2, max_size=9)


@given(HOSTS, st.integers(1, 65535), st.data())
def test_to_tf_config_is_read_back(hosts, port, data):
    addresses = [f"{host}:{port}" for host in hosts]
    chiefs, servers = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    jobs = {"chief": addresses[:chiefs], "ps": addresses[-servers:] if servers else []}
    jobs["worker"] = addresses[chiefs : len(addresses) - servers]
    jobs = {job: tuple(hosts) for job, hosts in jobs.items() if hosts}
    job = data.draw(st.sampled_from(sorted(jobs)))
    cluster = Cluster(jobs, job, data.draw(st.integers(0, len(jobs[job]) - 1)), "TF_CONFIG")
    assert find_cluster({"TF_CONFIG": cluster.to_tf_config()}) == cluster


def test_slurm():
    cluster = found(SLURM)
    addresses = "node08:12000", "node08:12001", "node09:12000", "node09:12001", "node10:12000"
    assert cluster == Cluster({"worker": addresses}, "worker", 3, "Slurm")


def test_slurm_derives_ports_from_the_job():
    environment = without(SLURM, "KERAS_PARAGRAD_PORT")
    ports = [{address.partition(":")[2] for address in found(environment).jobs["worker"]}]
    ports.append(
        {address.partition(":")[2] for address in found({**environment, "SLURM_JOB_ID": "1235"}).jobs["worker"]}
    )
    ports.append({address.partition(":")[2] for address in found({**environment, "SLURM_STEP_ID": "1"}).jobs["worker"]})
    assert all(len(each) == 2 for each in ports)
    assert len(set.union(*ports)) == 6
    assert all(15000 <= int(port) < 32768 for each in ports for port in each)


def test_slurm_ranks_that_are_dealt_round_the_nodes():
    """`srun --distribution=cyclic`: rank 1 is the first task of the second node."""
    dealt = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    clusters = [
        found({**SLURM, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(place)})
        for rank, (node, place) in enumerate(dealt)
    ]
    for cluster, (node, place) in zip(clusters, dealt, strict=True):
        assert cluster.jobs["worker"][cluster.index] == f"node{node + 8:02}:{12000 + place}"
    assert sorted(cluster.index for cluster in clusters) == list(range(5))


def test_a_batch_script_is_no_step():
    environment = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert find_cluster(environment) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"SLURM_STEP_NODELIST": "node[1-"}, "not a list of nodes", id="open-bracket"),
        pytest.param({"SLURM_STEP_NODELIST": "node[3-1]"}, "not a list of numbers", id="range-backwards"),
        pytest.param({"SLURM_STEP_NODELIST": ""}, "not a list of nodes", id="no-nodes"),
        pytest.param({"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "not a list of task counts", id="tasks"),
        pytest.param({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "6 tasks on 3 nodes.*NUM_TASKS is 5", id="too-many-tasks"),
        pytest.param({"SLURM_STEP_TASKS_PER_NODE": "3,2"}, "5 tasks on 2 nodes", id="too-few-nodes"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'", id="tasks-no-number"),
        pytest.param({"SLURM_PROCID": "5"}, "no worker 5: there are 5", id="rank-too-large"),
        pytest.param({"SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, "SLURM_NODEID=2 and SLURM_LOCALID=1", id="place"),
        pytest.param({"KERAS_PARAGRAD_PORT": "ssh"}, "KERAS_PARAGRAD_PORT is 'ssh'", id="own-port"),
    ],
)
def test_malformed_slurm(changes, says):
    with pytest.raises(ValueError, match=says):
        find_cluster({**SLURM, **changes})


@pytest.mark.parametrize(
    ("absent", "says"),
    [
        pytest.param(("SLURM_STEP_NUM_TASKS",), "SLURM_STEP_NUM_TASKS is not set", id="tasks"),
        pytest.param(("SLURM_STEP_TASKS_PER_NODE",), "'' is not a list of task counts", id="uneven"),
        pytest.param(("SLURM_JOB_ID",), "SLURM_JOB_ID is not set", id="job"),
    ],
)
def test_absent_slurm_variables(absent, says):
    with pytest.raises(ValueError, match=says):
        find_cluster(without(SLURM, *absent))


def slowly_expanded(parts):
    """The nodes of drawn parts, one by one: a part is a list of texts and of lists of ranges."""
    nodes = []
    for part in parts:
        names = [""]
        for piece in part:
            if isinstance(piece, str):
                names = [name + piece for name in names]
                continue
            numbers = []
            for first, last, width in piece:
                number = first
                while number <= last:
                    text = str(number)
                    while len(text) < max(width, len(str(first))):
                        text = "0" + text
                    numbers.append(text)
                    number += 1
            names = [name + number for name in names for number in numbers]
        nodes += names
    return nodes


def written(part):
    pieces = []
    for piece in part:
        if isinstance(piece, str):
            pieces.append(piece)
            continue
        ranges = [f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else "") for first, last, width in piece]
        pieces.append(f"[{','.join(ranges)}]")
    return "".join(pieces)


NAMES = st.from_regex(r"[a-z]([a-z0-9.-]{0,5}[a-z])?", fullmatch=True)
RANGES = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(0, 4)).map(lambda r: (r[0], r[0] + r[1], r[2])),
    min_size=1,
    max_size=3,
)
PARTS = st.one_of(
    st.tuples(NAMES), st.tuples(NAMES, RANGES), st.tuples(NAMES, RANGES, NAMES), st.tuples(NAMES, RANGES, NAMES, RANGES)
)


@pytest.mark.not_fast
@examples(100, of=300)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_node_lists(parts):
    assert expand_nodes(",".join(written(part) for part in parts)) == slowly_expanded(parts)


@examples(100, of=300)
@given(st.text(alphabet="ab01-,[] ", max_size=12))
def test_any_other_text_is_refused_or_gives_names(text):
    try:
        nodes = expand_nodes(text)
    except ValueError:
        return
    assert nodes
    assert not any(re.search(r"[\[\],]", node) or not node for node in nodes)


def test_tasks_and_numbers():
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_numbers("001-003,7") == ["001", "002", "003", "7"]


@pytest.mark.parametrize("index", [{}, {"JOB_COMPLETION_INDEX": "2"}], ids=["StatefulSet", "indexed-job"])
def test_kubernetes(index):
    service = "train.default.svc.cluster.local"
    addresses = tuple(f"digits-{rank}.{service}:2222" for rank in range(3))
    assert found(PODS | index) == Cluster({"worker": addresses}, "worker", 2, "Kubernetes")
    assert found(PODS | index | {"KERAS_PARAGRAD_PORT": "99"}).jobs["worker"][0] == f"digits-0.{service}:99"


def test_pods_that_work_alone_are_no_cluster():
    assert (
        find_cluster({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "sweep-1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        is None
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"KERAS_PARAGRAD_WORKERS": "0"}, "KERAS_PARAGRAD_WORKERS is '0'", id="no-workers"),
        pytest.param({"KERAS_PARAGRAD_SERVICE": ""}, "KERAS_PARAGRAD_SERVICE is not", id="no-service"),
        pytest.param({"HOSTNAME": "laptop"}, "HOSTNAME is 'laptop'.*completionMode: Indexed", id="no-ordinal"),
        pytest.param({"HOSTNAME": "digits-3"}, "no worker 3", id="ordinal-too-large"),
        pytest.param({"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX is 'x'", id="index"),
        pytest.param({"KERAS_PARAGRAD_PORT": "70000"}, "from 1 to 65535", id="port"),
    ],
)
def test_malformed_kubernetes(changes, says):
    with pytest.raises(ValueError, match=says):
        find_cluster({**PODS, **changes})


def test_sagemaker():
    assert found(INSTANCES) == Cluster({"worker": ("algo-1:2222", "algo-2:2222")}, "worker", 1, "SageMaker")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS is 'algo-1,algo-2'. Expected a JSON list", id="no-json"),
        pytest.param({"SM_HOSTS": "[1]"}, "Expected a JSON list", id="no-names"),
        pytest.param({"SM_CURRENT_HOST": "algo-9"}, "SM_CURRENT_HOST is 'algo-9'", id="elsewhere"),
    ],
)
def test_malformed_sagemaker(changes, says):
    with pytest.raises(ValueError, match=says):
        find_cluster({**INSTANCES, **changes})


def test_a_cluster_of_one_is_found():
    assert found({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}).worker_count == 1


def test_a_kind_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "pbs.py").write_text("""
from keras_paragrad.distribution.cluster import Cluster, ClusterKind


class Pbs(ClusterKind):
    source, precedence, run_variables, command = "PBS", 15, ("PBS_JOBID",), "pbsdsh keras-paragrad launch train.py"

    def read(self, environment):
        return Cluster({"worker": ("a:1", "b:1")}, "worker", 1, "PBS") if "PBS_JOBID" in environment else None


KIND: ClusterKind = Pbs()
""")
    monkeypatch.setattr(clusters, "__path__", [*clusters.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "keras_paragrad.distribution.clusters.pbs", raising=False)
    environment = {**SLURM, **PODS, **INSTANCES, "PBS_JOBID": "7"}
    cluster = found(environment)
    assert cluster == Cluster({"worker": ("a:1", "b:1")}, "worker", 1, "PBS")
    assert sources_in_words() == "TF_CONFIG, PBS, SageMaker, Kubernetes or Slurm"
    machine = Hardware(1, cluster=cluster)
    explained = str(Explanation(make_plan(machine, Options()), machine))
    assert "To start it: pbsdsh keras-paragrad launch train.py" in explained
    line = MessageSigner.of(cluster, environment).sign({"rank": 1})
    assert MessageSigner.of(cluster, environment).verify(line) == {"rank": 1}
    assert MessageSigner.of(cluster, {"PBS_JOBID": "8"}).verify(line) is None


def test_kinds_have_an_order_of_their_own_and_are_in_the_guide():
    kinds = cluster_kinds()
    assert len({kind.precedence for kind in kinds}) == len({kind.source for kind in kinds}) == len(kinds)
    assert all(kind.read({}) is None for kind in kinds)
    guide = (Path(__file__).parents[2] / "docs/guides/launch.md").read_text()
    table = guide.partition("## Cluster variables")[2].partition("\n\n- ")[0]
    assert re.findall(r"^\| `?(\w+)`? \|", table, flags=re.MULTILINE) == ["Source", *(kind.source for kind in kinds)]


def test_tf_config_goes_first():
    everything = {**SLURM, **PODS, **INSTANCES}
    order = ["TF_CONFIG", "SageMaker", "Kubernetes", "Slurm"]
    assert found({**everything, **tf_config({"worker": ["a:1"]})}).source == order[0]
    assert found(everything).source == order[1]
    assert found({**SLURM, **PODS}).source == order[2]
    assert found(SLURM).source == order[3]


DEEP, LONG = "[" * 100_000, "9" * 5000


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TF_CONFIG": DEEP}, "TF_CONFIG is not JSON: it is nested too deeply"),
        ({"TF_CONFIG": '{"a":' * 100_000}, "nested too deeply"),
        ({"TF_CONFIG": '{"task": ' + LONG + "}"}, "too many digits"),
        (tf_config({"worker": ["a:1"]}, index=LONG), "task.index"),
        (tf_config({"worker": ["a:" + LONG]}), "address"),
        ({**INSTANCES, "SM_HOSTS": DEEP}, "SM_HOSTS"),
        ({**INSTANCES, "SM_HOSTS": LONG}, "SM_HOSTS"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-99999999]"}, "expands to 99999999 or more entries"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-9999]m[1-9999]"}, "expands to 99980001"),
        ({**SLURM, "SLURM_STEP_NODELIST": ",".join(["n[1-9999]"] * 99)}, "expands to 19998"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1]" * 20_000}, "address|tasks"),
        ({**SLURM, "SLURM_STEP_NODELIST": f"n[1-{LONG}]"}, "not a list of numbers"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "expands to 999999999"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": LONG}, "SLURM_STEP_NUM_TASKS"),
        ({**SLURM, "KERAS_PARAGRAD_PORT": LONG}, "KERAS_PARAGRAD_PORT"),
        ({**PODS, "KERAS_PARAGRAD_WORKERS": "999999999"}, "KERAS_PARAGRAD_WORKERS"),
        ({**PODS, "HOSTNAME": f"digits-{LONG}"}, "HOSTNAME"),
    ],
    ids=range(17),
)
def test_what_would_take_for_ever_is_refused_at_once(environment, says):
    began = time.process_time()
    with pytest.raises(ValueError, match=says) as refused:
        find_cluster(environment)
    assert time.process_time() - began < 1
    assert len(str(refused.value)) < 1500
