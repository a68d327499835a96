"""`ParameterServers`: weights on servers, which workers update without waiting for each other; and their cluster."""

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_integer
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.decisions import LAUNCH, requested_devices
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.launch.tasks import HOST, free_ports
from keras_paragrad.distribution.options import Decision, Decisions, Options, refuse_devices
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun, Preparation, Strategies
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.servers.preparation import ServerPreparation

_NAME = "parameter_server"


class ParameterServers(Parallelism):
    """A chief reads the data, workers take steps, and servers hold the weights."""

    precedence = 30
    # TensorFlow's coordinator connects the processes.
    parts_if_launched = ()

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "ParameterServers | None":
        cluster = hardware.cluster if hardware else None
        has_servers = cluster is not None and cluster.jobs.get("ps") and cluster.job != "evaluator"
        named = options.strategy == _NAME or isinstance(options.given, tf.distribute.ParameterServerStrategy)
        return cls() if named or (options.strategy == "auto" and has_servers) else None

    @classmethod
    def check_options(cls, options: Options) -> None:
        if options.strategy == _NAME:
            refuse_devices(options)

    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        """This parallelism's own decisions; the functions in `decisions.py` make the others."""
        decisions = [] if options.given is not None else _decide_strategy(hardware, options)
        if options.jit is True:
            raise ValueError(
                "jit=True, but XLA can't compile a step whose variables are on parameter servers. Leave jit out."
            )
        if options.exact:
            raise ValueError(
                "Parameter servers are asynchronous: a gradient is applied to weights that other workers have changed, "
                "so the result can't equal one device's. Write exact=False, or start the cluster without the job "
                '"ps".'
            )
        reads = "the chief reads the data, and sends each batch to a free worker"
        decisions += [
            _decision("jit", "none", "XLA needs variables on its device, and they are in other processes"),
            Decision(name="shard_policy", value="data", reason=reads),
            _decision("exact", False, "requested: parameter servers are asynchronous"),
        ]
        return Decisions(decisions, launched=True)

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        """Connects the chief to the cluster; a worker or server serves in here, and never returns."""
        strategy, cluster = options.given, hardware.cluster
        if strategy is None:
            assert cluster is not None
            if cluster.job in ("worker", "ps"):
                serve(cluster)
            strategy = make_parameter_server_strategy(cluster)
        # The chief reads all data and does not shard it.
        default = tf.distribute.get_strategy()
        return Strategies(strategy, default, default)

    def check_own_fit(self, model: keras.Model) -> None:
        raise ValueError(
            f"{type(model).__name__} overrides `fit`, and so can't be trained with parameter servers, where the chief "
            "has to read the data. Build a plain keras.Model of the same layers, and preprocess the data beforehand."
        )

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        return ServerPreparation.of(model)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> NoReturn:
        raise ValueError(
            "With parameter servers the weights are on the servers, and each worker takes other batches. "
            "Estimate a worker's step without a strategy: DistributedFit('none').estimate(model, batch_size)."
        )


def _decision(name: str, value: object, reason: str) -> Decision:
    """A decision that only another strategy overrides."""
    return Decision(name=name, value=value, reason=reason, override='strategy="none"')


def _decide_strategy(hardware: Hardware, options: Options) -> list[Decision]:
    """The decisions on strategy, devices and communication, unless the user passed a strategy."""
    cluster = hardware.cluster
    missing = [job for job in JOBS if not (cluster and cluster.jobs.get(job))]
    if missing:
        raise ValueError(
            f"Parameter servers need at least a chief, a worker and a ps, and the cluster has no {', '.join(missing)}. "
            f'Add them to TF_CONFIG, or run `{LAUNCH} --ps 1`; otherwise write strategy="auto".'
        )
    named = options.strategy != "auto"
    reason = "requested" if named else "the cluster has parameter servers"
    override = 'strategy="auto"' if named else 'strategy="none", to ignore the cluster'
    if options.devices is None:
        devices = _decision("devices", (), "each worker computes independently")
    else:
        devices = requested_devices(tuple(options.devices), hardware)
    return [
        Decision(name="strategy", value=_NAME, reason=reason, override=override),
        devices,
        _decision("replicas", 1, "workers take steps independently"),
        Decision(name="communication", value="none", reason="workers push gradients to the parameter servers"),
    ]


