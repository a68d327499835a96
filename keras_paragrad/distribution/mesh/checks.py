"""What can't be asked for together with a mesh."""

from typing import Any

from keras_paragrad.compat.model import all_layers
from keras_paragrad.distribution.mesh.mesh import DISTRIBUTIONS, Mesh
from keras_paragrad.distribution.options import Options
from keras_paragrad.engine.step.builder import StepBuilder

# Of a component that this one imports nothing from.
_PER_EXAMPLE = "keras_paragrad.per_example"


def check_mesh_options(options: Options) -> None:
    """Refuses options that contradict a mesh."""
    if options.mesh is None and options.layout is not None:
        raise ValueError(
            f"layout={options.layout!r} is how variables are divided over mesh={{...}}, which isn't given. Write "
            'mesh={"batch": 2, "model": 2}, or leave layout out.'
        )
    if options.mesh is not None and options.layout is None:
        raise ValueError(
            'A mesh is given, and no layout. Write layout="auto" for one that is found from the model\'s structure, or '
            "strategy=keras.distribution.ModelParallel(layout_map=..., batch_dim_name=...) for one of yours."
        )
    if options.mesh is not None and options.strategy != "auto":
        raise ValueError(
            f"mesh={options.mesh} arranges devices, and so does strategy={options.strategy!r}. Leave one of them out."
        )
    distributed = isinstance(options.strategy, DISTRIBUTIONS)
    if options.mesh is None and not distributed:
        return
    if distributed and options.devices is not None:
        raise ValueError(
            f"devices={list(options.devices)}, but a keras.distribution has devices of its own. Leave devices out, and "
            "name them in keras.distribution.DeviceMesh(shape, axis_names, devices)."
        )
    if not options.exact:
        raise ValueError("exact=False, but a mesh trains as one device does. Leave exact out.")
    if options.shard is not None:
        raise ValueError(
            f"shard={options.shard!r} cuts variables among replicas, and a mesh has one replica, whose variables are "
            'divided by their layout. Leave shard out, or write strategy="mirrored".'
        )
    given = {"communication": options.communication, "pack_bytes": options.pack_bytes}
    given |= {"collective_timeout": options.collective_timeout, "weighting": options.weighting}
    unused = [name for name, value in given.items() if value not in (None, "auto")]
    unused += ["batch"] if options.batch == "per_replica" else []
    if unused:
        raise ValueError(f"{', '.join(unused)} has no effect on a mesh, which has one replica. Leave it out.")


def check_model(model: Any) -> None:
    """Refuses a model that can't be trained on a mesh."""
    if not model.built or not all(layer.built for layer in all_layers(model)):
        raise ValueError(
            f"{model.name!r} has no weights yet, which are to be divided. Call model.build(input_shape), or call it on "
            "a batch, within `with dist.scope():`."
        )
    if model.run_eagerly:
        raise ValueError(
            "The model is compiled with run_eagerly=True, and a mesh runs compiled steps alone. Leave it out."
        )
    if any(type(layer).__module__.startswith(_PER_EXAMPLE) for layer in [model, *all_layers(model)]):
        raise ValueError(
            f"{model.name!r} has PerExampleGradients, whose rules have not been compared with one device on a mesh. "
            'Train it with DistributedFit("mirrored").'
        )
    stages = StepBuilder.of(model).stages
    accumulate = ", and compile with AccumulatingOptimizer, which accumulates there"
    for stage, name, instead in (("split", "microbatch", accumulate), ("take", "DistributedFit's replicas", "")):
        if getattr(stages, stage) is not None:
            raise ValueError(
                f"{model.name!r} is under {name}, which can't be combined with a mesh. Call undo() of the handle that "
                f"it returned{instead}."
            )
    if stages.place is not None and stages.mesh is None:
        raise ValueError(
            f"{model.name!r} is in the stages of a pipeline. Call undo() of the handle that dist.prepare returned."
        )


def check_batch(rows: int | None, mesh: Mesh) -> None:
    """Refuses a batch size that can't be divided."""
    size = 1 if mesh.batch_axis is None else mesh.shape[mesh.batch_axis]
    if rows is not None and rows % size:
        fits = -(-rows // size) * size
        raise ValueError(
            f"Batches of {rows} rows can't be divided by the axis {mesh.batch_axis!r}, of {size}. Write "
            f"batch_size={fits}. Only the last batch of an epoch may be smaller: each device computes all of it."
        )
