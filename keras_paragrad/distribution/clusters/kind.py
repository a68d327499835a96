"""Cluster kinds: what starts the processes of a cluster, and how it describes the cluster to each of them."""

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from keras_paragrad.arguments import quote
from keras_paragrad.distribution import clusters
from keras_paragrad.exports import modules_of


class Found(NamedTuple):
    """The addresses of every job's tasks, and which of them this process is."""

    jobs: dict[str, tuple[str, ...]]
    job: str
    task: int


class ClusterKind(Protocol):
    """What starts the processes of a cluster, and describes it to them in environment variables.

    A kind is one module of this folder: a class that derives from this one, and an instance of it named `KIND`.

    Attributes:
        source: Its name, in messages and as `Cluster.source`.
        precedence: Kinds are asked in ascending order, and the first that finds a cluster is used. What a user sets on
            purpose comes before what a scheduler sets in every job.
        run_variables: Variables that tell a run of a cluster from the next one on the same addresses.
        command: What to type in a job to start `train.py`.
    """

    source: str
    precedence: int
    run_variables: tuple[str, ...] = ()
    command: str = "keras-paragrad launch train.py, in each task"

    def read(self, environment: Mapping[str, str]) -> Found | None:
        """Finds the cluster that this process was started in. Nothing is looked up on the network.

        Args:
            environment: The environment variables.

        Returns:
            The cluster, or `None` if the process was not started in one of this kind.

        Raises:
            ValueError: A variable is missing or malformed. The message names it, with what was expected.
        """
        ...


def cluster_kinds() -> list[ClusterKind]:
    """The kinds in this folder, in the order in which they are asked.

    Example:

    >>> from keras_paragrad.distribution.clusters.kind import cluster_kinds
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
# More would take minutes to write down, and no cluster that trains together has so many.
MOST_TASKS = 10_000


def whole_number(environment: Mapping[str, str], name: str, least: int = 0, most: int = 10**18) -> int:
    """The number in an environment variable.

    Raises:
        ValueError: It is not set, is not a number, or is less than `least` or more than `most`.
    """
    text = environment.get(name, "").strip()
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= most:
        said = f"is {quote(text)}" if name in environment else "is not set"
        bounds = f"from {least} to {most}" if most < 10**18 else f"of at least {least}"
        raise ValueError(f"{name} {said}. Expected an integer {bounds}.")
    return int(text)


def port_of(environment: Mapping[str, str], default: int) -> int:
    """`KERAS_PARAGRAD_PORT`, or a default where it is not set."""
    return (
        whole_number(environment, "KERAS_PARAGRAD_PORT", 1, 65535) if "KERAS_PARAGRAD_PORT" in environment else default
    )
