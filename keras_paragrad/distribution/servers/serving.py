"""Runs a worker or parameter server, which serves the chief until it is terminated."""

import logging
import signal
import sys
import threading
from typing import NoReturn

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.servers.strategy import start_server

_log = logging.getLogger("keras_paragrad")


def serve(cluster: Cluster) -> NoReturn:
    """Serves the chief until SIGTERM ends the process, with status 0.

    Args:
        cluster: The cluster, in which this process is a worker or a parameter server.

    Raises:
        ValueError: It is neither.
        SystemExit: With status 0, on SIGTERM.
    """
    if cluster.job not in ("worker", "ps"):
        raise ValueError(f"This process is {cluster.job} {cluster.index}. Only workers and parameter servers serve.")
    told = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: told.set())
    server = start_server(cluster)
    _log.info("%s %d serves at %s", cluster.job, cluster.index, server.target)
    # Not the server's own join(), during which Python would never handle the signal.
    told.wait()
    sys.exit(0)


def serve_if_asked(cluster: Cluster | None) -> None:
    """Serves, and never returns, if this process is a worker or server of a cluster with parameter servers.

    Args:
        cluster: The cluster that this process is in, or `None`.
    """
    if cluster is not None and cluster.jobs.get("ps") and cluster.job in ("worker", "ps"):
        serve(cluster)
