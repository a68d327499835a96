"""Prepares a model for what is planned: replicas, parameter servers, a pipeline, or a mesh."""

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.model import compile_arguments, leaves_xla_open
from keras_paragrad.distribution.hardware import detect
from keras_paragrad.distribution.mesh.mesh import planned_mesh
from keras_paragrad.distribution.mesh.preparation import MeshPreparation, prepare_mesh
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.pipeline.preparation import PipelinePreparation, prepare_pipeline
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.replicas import Preparation
from keras_paragrad.distribution.servers import ServerPreparation, prepare_for_servers
from keras_paragrad.sharding.estimate import estimate_memory
from keras_paragrad.sharding.estimated import Estimate

AnyPreparation = Preparation | ServerPreparation | PipelinePreparation | MeshPreparation


def prepare_as_planned(
    model: keras.Model, plan: Plan, options: Options, together: tf.distribute.Strategy
) -> AnyPreparation:
    """Makes the model's own `fit`, `evaluate` and `predict` exact.

    Args:
        model: A compiled model.
        plan: The plan.
        options: The options that it was made for.
        together: The strategy that the model was built under, or on a mesh, by which its workers talk to each other.

    Returns:
        A handle; `undo()` restores the methods of the model's class.

    Raises:
        ValueError: The model can't be trained exactly. The message says what to write.
    """
    if plan.on_servers:
        return prepare_for_servers(model)
    if options.pipeline is not None:
        by_xla = options.jit is True or (options.jit == "auto" and compile_arguments(model).get("jit_compile") is True)
        named = options.devices or plan.devices.value
        devices = tuple((each,) if isinstance(each, str) else each for each in named)
        return prepare_pipeline(model, options.pipeline, devices, options.weighting, by_xla)
    if options.on_mesh:
        mesh = planned_mesh(options, detect())
        jit = None if options.jit == "auto" else options.jit
        return prepare_mesh(model, mesh, jit, together if mesh.workers > 1 else None)
    jit = options.jit
    if jit == "auto":
        # Keras disables XLA under every strategy, unless it is requested explicitly.
        planned = together.num_replicas_in_sync > 1 and leaves_xla_open(model)
        jit = plan.jit.value != "none" if planned else None
    return Preparation(
        model, exact=options.exact, weighting=options.weighting, jit=jit, shard_policy=options.shard_policy
    )


def estimate_as_planned(
    model: keras.Model, batch_size: int, length: int | None, plan: Plan, options: Options, replicas: int
) -> Estimate:
    """The memory of a step on each of the planned replicas.

    Raises:
        ValueError: The step can't be traced, or it isn't taken by replicas.
    """
    if plan.on_servers:
        raise ValueError(
            "With parameter servers the weights are on the servers, and each worker takes batches of its own. "
            "Estimate a worker's step without a strategy: DistributedFit('none').estimate(model, batch_size)."
        )
    if options.pipeline is not None:
        raise ValueError(
            "The estimate knows no pipelines. Estimate the model on one device, with "
            "DistributedFit('none').estimate(model, batch_size), and print(dist.explain()) after "
            "dist.prepare(model): it shows the weights and optimizer state of each stage."
        )
    if options.on_mesh:
        raise ValueError(
            "The estimate knows no meshes. Estimate the model on one device, with "
            "DistributedFit('none').estimate(model, batch_size), and print(dist.explain()) after "
            "dist.prepare(model): it shows the weights and optimizer state of each device."
        )
    return estimate_memory(
        model,
        batch_size,
        replicas,
        per_replica=plan.batch.value == "per_replica",
        length=length,
        min_shard_bytes=options.min_shard_bytes,
    )
