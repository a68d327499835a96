"""`MeshParallel`: the variables and batches of one model, divided over a mesh of devices."""

import contextlib
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.compat.workers import MeshWorkersStrategy
from keras_paragrad.distribution.data import DistributedData, undivided_dataset
from keras_paragrad.distribution.decisions.communication import no_communication
from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision
from keras_paragrad.distribution.decisions.devices import devices_in_words
from keras_paragrad.distribution.decisions.strategy import hardware_in_words
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.mesh.checks import check_mesh_options
from keras_paragrad.distribution.mesh.mesh import DISTRIBUTIONS, check_mesh, planned_mesh
from keras_paragrad.distribution.mesh.preparation import MeshPreparation
from keras_paragrad.distribution.options import Decisions, Options
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun, Strategies
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.distribution.rendezvous import await_workers, join_workers
from keras_paragrad.engine.mesh.tracing import install_distribute_tensor
from keras_paragrad.storage.dtensor import span_workers, turn_combine_pass_off


class MeshParallel(Parallelism):
    """One replica, whose variables and batches are divided over several devices."""

    precedence = 20
    accepts = DISTRIBUTIONS

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "MeshParallel | None":
        return cls() if options.mesh is not None or isinstance(options.strategy, DISTRIBUTIONS) else None

    @classmethod
    def checked_options(cls, options: Options) -> dict[str, Any]:
        return {"mesh": check_mesh(options.mesh)}

    @classmethod
    def check_options(cls, options: Options) -> None:
        check_mesh_options(options)

    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        # With `mesh=` the layout is ours, otherwise the `keras.distribution` has one.
        mesh, automatic = planned_mesh(options, hardware), options.mesh is not None
        layout = "by a layout that follows from its structure" if automatic else "by its distribution"
        reason = f"requested: a mesh of {mesh.words}, the model divided {layout}"
        override = "devices=None" if automatic else "keras.distribution.DeviceMesh(..., devices=...)"
        count = f"{len(mesh.devices)} devices"
        decisions = [
            Decision("strategy", "mesh", reason, hardware_in_words(hardware), 'strategy="auto"'),
            Decision("devices", mesh.devices, f"a mesh of {mesh.words}", devices_in_words(hardware), override),
            Decision("replicas", 1, "the mesh is one model", count, 'strategy="mirrored"'),
            no_communication(hardware, options, "mesh", mesh.devices, "DTensor inserts its own collectives"),
        ]
        if mesh.workers > 1:
            reason = "each worker reads every batch, and each of its devices takes a part"
            decisions.append(Decision("shard_policy", "data", reason, f"{mesh.workers} workers", NO_CHOICE))
        return Decisions(decisions, count, mesh.workers > 1)

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        # Before TensorFlow compiles anything on the mesh.
        turn_combine_pass_off()
        install_distribute_tensor()
        strategies, cluster = super().strategy(plan, hardware, options), hardware.cluster
        if cluster is None or hardware.worker_count == 1:
            return strategies
        await_workers(cluster, options.startup_timeout, {"mesh": str(options.mesh), "devices": len(plan.devices.value)})
        span_workers(cluster.jobs["worker"], cluster.index)
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        communication = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        workers = join_workers(MeshWorkersStrategy, cluster, plan.devices.value[:1], communication)
        return Strategies(strategies.models, workers, strategies.readers)

    def placement(self) -> contextlib.AbstractContextManager[Any]:
        # The model may be larger than any of the devices.
        return tf.device("CPU:0")

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        jit = None if run.options.jit == "auto" else run.options.jit
        mesh = planned_mesh(run.options, run.hardware)
        return MeshPreparation.of(model, mesh, jit, run.strategies.workers if mesh.workers > 1 else None)

    def data(self, run: PlannedRun, x: Any, y: Any, sample_weight: Any, **options: Any) -> DistributedData:
        if run.strategies.workers is run.strategies.models:
            return super().data(run, x, y, sample_weight, **options)
        return undivided_dataset(run.strategies.workers, x, y, sample_weight, **options)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> NoReturn:
        raise ValueError(
            "The estimate does not cover meshes. Estimate the model on one device, with "
            "DistributedFit('none').estimate(model, batch_size), and print(dist.explain()) after "
            "dist.prepare(model): it shows the weights and optimizer state of each device."
        )


PARALLELISM = MeshParallel
