"""Rendezvous of a cluster's workers before TensorFlow starts, which would silently wait an hour for missing ones."""

import contextlib
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.workers import NamedDevicesStrategy, has_joined_a_cluster
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.consistency.describe import versions
from keras_paragrad.distribution.joining import Wait, join
from keras_paragrad.distribution.meeting import Meeting
from keras_paragrad.distribution.messages import LOOK, MessageSigner, difference

_log = logging.getLogger("keras_paragrad")
_WARN_AFTER = 5.0
_STRANGER = (
    "the process that listens there belongs to another run, or has another cluster description or KERAS_PARAGRAD_TOKEN"
)
_LONGEST_DESCRIPTION = 8192
_LONGEST_REASON = 2000


def rendezvous(
    cluster: Cluster, seconds: float, facts: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> None:
    """Waits until all workers have connected and report the same facts; every worker calls this.

    The first worker listens on its address, which TensorFlow uses afterwards, and sends the verdict to the others.
    Connections of other runs are rejected.
    """
    signer = MessageSigner.of(cluster, os.environ if environment is None else environment)
    facts = {"cluster": _describe_cluster(cluster), **facts}
    address = cluster.workers[0]
    if cluster.is_chief:
        verdict = _collect_facts(cluster, signer, facts, time.monotonic() + seconds)
    else:
        verdict = _report_facts(cluster, signer, facts, seconds)
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
    addresses = cluster.workers
    meeting = Meeting(addresses[0], until, signer, cluster.worker_count)
    verdict = {"failed": "it was stopped while it waited for the others."}
    try:
        while len(meeting.callers()) + 1 < cluster.worker_count and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK))
        verdict = _compare_facts(addresses, facts, meeting)
    except Exception as error:
        verdict = {"failed": f"{type(error).__name__}: {error}"[:_LONGEST_REASON]}
        raise
    finally:
        callers = meeting.release()
        meeting.close()
        for caller in callers.values():
            caller.answer(signer, verdict)
            # Wait until the peer has closed, so that the port is free for TensorFlow at once.
            with contextlib.suppress(OSError), caller.connection:
                caller.connection.recv(1)
    return verdict


def _compare_facts(addresses: Sequence[str], facts: Mapping[str, object], meeting: Meeting) -> dict[str, str]:
    """The verdict: the first difference between workers (`differs`), or the `missing` ones; empty if all agree."""
    facts_by_rank = {0: facts, **{rank: caller.message["facts"] for rank, caller in meeting.callers().items()}}
    missing = [f"worker {rank} ({addresses[rank]})" for rank in range(len(addresses)) if rank not in facts_by_rank]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return {"missing": listed, "besides": meeting.in_words()}
    for rank, others in facts_by_rank.items():
        if differs := difference(facts, rank, others, facts, "worker"):
            return {"differs": differs}
    return {}


def _report_facts(
    cluster: Cluster, signer: MessageSigner, facts: Mapping[str, object], seconds: float
) -> dict[str, str]:
    """Sends the facts to the first worker, and returns its verdict."""
    wait = Wait(seconds, _log.warning, quiet=_WARN_AFTER)
    address, rank = cluster.workers[0], cluster.rank
    try:
        connection, verdict = join(address, rank, lambda host: facts, signer, wait, member="worker", stranger=_STRANGER)
    except ConnectionError as failure:
        return {"missing": f"worker 0 (worker {rank} could not reach it: {failure})"}
    connection.close()
    return {name: str(reason) for name, reason in verdict.items()}


def _describe_cluster(cluster: Cluster) -> Any:
    """The cluster's addresses, or a checksum if there are too many for a message."""
    text = json.dumps(cluster.jobs, sort_keys=True)
    if len(text) <= _LONGEST_DESCRIPTION:
        return {job: list(hosts) for job, hosts in cluster.jobs.items()}
    return f"of {cluster.worker_count} workers, checksum {zlib.crc32(text.encode()):08x}"


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
