"""`Cluster`: the processes that train together; and `ClusterKind`: where its description comes from."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from keras_paragrad.arguments import quote
from keras_paragrad.distribution import clusters
from keras_paragrad.exports import modules_of


class ClusterKind(Protocol):
    """A scheduler or launcher, which describes a cluster to its processes in environment variables.

    A kind is one module of `keras_paragrad.distribution.clusters`: a subclass of this, and an instance named `KIND`.

    Attributes:
        source: The kind's name, in messages and as `Cluster.source`.
        precedence: Kinds are tried in ascending order, and the first that finds a cluster is used. Variables that users
            set come before variables that a scheduler sets in every job.
        run_variables: Variables that distinguish runs on the same addresses.
        command: The command that starts `train.py` in a job.
    """

    source: str
    precedence: int
    run_variables: tuple[str, ...] = ()
    command: str = "keras-paragrad launch train.py, in each task"

    def read(self, environment: Mapping[str, str]) -> "Cluster | None":
        """Finds the cluster that this process was started in, without the network.

        Args:
            environment: The environment variables.

        Returns:
            The cluster, or `None` if there is no cluster of this kind.

        Raises:
            ValueError: A variable is missing or malformed. The message names it and the expected value.
        """
        ...


def cluster_kinds() -> list[ClusterKind]:
    """All kinds, in the order in which they are tried.

    Example:

    >>> from keras_paragrad.distribution.cluster import cluster_kinds
    >>> [kind.source for kind in cluster_kinds()]
    ['TF_CONFIG', 'SageMaker', 'Kubernetes', 'Slurm']
    """
    kinds = (module.KIND for module in modules_of(clusters) if hasattr(module, "KIND"))
    return sorted(kinds, key=lambda kind: kind.precedence)


def sources_in_words() -> str:
    """The names of all kinds, as in "TF_CONFIG, SageMaker or Slurm"."""
    *others, last = (kind.source for kind in cluster_kinds())
    return f"{', '.join(others)} or {last}"


DEFAULT_PORT = 2222
# More would take minutes to describe, and no cluster that trains together has as many.
MOST_TASKS = 10_000


def read_integer(environment: Mapping[str, str], name: str, least: int = 0, most: int = 10**18) -> int:
    """Reads an integer from an environment variable.

    Raises:
        ValueError: It is not set, is not a number, or is less than `least` or more than `most`.
    """
    text = environment.get(name, "").strip()
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= most:
        state = f"is {quote(text)}" if name in environment else "is not set"
        bounds = f"from {least} to {most}" if most < 10**18 else f"of at least {least}"
        raise ValueError(f"{name} {state}. Expected an integer {bounds}.")
    return int(text)


def read_port(environment: Mapping[str, str], default: int) -> int:
    """The value of `KERAS_PARAGRAD_PORT`, or the default."""
    name = "KERAS_PARAGRAD_PORT"
    return read_integer(environment, name, 1, 65535) if name in environment else default


JOBS = ("chief", "worker", "ps", "evaluator")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


def is_address(text: str) -> bool:
    """Whether a text is `host:port`, with a port from 1 to 65535."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[2]) < 65536


@dataclass(frozen=True)
class Cluster:
    """The addresses of the processes that train together, and which of them this is.

    Args:
        jobs: The addresses, `host:port`, of the tasks of each job, in order. Jobs are `chief`, `worker`, `ps` (a
            parameter server) and `evaluator`.
        job: The job of this process.
        index: Index of this process among its job's tasks, from 0.
        source: What describes the cluster, for messages, such as `TF_CONFIG` or `Slurm`.

    Raises:
        ValueError: A job or this task is unknown, an address is malformed or duplicate, or there are two chiefs.

    Example:

    >>> from keras_paragrad.distribution.cluster import Cluster
    >>> cluster = Cluster({"worker": ("a:2222", "b:2222")}, "worker", 1, "TF_CONFIG")
    >>> cluster.worker_count, cluster.rank, cluster.is_chief
    (2, 1, False)
    """

    jobs: dict[str, tuple[str, ...]]
    job: str
    index: int
    source: str

    def __post_init__(self):
        unknown = [job for job in self.jobs if job not in JOBS]
        if unknown:
            hint = " A `master` is called `chief` in TensorFlow 2." if "master" in unknown else ""
            self._refuse(f"the unknown jobs {quote(unknown)}. Jobs are {', '.join(JOBS)}.{hint}")
        if len(self.jobs.get("chief", ())) > 1:
            self._refuse(f"{len(self.jobs['chief'])} chiefs. Keep one, and make the others workers.")
        addresses = [address for hosts in self.jobs.values() for address in hosts]
        for address in addresses:
            if not is_address(address):
                self._refuse(
                    f"the malformed address {quote(address)}. Expected a host and a port from 1 to 65535: 'host0:2222'."
                )
        if duplicates := [address for address, count in Counter(addresses).items() if count > 1]:
            self._refuse(f"{quote(duplicates)} more than once. Give every task its own address.")
        tasks = len(self.jobs.get(self.job, ()))
        if not tasks:
            self._refuse(f"no task for this process: it is a {quote(self.job)}, and the jobs are {list(self.jobs)}.")
        if not 0 <= self.index < tasks:
            self._refuse(
                f"no {self.job} {quote(self.index)}: there are {tasks}, counted from 0. Correct this task's index."
            )

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"The cluster from {self.source} has {problem}")

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the training processes by rank: the chief and the workers."""
        return *self.jobs.get("chief", ()), *self.jobs.get("worker", ())

    @property
    def worker_count(self) -> int:
        """Number of training processes."""
        return len(self.workers)

    @property
    def rank(self) -> int:
        """This process's rank among the chief, which has rank 0, and the workers.

        Raises:
            ValueError: This process is a parameter server or an evaluator.
        """
        if self.job not in ("chief", "worker"):
            raise ValueError(f"This process is {self.job} {self.index}. Only the chief and the workers have a rank.")
        return self.index + (len(self.jobs.get("chief", ())) if self.job == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and reports for all: the chief, or the first worker if there is no chief."""
        return self.job in ("chief", "worker") and self.rank == 0

    def to_tf_config(self) -> str:
        """The cluster in the `TF_CONFIG` format of TensorFlow's strategies.

        Returns:
            JSON that `find_cluster({"TF_CONFIG": ...})` reads back.
        """
        jobs = {job: list(hosts) for job, hosts in self.jobs.items()}
        return json.dumps({"cluster": jobs, "task": {"type": self.job, "index": self.index}})


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Finds the cluster that this process was started in, from its environment variables.

    Tries each kind in `keras_paragrad.distribution.clusters` by precedence: `TF_CONFIG`, SageMaker, Kubernetes, Slurm.
    Doesn't use the network.

    Args:
        environment: Names and values; usually `os.environ`.

    Returns:
        The cluster, which may be this process alone, or `None`.

    Raises:
        ValueError: The description of a cluster is malformed.

    Example:

    >>> from keras_paragrad.distribution.cluster import find_cluster
    >>> find_cluster({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}).jobs
    {'worker': ('algo-1:2222', 'algo-2:2222')}
    >>> find_cluster({}) is None
    True
    """
    clusters_of_kinds = (kind.read(environment) for kind in cluster_kinds())
    return next((cluster for cluster in clusters_of_kinds if cluster is not None), None)
