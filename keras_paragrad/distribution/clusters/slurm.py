"""Slurm: a step, with one worker for each of its tasks."""

from collections.abc import Mapping

from keras_paragrad.arguments import shown
from keras_paragrad.distribution.clusters.kind import ClusterKind, Found
from keras_paragrad.distribution.clusters.nodelist import expand_nodes, expand_numbers, expand_tasks
from keras_paragrad.distribution.clusters.variables import MOST_TASKS, port_of, whole_number

FIRST_PORT, PORTS_A_JOB, JOBS = 15000, 16, 900


class Slurm(ClusterKind):
    """A step, with the variables of https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES.

    A batch script without `srun` is no step: it runs once, however many tasks it was given.
    """

    source = "Slurm"
    precedence = 40
    run_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    command = "srun keras-paragrad launch train.py"

    def read(self, environment: Mapping[str, str]) -> Found | None:
        """Reads the variables that `srun` sets for each task; `None` if it did not start this process."""
        if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
            return None
        nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
        tasks = _tasks_on_nodes(environment, len(nodes))
        ports = _ports(environment, max(tasks))
        workers = [f"{node}:{port}" for node, count in zip(nodes, tasks, strict=True) for port in ports[:count]]
        return Found({"worker": tuple(workers)}, "worker", _index(environment, tasks))


def _tasks_on_nodes(environment: Mapping[str, str], nodes: int) -> list[int]:
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    expected = whole_number(environment, total, 1, MOST_TASKS)
    if "SLURM_STEP_TASKS_PER_NODE" not in environment and expected % nodes:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE is not set, and {expected} tasks ({total}) can't be spread evenly over {nodes} "
            "nodes. Start the step with srun, which sets it."
        )
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", f"{expected // nodes}(x{nodes})")
    tasks = expand_tasks(text)
    if len(tasks) != nodes or sum(tasks) != expected:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={text:.200} is {sum(tasks)} tasks on {len(tasks)} nodes, but "
            f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']:.200} names {nodes} nodes and {total} is "
            f"{expected}. Start the step with srun, and don't change its variables."
        )
    return tasks


def _index(environment: Mapping[str, str], tasks: list[int]) -> int:
    """Which worker this is: by node and task there, since `srun --distribution=cyclic` assigns ranks round-robin."""
    if "SLURM_NODEID" not in environment or "SLURM_LOCALID" not in environment:
        return whole_number(environment, "SLURM_PROCID")
    node, place = whole_number(environment, "SLURM_NODEID"), whole_number(environment, "SLURM_LOCALID")
    if node >= len(tasks) or place >= tasks[node]:
        raise ValueError(
            f"SLURM_NODEID={node} and SLURM_LOCALID={place} name no task of a step with {shown(tasks)} tasks on its "
            "nodes. Start the step with srun, and don't change its variables."
        )
    return sum(tasks[:node]) + place


def _ports(environment: Mapping[str, str], needed: int) -> list[int]:
    """A port for each task on a node: those reserved for the step, or some that other jobs are unlikely to use."""
    reserved = environment.get("SLURM_STEP_RESV_PORTS")
    if "KERAS_PARAGRAD_PORT" in environment or not reserved:
        first = port_of(environment, _port_of_job(environment))
        return list(range(first, first + needed))
    ports = [int(port) for port in expand_numbers(reserved)]
    if len(ports) < needed:
        raise ValueError(
            f"SLURM_STEP_RESV_PORTS={reserved:.200} has {len(ports)} ports for {needed} tasks on one node. "
            f"Start the step with srun --resv-ports={needed}, or set KERAS_PARAGRAD_PORT to the first of {needed} free "
            "ports."
        )
    return ports


def _port_of_job(environment: Mapping[str, str]) -> int:
    """The same on every node, different for the next jobs and steps, and below the ephemeral ports."""
    job = "SLURM_JOB_ID" if "SLURM_JOB_ID" in environment else "SLURM_JOBID"
    step = "SLURM_STEP_ID" if "SLURM_STEP_ID" in environment else "SLURM_STEPID"
    steps = whole_number(environment, step) if step in environment else 0
    return FIRST_PORT + PORTS_A_JOB * ((whole_number(environment, job) + 97 * steps) % JOBS)


KIND: ClusterKind = Slurm()
