"""`ParameterServers`: weights on servers, which workers update without waiting for each other."""

from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.distribution.decisions.communication import no_communication
from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision
from keras_paragrad.distribution.decisions.devices import devices_in_words, requested_devices
from keras_paragrad.distribution.decisions.strategy import LAUNCH, hardware_in_words
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Decisions, Options, refuse_devices
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun, Strategies
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.distribution.servers.preparation import ServerPreparation
from keras_paragrad.distribution.servers.strategy import JOBS, make_parameter_server_strategy, serve_if_asked

_NAME = "parameter_server"


class ParameterServers(Parallelism):
    """A chief reads the data, workers take steps, and servers hold the weights."""

    precedence = 30

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
        decisions = [] if options.given is not None else _decide_strategy(hardware, options)
        if options.jit is True:
            raise ValueError(
                "jit=True, but XLA can't compile a step whose variables are on parameter servers. Leave jit out."
            )
        if options.exact:
            raise ValueError(
                "Parameter servers are asynchronous: a gradient is applied to weights that other workers have changed, "
                "so the result can't be that of one device. Write exact=False, or start the cluster without the job "
                '"ps".'
            )
        reads = "the chief reads the data, and sends each batch to a free worker"
        decisions += [
            _decision("jit", "none", "variables are in other processes", "XLA needs them on its device"),
            Decision("shard_policy", "data", reads, "no worker waits for another", NO_CHOICE),
            _decision("exact", False, "requested", "parameter servers are asynchronous"),
        ]
        return Decisions(decisions, launched=True)

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        strategy, cluster = options.given, hardware.cluster
        if strategy is None:
            assert cluster is not None
            serve_if_asked(cluster)
            strategy = make_parameter_server_strategy(cluster)
        # The chief reads all data and does not shard it.
        default = tf.distribute.get_strategy()
        return Strategies(strategy, default, default)

    def check_own_fit(self, model: Any) -> None:
        raise ValueError(
            f"{type(model).__name__} overrides `fit`, and so can't be trained with parameter servers, where the chief "
            "has to read the data. Build a plain keras.Model of the same layers, and preprocess the data beforehand."
        )

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        return ServerPreparation.of(model, None, None)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> NoReturn:
        raise ValueError(
            "With parameter servers the weights are on the servers, and each worker takes other batches. "
            "Estimate a worker's step without a strategy: DistributedFit('none').estimate(model, batch_size)."
        )


def _decision(name: str, value: Any, reason: str, evidence: str) -> Decision:
    return Decision(name, value, reason, evidence, 'strategy="none"')


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
        devices = _decision("devices", (), "each worker computes by itself", devices_in_words(hardware))
    else:
        devices = requested_devices(tuple(options.devices), hardware)
    push = "workers push gradients to the parameter servers"
    return [
        Decision("strategy", _NAME, reason, hardware_in_words(hardware), override),
        devices,
        _decision("replicas", 1, "workers take steps independently", f"{hardware.worker_count - 1} workers"),
        no_communication(hardware, options, _NAME, devices.value, push),
    ]


PARALLELISM = ParameterServers
