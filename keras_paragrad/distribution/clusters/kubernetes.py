"""The cluster that the pods of a Kubernetes indexed Job or StatefulSet are."""

import re
from collections.abc import Mapping

from keras_paragrad.arguments import shown
from keras_paragrad.distribution.clusters.found import DEFAULT_PORT, MOST_TASKS, Found, port_of, whole_number

_HOSTNAME = re.compile(r"(.+)-(\d{1,9})", re.ASCII)


def read_kubernetes(environment: Mapping[str, str]) -> Found | None:
    """Reads a pod's variables; `None` unless `KERAS_PARAGRAD_WORKERS` says that the pods train together.

    Kubernetes tells a pod its own name and index, and neither how many pods there are nor what service resolves their
    names, so the manifest has to: `KERAS_PARAGRAD_WORKERS` (how many), `KERAS_PARAGRAD_SERVICE` (the headless service)
    and, if it isn't 2222, `KERAS_PARAGRAD_PORT`. Names of pods are those of
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode and
    https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#stable-network-id.

    Raises:
        ValueError: One of them is missing or malformed, or the pod has no index.
    """
    if "KERAS_PARAGRAD_WORKERS" not in environment:
        return None
    workers = whole_number(environment, "KERAS_PARAGRAD_WORKERS", 1, MOST_TASKS)
    name, ordinal = _name_and_ordinal(environment)
    index = whole_number(environment, "JOB_COMPLETION_INDEX") if "JOB_COMPLETION_INDEX" in environment else ordinal
    service = environment.get("KERAS_PARAGRAD_SERVICE", "").strip().strip(".")
    if not service:
        raise ValueError(
            "KERAS_PARAGRAD_WORKERS is set, but KERAS_PARAGRAD_SERVICE is not. Set it to the name of the headless "
            "service that the pods' `subdomain` or the StatefulSet's `serviceName` says."
        )
    port = port_of(environment, DEFAULT_PORT)
    return Found({"worker": tuple(f"{name}-{rank}.{service}:{port}" for rank in range(workers))}, "worker", index)


def _name_and_ordinal(environment: Mapping[str, str]) -> tuple[str, int]:
    """The name of the Job or StatefulSet and the pod's number in it, out of the pod's host name."""
    host = environment.get("HOSTNAME", "").split(".")[0]
    match = _HOSTNAME.fullmatch(host)
    if match is None:
        raise ValueError(
            f"KERAS_PARAGRAD_WORKERS is set, but HOSTNAME is {shown(host)}, which does not end in a pod's number, as "
            "'train-0' does. Run the pods in a Job with `completionMode: Indexed` or in a StatefulSet; elsewhere, "
            "describe the cluster in TF_CONFIG."
        )
    return match[1], int(match[2])
