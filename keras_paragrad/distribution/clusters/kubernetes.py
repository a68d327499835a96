"""Kubernetes: the pods of an indexed Job or a StatefulSet."""

import re
from collections.abc import Mapping

from keras_paragrad.arguments import quote
from keras_paragrad.distribution.cluster import (
    DEFAULT_PORT,
    MOST_TASKS,
    Cluster,
    ClusterKind,
    read_integer,
    read_port,
)

_HOSTNAME = re.compile(r"(.+)-(\d{1,9})", re.ASCII)


class Kubernetes(ClusterKind):
    """The pods of a Job or StatefulSet, if `KERAS_PARAGRAD_WORKERS` says that they train together.

    A pod knows its name and index, but not the number of pods or the service that resolves their names. So the manifest
    must set `KERAS_PARAGRAD_WORKERS` (the number of pods), `KERAS_PARAGRAD_SERVICE` (the headless service) and, unless
    it is 2222, `KERAS_PARAGRAD_PORT`. Pods are named as in
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode and
    https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#stable-network-id.
    """

    source = "Kubernetes"
    precedence = 30

    def read(self, environment: Mapping[str, str]) -> Cluster | None:
        """Reads a pod's variables; `None` unless `KERAS_PARAGRAD_WORKERS` is set."""
        if "KERAS_PARAGRAD_WORKERS" not in environment:
            return None
        workers = read_integer(environment, "KERAS_PARAGRAD_WORKERS", 1, MOST_TASKS)
        # The name of the Job or StatefulSet, and the pod's index.
        match = _HOSTNAME.fullmatch(host := environment.get("HOSTNAME", "").split(".")[0])
        if match is None:
            raise ValueError(
                f"KERAS_PARAGRAD_WORKERS is set, but HOSTNAME is {quote(host)}, which does not end in a pod's index, "
                "as 'train-0' does. Run the pods in a Job with `completionMode: Indexed` or in a StatefulSet; "
                "elsewhere, describe the cluster in TF_CONFIG."
            )
        name, index = match[1], int(match[2])
        if "JOB_COMPLETION_INDEX" in environment:
            index = read_integer(environment, "JOB_COMPLETION_INDEX")
        service = environment.get("KERAS_PARAGRAD_SERVICE", "").strip().strip(".")
        if not service:
            raise ValueError(
                "KERAS_PARAGRAD_WORKERS is set, but KERAS_PARAGRAD_SERVICE is not. Set it to the name of the headless "
                "service: the pods' `subdomain`, or the StatefulSet's `serviceName`."
            )
        port = read_port(environment, DEFAULT_PORT)
        addresses = tuple(f"{name}-{rank}.{service}:{port}" for rank in range(workers))
        return Cluster({"worker": addresses}, "worker", index, self.source)


KIND: ClusterKind = Kubernetes()
