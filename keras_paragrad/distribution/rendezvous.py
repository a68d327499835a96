"""Rendezvous of a cluster's workers before TensorFlow starts, which would silently wait an hour for missing ones."""

import json
import logging
import os
import selectors
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.workers import NamedDevicesStrategy, has_joined_a_cluster
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.consistency.describe import versions
from keras_paragrad.distribution.listening import host_of, listen_at, port_of
from keras_paragrad.distribution.rendezvous_server import LONGEST, Caller, MessageSigner, RendezvousServer

_log = logging.getLogger("keras_paragrad")
_PAUSE = 0.2
_WARN_AFTER = 5.0
_LONGEST_DESCRIPTION = 8192
_LONGEST_REASON = 2000


def rendezvous(
    cluster: Cluster, seconds: float, facts: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> None:
    """Waits until all workers have connected and report the same facts; every worker calls this.

    The first worker listens on its address, which TensorFlow uses afterwards, and sends the verdict to the others.
    Connections of other runs are rejected.

    Args:
        cluster: The cluster.
        seconds: The timeout.
        facts: Values by name that must be equal on all workers, such as versions; JSON-serializable.
        environment: Environment variables with the launcher's `KERAS_PARAGRAD_TOKEN`; `os.environ` by default. Without
            the token, the cluster's description identifies a run.

    Raises:
        ConnectionError: On every connected worker: some are missing or unreachable. The message names them.
        ValueError: On every worker: their facts differ. The message shows them.
    """
    until = time.monotonic() + seconds
    signer = MessageSigner.of(cluster, os.environ if environment is None else environment)
    facts = {"cluster": _describe_cluster(cluster), **facts}
    address = _addresses(cluster)[0]
    verdict = (
        _collect_facts(cluster, signer, facts, until)
        if cluster.is_chief
        else _report_facts(cluster, signer, facts, until)
    )
    if "failed" in verdict:
        raise ConnectionError(f"The first worker, at {address}, failed: {verdict['failed']}")
    if "missing" in verdict:
        raise ConnectionError(
            f"{verdict['missing']} did not connect to the first worker at {address} within {seconds:.0f} s. Start all "
            f"workers, correct the addresses in {cluster.source}, or wait longer: DistributedFit(startup_timeout=600)."
            f"{verdict.get('besides', '')}"
        )
    if "differs" in verdict:
        raise ValueError(f"The workers differ: {verdict['differs']}. Start all of them with the same setup.")


def _collect_facts(
    cluster: Cluster, signer: MessageSigner, facts: Mapping[str, object], until: float
) -> dict[str, str]:
    """Waits for the others, compares facts, and sends the verdict to all that connected.

    A verdict is empty if training may start; else it has the key `failed`, `missing` (and `besides`) or `differs`.
    """
    addresses = _addresses(cluster)
    servers = listen_at(addresses[0], addresses[1:], until, "The first worker", "the cluster description")
    with (
        selectors.DefaultSelector() as selector,
        RendezvousServer(selector, servers, signer, cluster.worker_count) as server,
    ):
        verdict = {"failed": "it was stopped while it waited for the others."}
        try:
            while len(server.callers) + 1 < cluster.worker_count and (left := until - time.monotonic()) > 0:
                server.wait(min(left, 1.0))
            verdict = _compare_facts(addresses, facts, server)
        except Exception as error:
            verdict = {"failed": f"{type(error).__name__}: {error}"[:_LONGEST_REASON]}
            raise
        finally:
            server.stop_listening()
            for caller in server.callers.values():
                _send_verdict(caller, signer, verdict)
    return verdict


def _compare_facts(addresses: list[str], facts: Mapping[str, object], server: RendezvousServer) -> dict[str, str]:
    """The verdict: the first difference between workers (`differs`), or the `missing` ones; empty if all agree."""
    facts_by_rank = {0: facts, **{rank: caller.message["facts"] for rank, caller in sorted(server.callers.items())}}
    missing = [f"worker {rank} ({addresses[rank]})" for rank in range(len(addresses)) if rank not in facts_by_rank]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return {"missing": listed, "besides": server.in_words()}
    for name, expected in facts.items():
        others = [rank for rank in facts_by_rank if facts_by_rank[rank].get(name) != expected]
        if others:
            other = str(facts_by_rank[others[0]].get(name))[:_LONGEST_REASON]
            return {"differs": f"worker 0 has {name} {str(expected)[:_LONGEST_REASON]}, and worker {others[0]} {other}"}
    return {}


def _send_verdict(caller: Caller, signer: MessageSigner, verdict: Mapping[str, str]) -> None:
    """Tells a worker whether to start, and waits at most 5 s until it has disconnected."""
    connection = caller.connection
    try:
        connection.settimeout(5)
        connection.sendall(signer.sign(verdict))
        # Wait until the peer has closed, so that the port is free for TensorFlow at once.
        connection.recv(1)
    except OSError as failure:
        _log.warning("Could not deliver the verdict to a worker: %s", failure)


def _report_facts(cluster: Cluster, signer: MessageSigner, facts: Mapping[str, object], until: float) -> dict[str, str]:
    """Sends the facts to the first worker, and returns its verdict."""
    address = _addresses(cluster)[0]
    report = signer.sign({"rank": cluster.rank, "facts": facts})
    start, warned = time.monotonic(), False
    failure: object = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host_of(address), port_of(address)), timeout=min(left, 5.0)) as connection:
                connection.sendall(report)
                # The first worker reports missing workers a little after the deadline.
                answer = _read_line(connection, until + 5)
            verdict = signer.verify(answer) if answer else None
            if verdict is not None:
                return {str(name): str(reason) for name, reason in verdict.items()}
            failure = (
                "the process that listens there belongs to another run, or has another cluster description or "
                "KERAS_PARAGRAD_TOKEN"
            )
        except OSError as error:
            failure = error
        if not warned and time.monotonic() - start > _WARN_AFTER:
            warned = True
            _log.warning("Worker %d is waiting for the first worker at %s: %s", cluster.rank, address, failure)
        time.sleep(_PAUSE)
    return {"missing": f"worker 0 (worker {cluster.rank} could not reach it: {failure})"}


