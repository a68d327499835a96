"""The tasks of a cluster on this machine, with their addresses and environment variables."""

import contextlib
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HOST = "127.0.0.1"
# Environment variable that holds the token by which the processes of a run authenticate each other.
TOKEN = "KERAS_PARAGRAD_TOKEN"  # noqa: S105 - the name of the variable
# Environment variable that holds the numbers of workers or machines that a run may have, as in 2:4.
WORLD = "KERAS_PARAGRAD_WORLD"
# Environment variable that holds the path of a file to make once a backup is written.
SAVED = "KERAS_PARAGRAD_SAVED"
_PORTS = range(1024, 65536)


@dataclass(frozen=True)
class Task:
    """One process of a cluster: a "chief", "worker" or "ps", and its environment variables."""

    job: str
    index: int
    environment: Mapping[str, str]

    @property
    def label(self) -> str:
        """Its display name: `worker 0`."""
        return self.job if self.job == "chief" else f"{self.job} {self.index}"


@dataclass(frozen=True)
class Place:
    """A machine's part of a cluster: addresses on all machines, the run's token, and the index of its first worker."""

    jobs: Mapping[str, Sequence[str]]
    token: str
    first: int = 0


@dataclass(frozen=True)
class Layout:
    """The requested processes on this machine.

    Attributes:
        workers: The number of workers.
        servers: The number of parameter servers; if there are any, there is also a chief.
        devices: The number of GPUs visible to each worker; `None` leaves it unchanged.
        first_port: The lowest port to try; `None` for any free ports.
        gpu_slots: For each worker, the index of its share of the GPUs; by default its own index.
        world: The numbers of workers or machines that there may be, if these change.

    Example:

    >>> [task.label for task in Layout(workers=2, servers=1).tasks({})]
    ['chief', 'worker 0', 'worker 1', 'ps 0']
    """

    workers: int
    servers: int = 0
    devices: int | None = None
    first_port: int | None = None
    gpu_slots: Sequence[int] | None = None
    world: str | None = None

    def addresses(self, host: str = HOST) -> dict[str, list[str]]:
        """An address for each task, on currently free ports."""
        addresses: dict[str, list[str]] = {}
        for (job, _), port in zip(self._members, free_ports(len(self._members), self.first_port, host), strict=True):
            addresses.setdefault(job, []).append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        return addresses

    def tasks(self, environment: Mapping[str, str], place: Place | None = None) -> list[Task]:
        """The tasks, of a cluster on this machine unless this is one of several."""
        place = place or Place(self.addresses(), secrets.token_hex(16))
        # Python buffers kilobytes of output to a pipe, and loses them if it is killed. TensorFlow logs each barrier.
        common = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "1", **environment, TOKEN: place.token}
        common |= {WORLD: self.world} if self.world else {}
        tasks = []
        for job, index in self._members:
            task = index + place.first if job == "worker" else index
            config = json.dumps({"cluster": dict(place.jobs), "task": {"type": job, "index": task}})
            visible = self._visible(job, index, environment)
            tasks.append(Task(job, task, {**common, **visible, "TF_CONFIG": config}))
        return tasks

    @property
    def _members(self) -> list[tuple[str, int]]:
        counts = {"chief": min(self.servers, 1), "worker": self.workers, "ps": self.servers}
        return [(job, index) for job, count in counts.items() for index in range(count)]

    def _visible(self, job: str, index: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Environment variable that holds the GPUs visible to a task: a worker's share, or none for other jobs."""
        if self.devices is None:
            return {}
        if job != "worker":
            return {"CUDA_VISIBLE_DEVICES": "-1"}
        names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        gpu_slots = range(self.workers) if self.gpu_slots is None else self.gpu_slots
        needed = (1 + max(gpu_slots)) * self.devices
        if names and len(names) < needed:
            raise ValueError(
                f"{self.workers} workers with {self.devices} GPUs each need {needed}, but CUDA_VISIBLE_DEVICES lists "
                f"{len(names)}: {','.join(names)}. List more there, or write a smaller --devices-per-worker."
            )
        names = names or [str(number) for number in range(needed)]
        first = gpu_slots[index] * self.devices
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + self.devices])}


def free_ports(count: int, first: int | None = None, host: str = HOST) -> list[int]:
    """Distinct free ports on `host`, or on any interface if `host` isn't an address of this machine."""
    host = host if _is_local_address(host) else ""
    with contextlib.ExitStack() as stack:
        candidates = [0] * count if first is None else range(first, _PORTS.stop)
        ports: list[int] = []
        for candidate in candidates:
            if len(ports) == count:
                break
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # Stays bound until all ports are found, so that they are distinct.
            probe = stack.enter_context(socket.socket(family))
            with contextlib.suppress(OSError):
                probe.bind((host, candidate))
                ports.append(probe.getsockname()[1])
    if len(ports) < count:
        raise ValueError(f"Found {len(ports)} free ports from {first or 1} up, but {count} are needed.")
    return ports


def _is_local_address(host: str) -> bool:
    """Whether a socket on this machine can bind to the address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False
