"""Explains TensorFlow's errors about lost workers."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from keras_paragrad.distribution.cluster import Cluster

_SIGNS = (
    "Collective ops is aborted",
    "coordination service",
    "CoordinationService",
    "stopped sending heartbeats",
    "Connection reset by peer",
    "Socket closed",
    "failed to connect to all addresses",
    "RecvBuf",
)
# A task that is not part of a device name.
_TASK = re.compile(r"/job:(chief|worker)/replica:\d+/task:(\d+)(?![\d/])")
_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


class WorkerLostError(RuntimeError):
    """Another worker of the cluster has died or stopped responding, so this one can't continue."""


@contextlib.contextmanager
def explained_failures(cluster: Cluster | None) -> Iterator[None]:
    """Context in which TensorFlow errors caused by a lost worker are raised as `WorkerLostError`.

    TensorFlow's coordination service detects lost workers by heartbeats, whatever the others wait for.

    Args:
        cluster: The cluster that this process trains in; `None` changes nothing.

    Raises:
        WorkerLostError: In place of TensorFlow's error, which is its `__cause__`.
    """
    try:
        yield
    except _ERRORS as error:
        if cluster is None or cluster.worker_count == 1 or not _is_lost_worker(error):
            raise
        raise WorkerLostError(_explanation(cluster, error)) from error


def _is_lost_worker(error: tf.errors.OpError) -> bool:
    text = str(error)
    return any(sign in text for sign in _SIGNS)


def _explanation(cluster: Cluster, error: tf.errors.OpError) -> str:
    suspects = _suspects(cluster, str(error))
    return (
        f"Worker {cluster.rank} of {cluster.worker_count} lost its connection to {suspects}. Most likely that process "
        "has ended: killed, out of memory, preempted, or by an error of its own, which the end of its output shows. "
        "The network may have failed, too. Restart all workers: with dist.callbacks(directory) they resume from the "
        "last backup, and `python -m keras_paragrad launch --max-restarts 3` restarts them automatically. TensorFlow "
        f"said: {_first_line(error)}"
    )


def _suspects(cluster: Cluster, text: str) -> str:
    """The workers that TensorFlow names, or all others."""
    workers = [*cluster.jobs.get("chief", ()), *cluster.jobs.get("worker", ())]
    offsets = {"chief": 0, "worker": len(cluster.jobs.get("chief", ()))}
    named = {offsets[job] + int(index) for job, index in _TASK.findall(text)} - {cluster.rank}
    others = sorted(named) or [rank for rank in range(len(workers)) if rank != cluster.rank]
    listed = [f"worker {rank} ({workers[rank]})" for rank in others if rank < len(workers)]
    if len(listed) > 8:
        listed = [*listed[:8], f"{len(listed) - 8} more"]
    return listed[0] if len(listed) == 1 else f"one of {', '.join(listed)}"


def _first_line(error: tf.errors.OpError) -> str:
    lines = [re.sub(r"^\{\{.*?\}\} ", "", line.strip()) for line in str(error).splitlines()]
    return next((line for line in lines if any(sign in line for sign in _SIGNS)), type(error).__name__)[:300]