def _read_line(connection: socket.socket, until: float) -> bytes:
    """Reads a line, or an incomplete one if the peer closes or sends too much."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= LONGEST:
        connection.settimeout(max(until - time.monotonic(), 0.01))
        received = connection.recv(4096)
        if not received:
            break
        line += received
    return line


def _describe_cluster(cluster: Cluster) -> Any:
    """The cluster's addresses, or a checksum if there are too many for a message."""
    text = json.dumps(cluster.jobs, sort_keys=True)
    if len(text) <= _LONGEST_DESCRIPTION:
        return {job: list(hosts) for job, hosts in cluster.jobs.items()}
    return f"of {cluster.worker_count} workers, checksum {zlib.crc32(text.encode()):08x}"


def _addresses(cluster: Cluster) -> list[str]:
    """The workers' addresses by rank."""
    return [*cluster.jobs.get("chief", ()), *cluster.jobs.get("worker", ())]


def await_workers(cluster: Cluster, timeout: float, facts: Mapping[str, object], *, instead: str = "") -> None:
    """Waits for the other workers, and compares versions and facts; `instead` ends the error of a second call."""
    if has_joined_a_cluster():
        # TensorFlow already listens on this worker's address, so a second rendezvous there is impossible.
        raise RuntimeError(
            "This process has already joined its cluster, in an earlier DistributedFit(...) or "
            f"MultiWorkerMirroredStrategy(), and can't join it twice. Reuse that one{instead}."
        )
    rendezvous(cluster, timeout, {**versions(), **facts})


def join_workers(
    kind: type[NamedDevicesStrategy],
    cluster: Cluster,
    devices: Sequence[str],
    communication: tf.distribute.experimental.CommunicationOptions,
) -> tf.distribute.Strategy:
    """Creates a strategy of class `kind` for workers that have completed a rendezvous."""
    # TensorFlow configures collectives from this variable.
    os.environ["TF_CONFIG"] = cluster.to_tf_config()
    try:
        return kind(devices, communication)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            "TensorFlow has already created tensors in this process, and several workers have to be set up before "
            "that. Write DistributedFit(...) before the first optimizer, layer, dataset or tensor."
        ) from error
