"""The tasks of a cluster on this machine, with their addresses and environment variables."""

import contextlib
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

HOST = "127.0.0.1"
# The variable of the token by which the processes of a run authenticate each other.
TOKEN = "KERAS_PARAGRAD_TOKEN"  # noqa: S105 - the name of the variable
_PORTS = range(1024, 65536)


@dataclass(frozen=True)
class Task:
    """One process of a cluster.

    Attributes:
        job: "chief", "worker" or "ps".
        index: Its index within its job.
        environment: Its environment variables.
    """

    job: str
    index: int
    environment: Mapping[str, str]

    @property
    def label(self) -> str:
        """Its display name: `worker 0`."""
        return self.job if self.job == "chief" else f"{self.job} {self.index}"

    @property
    def is_first(self) -> bool:
        """Whether it is the worker that reports for all: the chief, or the first."""
        cluster = json.loads(self.environment["TF_CONFIG"])["cluster"]
        return (self.job, self.index) == ("chief" if "chief" in cluster else "worker", 0)


@dataclass(frozen=True)
class Layout:
    """The requested cluster on this machine.

    Attributes:
        workers: The number of workers.
        servers: The number of parameter servers; if there are any, there is also a chief.
        devices: The number of GPUs visible to each worker; `None` leaves it unchanged.
        first_port: The lowest port to try; `None` for any free ports.

    Example:

    >>> [task.label for task in Layout(workers=2, servers=1).tasks({})]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """

    workers: int
    servers: int = 0
    devices: int | None = None
    first_port: int | None = None

    def tasks(self, environment: Mapping[str, str]) -> list[Task]:
        """The tasks, on currently free ports."""
        counts = {"chief": min(self.servers, 1), "worker": self.workers, "ps": self.servers}
        members = [(job, index) for job, count in counts.items() for index in range(count)]
        addresses: dict[str, list[str]] = {}
        for (job, _), port in zip(members, free_ports(len(members), self.first_port), strict=True):
            addresses.setdefault(job, []).append(f"{HOST}:{port}")
        # Python buffers kilobytes of output to a pipe, and loses them if it is killed. TensorFlow logs each barrier.
        common = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "1", **environment, TOKEN: secrets.token_hex(16)}
        tasks = []
        for job, index in members:
            config = json.dumps({"cluster": addresses, "task": {"type": job, "index": index}})
            visible = self._visible(job, index, environment)
            tasks.append(Task(job, index, {**common, **visible, "TF_CONFIG": config}))
        return tasks

    def _visible(self, job: str, index: int, environment: Mapping[str, str]) -> dict[str, str]:
        """The variable of the GPUs visible to a task: a worker's share, or none for other jobs."""
        if self.devices is None:
            return {}
        if job != "worker":
            return {"CUDA_VISIBLE_DEVICES": "-1"}
        names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        needed = self.workers * self.devices
        if names and len(names) < needed:
            raise ValueError(
                f"{self.workers} workers with {self.devices} GPUs each need {needed}, but CUDA_VISIBLE_DEVICES lists "
                f"{len(names)}: {','.join(names)}. List more there, or write a smaller --devices-per-worker."
            )
        names = names or [str(number) for number in range(needed)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[index * self.devices : (index + 1) * self.devices])}


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Distinct free ports of this machine."""
    with contextlib.ExitStack() as stack:
        candidates = [0] * count if first is None else range(first, _PORTS.stop)
        ports: list[int] = []
        for candidate in candidates:
            if len(ports) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((HOST, candidate))
                ports.append(probe.getsockname()[1])
    if len(ports) < count:
        raise ValueError(f"Found {len(ports)} free ports from {first or 1} up, but {count} are needed.")
    return ports
