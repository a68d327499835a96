"""Slurm: a step, with one worker for each of its tasks."""

import itertools
import math
import re
from collections.abc import Mapping

from keras_paragrad.arguments import quote
from keras_paragrad.distribution.cluster import MOST_TASKS, Cluster, ClusterKind, read_integer, read_port

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_nodes(text: str) -> list[str]:
    """Expands a Slurm hostlist expression, in order.

    Example:

    >>> from keras_paragrad.distribution.clusters.slurm import expand_nodes
    >>> expand_nodes("node[01-03,07],gpu-a[1-2]")
    ['node01', 'node02', 'node03', 'node07', 'gpu-a1', 'gpu-a2']
    """
    parts = _PART.findall(text)
    if not parts or ",".join(parts) != text:
        raise ValueError(f"{quote(text)} is not a list of nodes. Expected a form such as 'node[01-03,07],gpu-a[1-2]'.")
    nodes: list[str] = []
    for part in parts:
        # Every other token was in brackets, of which the last varies fastest, as in `rack[1-2]node[1-2]`.
        choices = [expand_numbers(token) if index % 2 else [token] for index, token in enumerate(_GROUP.split(part))]
        _check_count(len(nodes) + math.prod(map(len, choices)), text)
        nodes += ["".join(tokens) for tokens in itertools.product(*choices)]
    return nodes


def expand_tasks(text: str) -> list[int]:
    """The number of tasks on each node, from a form such as `2(x3),1`.

    Example:

    >>> from keras_paragrad.distribution.clusters.slurm import expand_tasks
    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{quote(text)} is not a list of task counts per node. Expected a form such as '2(x3),1'.")
        _check_count(len(counts) + int(match[2] or 1), text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_numbers(text: str) -> list[str]:
    """The numbers in a form such as `01-03,07`, as text, since leading zeros count.

    Example:

    >>> from keras_paragrad.distribution.clusters.slurm import expand_numbers
    >>> expand_numbers("09-11,7")
    ['09', '10', '11', '7']
    """
    numbers = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{quote(text)} is not a list of numbers. Expected a form such as '01-03,07'.")
        first, last = match[1], match[2] or match[1]
        _check_count(len(numbers) + int(last) - int(first) + 1, text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _check_count(count: int, text: str) -> None:
    if count > MOST_TASKS:
        raise ValueError(
            f"{quote(text)} expands to {count} or more entries; at most {MOST_TASKS} are allowed. Correct it."
        )


# A job gets one of `JOBS` ranges of ports, all below the ephemeral ports.
FIRST_PORT, PORTS_PER_JOB, JOBS = 15000, 16, 900


class Slurm(ClusterKind):
    """A step, with the variables of https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.

    A batch script without `srun` is not a job step: it runs once, whatever its number of tasks.
    """

    source = "Slurm"
    precedence = 40
    run_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    command = "srun keras-paragrad launch train.py"

    def read(self, environment: Mapping[str, str]) -> Cluster | None:
        """Reads the variables that `srun` sets for each task; `None` if it did not start this process."""
        if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
            return None
        nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
        tasks = _tasks_on_nodes(environment, len(nodes))
        port = read_port(environment, _port_of_job(environment))
        workers = [f"{node}:{port + task}" for node, count in zip(nodes, tasks, strict=True) for task in range(count)]
        return Cluster({"worker": tuple(workers)}, "worker", _index(environment, tasks), self.source)


def _tasks_on_nodes(environment: Mapping[str, str], nodes: int) -> list[int]:
    """The number of the step's tasks on each node, checked against their total."""
    expected = read_integer(environment, "SLURM_STEP_NUM_TASKS", 1, MOST_TASKS)
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks = expand_tasks(text)
    if len(tasks) != nodes or sum(tasks) != expected:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={text:.200} is {sum(tasks)} tasks on {len(tasks)} nodes, but "
            f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']:.200} names {nodes} nodes and "
            f"SLURM_STEP_NUM_TASKS is {expected}. Start the step with srun, and don't change its variables."
        )
    return tasks


def _index(environment: Mapping[str, str], tasks: list[int]) -> int:
    """This worker's index, by node and task on it, since `srun --distribution=cyclic` assigns ranks round-robin."""
    if "SLURM_NODEID" not in environment or "SLURM_LOCALID" not in environment:
        return read_integer(environment, "SLURM_PROCID")
    node, task = read_integer(environment, "SLURM_NODEID"), read_integer(environment, "SLURM_LOCALID")
    if node >= len(tasks) or task >= tasks[node]:
        raise ValueError(
            f"SLURM_NODEID={node} and SLURM_LOCALID={task} name no task of a step with {quote(tasks)} tasks on its "
            "nodes. Start the step with srun, and don't change its variables."
        )
    return sum(tasks[:node]) + task


def _port_of_job(environment: Mapping[str, str]) -> int:
    """A port that is the same on all nodes, differs between jobs and steps, and is below the ephemeral ports."""
    steps = read_integer(environment, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environment else 0
    return FIRST_PORT + PORTS_PER_JOB * ((read_integer(environment, "SLURM_JOB_ID") + 97 * steps) % JOBS)


KIND: ClusterKind = Slurm()