PARALLELISM = ParameterServers


_log = logging.getLogger("keras_paragrad")
JOBS = ("chief", "worker", "ps")
# In-process servers run until the process ends, and must not be garbage-collected.
_RUNNING: list[tf.distribute.Server] = []
# The most in-process servers of a job, as each has threads.
_MOST = 64


def make_parameter_server_strategy(cluster: Cluster) -> tf.distribute.ParameterServerStrategy:
    """Connects the chief to its workers and parameter servers, and waits until all of them are up.

    Args:
        cluster: A cluster with workers and parameter servers, in which this process is the chief.

    Returns:
        The strategy to build a model under. Each weight is stored whole on one server, assigned round-robin.

    Raises:
        ValueError: This process is another task, or there are no workers or servers.
    """
    missing = [job for job in JOBS if not cluster.jobs.get(job)]
    if missing or cluster.job != "chief":
        raise ValueError(
            f"This process is {cluster.job} {cluster.index} of a cluster with {', '.join(cluster.jobs)}. Only the "
            "chief of a cluster with a chief, workers and parameter servers (`ps`) trains; the others call "
            "serve(cluster)."
        )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _spec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver)


def in_process_cluster(workers: int = 2, servers: int = 1) -> Cluster:
    """Starts workers and parameter servers within this process, on free ports of 127.0.0.1, for tests and trials.

    Args:
        workers: Number of workers; they share this process's cores.
        servers: Number of parameter servers.

    Returns:
        The cluster, in which this process is the chief.

    Raises:
        ValueError: The number of workers or servers is less than 1 or too large.

    Example:

    >>> from keras_paragrad.distribution.servers import in_process_cluster
    >>> cluster = in_process_cluster(workers=2, servers=1)
    >>> {job: len(addresses) for job, addresses in cluster.jobs.items()}
    {'chief': 1, 'worker': 2, 'ps': 1}
    """
    workers = check_integer("workers", workers, most=_MOST, example=2)
    servers = check_integer("servers", servers, most=_MOST, example=1)
    addresses = [f"{HOST}:{port}" for port in free_ports(1 + workers + servers)]
    jobs = {
        "chief": tuple(addresses[:1]),
        "worker": tuple(addresses[1 : 1 + workers]),
        "ps": tuple(addresses[1 + workers :]),
    }
    cluster = Cluster(jobs, "chief", 0, "in_process_cluster()")
    for job in ("worker", "ps"):
        for index in range(len(jobs[job])):
            _RUNNING.append(_start_server(Cluster(jobs, job, index, cluster.source)))
    return cluster


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
    terminated = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    server = _start_server(cluster)
    _log.info("%s %d serves at %s", cluster.job, cluster.index, server.target)
    # Not server.join(), during which Python never handles signals.
    terminated.wait()
    sys.exit(0)


def _start_server(cluster: Cluster) -> tf.distribute.Server:
    """Starts TensorFlow's server for a worker or parameter server."""
    config = tf.compat.v1.ConfigProto()
    workers = len(cluster.jobs["worker"])
    if (os.cpu_count() or 1) <= workers:
        # Servers wait for each other: https://www.tensorflow.org/tutorials/distribute/parameter_server_training
        config.inter_op_parallelism_threads = workers + 1
    return tf.distribute.Server(
        _spec(cluster), job_name=cluster.job, task_index=cluster.index, config=config, protocol="grpc"
    )


def _spec(cluster: Cluster) -> tf.train.ClusterSpec:
    """The cluster without its evaluator, which TensorFlow's strategy does not support."""
    return tf.train.ClusterSpec({job: list(cluster.jobs[job]) for job in JOBS})
