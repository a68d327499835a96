"""The workers of a cluster meet before TensorFlow starts, which waits for missing ones without a word, for an hour."""

import json
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

from keras_paragrad.distribution.cluster import Cluster

_log = logging.getLogger("keras_paragrad")
_PAUSE = 0.2
_SAY_AFTER = 5.0
_LONGEST_MESSAGE = 65536


def meet(cluster: Cluster, seconds: float, facts: Mapping[str, Any]) -> None:
    """Waits until all workers are there and say the same of themselves; all of them call this.

    The first worker listens at its own address, which TensorFlow listens at afterwards, and tells the others the
    outcome.

    Args:
        cluster: The cluster.
        seconds: For how long to wait.
        facts: By name, what must be the same everywhere, such as versions; data that JSON can hold.

    Raises:
        ConnectionError: On every worker that is there: some are not, or not to be reached. The message names them.
        ValueError: On every worker: they say different things. The message gives them.
    """
    until = time.monotonic() + seconds
    facts = {"cluster": {job: list(hosts) for job, hosts in cluster.jobs.items()}, **facts}
    address = _addresses(cluster)[0]
    verdict = _Leader(cluster, address, facts).verdict(until) if cluster.is_chief else _ask(cluster, facts, until)
    if "missing" in verdict:
        raise ConnectionError(
            f"{verdict['missing']} did not come to the first worker at {address} within {seconds:.0f} s. Start all "
            f"workers, correct the addresses in {cluster.source}, or wait longer: DistributedFit(startup_timeout=600)."
        )
    if "differs" in verdict:
        raise ValueError(f"The workers do not belong together: {verdict['differs']}. Start all of them alike.")


class _Leader:
    """The first worker, until all others have come."""

    def __init__(self, cluster: Cluster, address: str, facts: Mapping[str, Any]):
        self.cluster, self.address = cluster, address
        self.said: dict[int, Mapping[str, Any]] = {0: facts}

    def verdict(self, until: float) -> dict[str, str]:
        """What has become of the meeting, told to all who came."""
        came: list[socket.socket] = []
        with socket.create_server(("", _port(self.address)), backlog=128) as server:
            while len(self.said) < self.cluster.worker_count and (left := until - time.monotonic()) > 0:
                server.settimeout(min(left, 1.0))
                try:
                    came.append(server.accept()[0])
                except TimeoutError:
                    continue
                self._listen(came[-1])
        verdict = self._judge()
        for connection in came:
            _tell(connection, verdict)
        return verdict

    def _listen(self, connection: socket.socket) -> None:
        connection.settimeout(2)
        message = _receive(connection)
        if message and 0 < message.get("rank", 0) < self.cluster.worker_count:
            self.said[message["rank"]] = message["facts"]

    def _judge(self) -> dict[str, str]:
        addresses = _addresses(self.cluster)
        missing = [f"worker {rank} ({addresses[rank]})" for rank in range(len(addresses)) if rank not in self.said]
        if missing:
            return {"missing": ", ".join(missing)}
        for name, own in self.said[0].items():
            others = [rank for rank, facts in self.said.items() if facts.get(name) != own]
            if others:
                found = self.said[others[0]].get(name)
                return {"differs": f"worker 0 has {name} {own}, and worker {others[0]} {found}"}
        return {}


def _ask(cluster: Cluster, facts: Mapping[str, Any], until: float) -> dict[str, str]:
    """Goes to the first worker, and comes back with its verdict."""
    address = _addresses(cluster)[0]
    began, said = time.monotonic(), False
    failure: object = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((_host(address), _port(address)), timeout=min(left, 5.0)) as connection:
                # The first worker waits for all others, and is a little late in saying that they have not come.
                connection.settimeout(left + 5)
                connection.sendall(json.dumps({"rank": cluster.rank, "facts": facts}).encode() + b"\n")
                verdict = _receive(connection)
            if verdict is not None:
                return verdict
        except OSError as error:
            failure = error
        if not said and time.monotonic() - began > _SAY_AFTER:
            said = True
            _log.warning("Worker %d waits for the first worker at %s: %s", cluster.rank, address, failure)
        time.sleep(_PAUSE)
    return {"missing": f"worker 0 (worker {cluster.rank} could not reach it: {failure})"}


def _tell(connection: socket.socket, verdict: dict[str, str]) -> None:
    with connection:
        try:
            connection.sendall(json.dumps(verdict).encode() + b"\n")
            # Until the other side has closed, so that the port is free for TensorFlow at once.
            connection.recv(1)
        except OSError as failure:
            _log.warning("A worker left before all had met: %s", failure)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """A line of JSON, or `None` if there is none."""
    with connection.makefile("rb") as lines:
        try:
            message = json.loads(lines.readline(_LONGEST_MESSAGE))
        except (OSError, ValueError):
            return None
    return message if isinstance(message, dict) else None


def _addresses(cluster: Cluster) -> list[str]:
    """The workers' addresses by rank."""
    return [*cluster.jobs.get("chief", ()), *cluster.jobs.get("worker", ())]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
