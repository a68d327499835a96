"""The workers of a cluster meet before TensorFlow starts, which waits for missing ones without a word, for an hour."""

import json
import logging
import os
import selectors
import socket
import time
import zlib
from collections.abc import Mapping
from typing import Any

from keras_paragrad.distribution.callers import Caller, Callers
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.listening import host_of, listen_at, port_of
from keras_paragrad.distribution.sealed import LONGEST, Seal

_log = logging.getLogger("keras_paragrad")
_PAUSE = 0.2
_SAY_AFTER = 5.0
_LONGEST_DESCRIPTION = 8192
_LONGEST_REASON = 2000


def rendezvous(
    cluster: Cluster, seconds: float, facts: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> None:
    """Waits until all workers are there and say the same of themselves; all of them call this.

    The first worker listens at its own address, which TensorFlow listens at afterwards, and tells the others the
    outcome. What comes there and is not of this run is turned away, and waiting goes on.

    Args:
        cluster: The cluster.
        seconds: For how long to wait.
        facts: By name, what must be the same everywhere, such as versions; data that JSON can hold.
        environment: Where `KERAS_PARAGRAD_TOKEN` is, which the launcher sets; `os.environ`, unless given. Without it, a
            run is known by the cluster's description.

    Raises:
        ConnectionError: On every worker that is there: some are not, or not to be reached. The message names them.
        ValueError: On every worker: they say different things. The message gives them.
    """
    until = time.monotonic() + seconds
    seal = Seal.of(cluster, os.environ if environment is None else environment)
    facts = {"cluster": _description(cluster), **facts}
    address = _addresses(cluster)[0]
    verdict = _lead(cluster, seal, facts, until) if cluster.is_chief else _ask(cluster, seal, facts, until)
    if "failed" in verdict:
        raise ConnectionError(f"The first worker, at {address}, gave up: {verdict['failed']}")
    if "missing" in verdict:
        raise ConnectionError(
            f"{verdict['missing']} did not come to the first worker at {address} within {seconds:.0f} s. Start all "
            f"workers, correct the addresses in {cluster.source}, or wait longer: DistributedFit(startup_timeout=600)."
            f"{verdict.get('besides', '')}"
        )
    if "differs" in verdict:
        raise ValueError(f"The workers do not belong together: {verdict['differs']}. Start all of them alike.")


def _lead(cluster: Cluster, seal: Seal, facts: Mapping[str, Any], until: float) -> dict[str, str]:
    """Waits for the others, and tells all who came what has become of it."""
    addresses = _addresses(cluster)
    servers = listen_at(addresses[0], addresses[1:], until)
    with selectors.DefaultSelector() as selector, Callers(selector, servers, seal, cluster.worker_count) as callers:
        verdict = {"failed": "it was ended while it waited for the others."}
        try:
            while len(callers.came) + 1 < cluster.worker_count and (left := until - time.monotonic()) > 0:
                callers.wait(min(left, 1.0))
            verdict = _judge(addresses, facts, callers)
        except Exception as error:
            verdict = {"failed": f"{type(error).__name__}: {error}"[:_LONGEST_REASON]}
            raise
        finally:
            callers.stop_listening()
            for caller in callers.came.values():
                _tell(caller, seal, verdict)
    return verdict


def _judge(addresses: list[str], facts: Mapping[str, Any], callers: Callers) -> dict[str, str]:
    said = {0: facts, **{rank: caller.message["facts"] for rank, caller in sorted(callers.came.items())}}
    missing = [f"worker {rank} ({addresses[rank]})" for rank in range(len(addresses)) if rank not in said]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return {"missing": listed, "besides": callers.in_words()}
    for name, own in facts.items():
        others = [rank for rank in said if said[rank].get(name) != own]
        if others:
            found = str(said[others[0]].get(name))[:_LONGEST_REASON]
            return {"differs": f"worker 0 has {name} {str(own)[:_LONGEST_REASON]}, and worker {others[0]} {found}"}
    return {}


def _tell(caller: Caller, seal: Seal, verdict: Mapping[str, str]) -> None:
    connection = caller.connection
    try:
        connection.settimeout(5)
        connection.sendall(seal.closed(verdict))
        # Until the other side has closed, so that the port is free for TensorFlow at once.
        connection.recv(1)
    except OSError as failure:
        _log.warning("A worker left before all had met: %s", failure)


def _ask(cluster: Cluster, seal: Seal, facts: Mapping[str, Any], until: float) -> dict[str, str]:
    """Goes to the first worker, and comes back with its verdict."""
    address = _addresses(cluster)[0]
    question = seal.closed({"rank": cluster.rank, "facts": facts})
    began, said = time.monotonic(), False
    failure: object = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host_of(address), port_of(address)), timeout=min(left, 5.0)) as connection:
                connection.sendall(question)
                # The first worker waits for all others, and is a little late in saying that they have not come.
                answer = _line(connection, until + 5)
            verdict = seal.opened(answer) if answer else None
            if verdict is not None:
                return {str(name): str(reason) for name, reason in verdict.items()}
            failure = (
                "what listens there is of another run, or was given another description of the cluster or another "
                "KERAS_PARAGRAD_TOKEN"
            )
        except OSError as error:
            failure = error
        if not said and time.monotonic() - began > _SAY_AFTER:
            said = True
            _log.warning("Worker %d waits for the first worker at %s: %s", cluster.rank, address, failure)
        time.sleep(_PAUSE)
    return {"missing": f"worker 0 (worker {cluster.rank} could not reach it: {failure})"}


def _line(connection: socket.socket, until: float) -> bytes:
    """A line, or what there is of it when the other side closes or has sent too much."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= LONGEST:
        connection.settimeout(max(until - time.monotonic(), 0.01))
        piece = connection.recv(4096)
        if not piece:
            break
        line += piece
    return line


def _description(cluster: Cluster) -> Any:
    """The cluster's addresses, or a checksum where they are many."""
    text = json.dumps(cluster.jobs, sort_keys=True)
    if len(text) <= _LONGEST_DESCRIPTION:
        return {job: list(hosts) for job, hosts in cluster.jobs.items()}
    return f"of {cluster.worker_count} workers, checksum {zlib.crc32(text.encode()):08x}"


def _addresses(cluster: Cluster) -> list[str]:
    """The workers' addresses by rank."""
    return [*cluster.jobs.get("chief", ()), *cluster.jobs.get("worker", ())]
