"""`MeshParallel`: the variables and batches of one model, divided over a mesh of devices."""

import contextlib
import functools
import os
from collections import Counter
from typing import Any, NoReturn

import keras
import tensorflow as tf
from rich.table import Table
from rich.text import Text

from keras_paragrad.compat.model import all_layers, compile_config, overrides_train_step, percent
from keras_paragrad.compat.types import Batch, FitData
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.compat.workers import MeshWorkersStrategy, barrier, set_worker_strategy
from keras_paragrad.distribution.data import DistributedData, undivided_dataset
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.launch.tasks import WORLD
from keras_paragrad.distribution.mesh.layouts import (
    automatic_layout,
    axes_of_variables,
    check_layout_map,
    variables_kept_sharded,
)
from keras_paragrad.distribution.mesh.mesh import DISTRIBUTIONS, Mesh, check_mesh, planned_mesh
from keras_paragrad.distribution.options import Decision, Decisions, Options
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun, Preparation, Strategies
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.rendezvous import await_workers, join_workers
from keras_paragrad.engine.mesh.mesh_tracing import install_distribute_tensor, tracing_for_mesh
from keras_paragrad.engine.mesh.running import ModelOnMesh, batch_rows, gradient_error, take_off_mesh, variables_on_mesh
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.plain_text import bytes_in_words, counted
from keras_paragrad.storage.dtensor import Axes, bytes_by_device, make_mesh, span_workers, turn_combine_pass_off
from keras_paragrad.storage.model_variables import build_optimizer_ahead

# Rounding is 1e-6 of a float32 gradient; the error of a wrong rule is about as large as the gradient itself.
_TOLERANCES = {"float64": 1e-2, "float32": 1e-2}


class MeshPreparation(Preparation):
    """A model whose `fit`, `evaluate` and `predict` run on a mesh, with the results of one device."""

    def start(self) -> None:
        """Checks the model, chooses its layout, and prepares to put it on the mesh."""
        model, mesh = self.model, self.settings[0]
        check_mesh_model(model)
        mesh = mesh if mesh.distribution is not None else automatic_layout(model, mesh)
        self.mesh = mesh
        check_layout_map(model, mesh)
        self._axes = axes_of_variables(model, mesh)
        self._kept_sharded = variables_kept_sharded(model, self._axes)
        devices = make_mesh(mesh.shape, mesh.devices, mesh.workers, mesh.worker)
        tracing = functools.partial(tracing_for_mesh, model, mesh.distribution)
        self._on_mesh = ModelOnMesh(model, devices, mesh.batch_axis, self._place, tracing, self._check_first)
        # The compile configuration and trainable variables when a first batch's gradient was compared with one device.
        self._compared: Any = None

    def renew(self) -> None:
        """Builds the optimizer if nothing is frozen, and puts the model on the mesh."""
        check_mesh_model(self.model)
        _, jit, workers = self.settings
        if jit is not None:
            self.set_jit_compile(jit)
        build_optimizer_ahead(self.model)
        if workers is not None:
            set_worker_strategy(self.model, workers)
            methods = ("fit", "evaluate", "predict")
            self.replace(**{name: functools.partial(_on_workers, name, self.model) for name in methods})
        self._on_mesh.install()

    def stop(self) -> None:
        self._on_mesh.uninstall()
        set_worker_strategy(self.model, None)
        take_off_mesh(self.model)

    @property
    def table(self) -> Table:
        """How each variable is divided, and the most bytes of it that a device holds."""
        table = Table(title=Text(f"Layout of {self.model.name} on a mesh of {self.mesh.in_words}"))
        for header in ("Variable", "Shape", "Layout", "On each device"):
            table.add_column(header, overflow="fold", justify="right" if header == "On each device" else "left")
        weights, total = {id(variable) for variable in self.model.variables}, 0
        # The bytes on each device: of the optimizer's variables, and of all.
        slots, all_bytes = Counter(dict.fromkeys(self.mesh.devices, 0)), Counter[str]()
        for variable, storage in variables_on_mesh(self.model):
            device_bytes = bytes_by_device(storage)
            total += variable_bytes(variable)
            all_bytes.update(device_bytes)
            if id(variable) not in weights:
                slots.update(device_bytes)
                continue
            layout = "whole" if not any(storage.axes) else ", ".join(axis or "-" for axis in storage.axes)
            shape = " x ".join(map(str, variable.shape)) or "scalar"
            table.add_row(Text(variable.path), shape, layout, bytes_in_words(max(device_bytes.values())))
        table.add_row("optimizer", "", "as its variables", bytes_in_words(max(slots.values())))
        table.add_row("all", "", f"one device: {bytes_in_words(total)}", bytes_in_words(max(all_bytes.values())))
        return table

    def _place(self, variable: keras.Variable) -> tuple[Axes, bool]:
        """The variable's axes, and whether steps gather it."""
        axes = self._axes.get(id(variable), (None,) * len(variable.shape))
        return axes, id(variable) not in self._kept_sharded

    def _check_first(self, data: Batch, on_mesh: ModelOnMesh) -> None:
        """Refuses a first batch of indivisible size, or whose gradient differs from that on one device."""
        check_batch(batch_rows(data), self.mesh)
        # Compiling again may change the loss, and train variables that were frozen.
        current = compile_config(self.model), [id(variable) for variable in self.model.trainable_variables]
        if overrides_train_step(self.model) or self._compared == current:
            return
        error, path = gradient_error(self.model, data, on_mesh)
        if error > tolerance(self.model):
            raise RuntimeError(
                f"The gradient of {path!r} on this mesh differs from the one on one device, by {percent(error)} of its "
                "largest entry: TensorFlow has a wrong rule for an operation on divided tensors. Give this variable "
                "and the ones computed with it no layout, so that each device has them whole; or train with "
                'DistributedFit("mirrored", shard="parameters").'
            )
        self._compared = current


def _on_workers(method: str, model: keras.Model, x: FitData = None, *arguments: Any, **keywords: Any) -> Any:
    """Calls a method of the model's class, on every worker with the same data."""
    if method == "fit" and not isinstance(x, DistributedData):
        raise ValueError(
            "On a mesh of several workers each of them reads every batch, and fit would shuffle differently on each. "
            "Write dist.fit(model, x, y), or model.fit(dist.dataset(x, y, batch_size=...))."
        )
    result = getattr(type(model), method)(model, x, *arguments, **keywords)
    # Other workers may still read the last collective's result from this process, which may end next.
    barrier()
    return result


def tolerance(model: keras.Model) -> float:
    """The largest allowed error of a gradient on the mesh, relative to its largest entry."""
    dtypes = {layer.compute_dtype for layer in all_layers(model)} - {None}
    return max((_TOLERANCES.get(str(dtype), 0.5) for dtype in dtypes), default=1e-2)


class MeshParallel(Parallelism):
    """One replica, whose variables and batches are divided over several devices."""

    precedence = 20
    # Of `compat.names.NAMES`.
    parts = ("memory", "meshes")
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
        """This parallelism's own decisions; the functions in `decisions.py` make the others."""
        # With `mesh=` the layout is ours, otherwise the `keras.distribution` has one.
        mesh, automatic = planned_mesh(options, hardware), options.mesh is not None
        layout = "by a layout that follows from its structure" if automatic else "by its distribution"
        reason = f"requested: a mesh of {mesh.in_words}, the model divided {layout}"
        override = "devices=None" if automatic else "keras.distribution.DeviceMesh(..., devices=...)"
        count = counted(len(mesh.devices), "device")
        decisions = [
            Decision(name="strategy", value="mesh", reason=reason, override='strategy="auto"'),
            Decision(name="devices", value=mesh.devices, reason=f"a mesh of {mesh.in_words}", override=override),
            Decision(name="replicas", value=1, reason="the mesh is one model", override='strategy="mirrored"'),
            Decision(name="communication", value="none", reason="DTensor inserts its own collectives"),
        ]
        if mesh.workers > 1:
            reason = "each worker reads every batch, and each of its devices takes a part"
            decisions.append(Decision(name="shard_policy", value="data", reason=reason))
        return Decisions(decisions, counted=count, launched=mesh.workers > 1)

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        # Before TensorFlow compiles anything on the mesh.
        turn_combine_pass_off()
        install_distribute_tensor()
        strategies, cluster = super().strategy(plan, hardware, options), hardware.cluster
        if cluster is None or hardware.worker_count == 1:
            return strategies
        await_workers(cluster, options.startup_timeout, {"mesh": str(options.mesh), "devices": len(plan.devices.value)})
        span_workers(cluster.jobs["worker"], cluster.index)
        # Between CPUs, TensorFlow's own choice (AUTO) aborts the process.
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        communication = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        workers = join_workers(MeshWorkersStrategy, cluster, plan.devices.value[:1], communication)
        return Strategies(strategies.models, workers, strategies.readers)

    def placement(self) -> contextlib.AbstractContextManager[object]:
        # The model may be larger than any of the devices.
        return tf.device("CPU:0")

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        jit = None if run.options.jit == "auto" else run.options.jit
        mesh = planned_mesh(run.options, run.hardware)
        return MeshPreparation.of(model, mesh, jit, run.strategies.workers if mesh.workers > 1 else None)

    def data(self, run: PlannedRun, x: FitData, y: FitData, sample_weight: FitData, **options: Any) -> DistributedData:
        if run.strategies.workers is run.strategies.models:
            return super().data(run, x, y, sample_weight, **options)
        return undivided_dataset(run.strategies.workers, x, y, sample_weight, **options)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> NoReturn:
        raise ValueError(
            "The estimate does not cover meshes. Estimate the model on one device, with "
            "DistributedFit('none').estimate(model, batch_size), and print(dist.explain()) after "
            "dist.prepare(model): it shows the weights and optimizer state of each device."
        )


def check_mesh_options(options: Options) -> None:
    """Refuses options that contradict a mesh."""
    if options.mesh is None and options.layout is not None:
        raise ValueError(
            f"layout={options.layout!r} needs a mesh to divide variables over. Write "
            'mesh={"batch": 2, "model": 2}, or leave layout out.'
        )
    if options.mesh is not None and options.layout is None:
        raise ValueError(
            'mesh needs a layout. Write layout="auto" for one that follows from the model\'s structure; for your own, '
            "write strategy=keras.distribution.ModelParallel(layout_map=..., batch_dim_name=...) in place of mesh."
        )
    if options.mesh is not None and options.strategy != "auto":
        raise ValueError(
            f"mesh={options.mesh} and strategy={options.strategy!r} both arrange devices. Pass one of them."
        )
    is_distribution = isinstance(options.strategy, DISTRIBUTIONS)
    if options.mesh is None and not is_distribution:
        return
    if is_distribution and options.devices is not None:
        raise ValueError(
            f"devices={list(options.devices)}, but a keras.distribution names its own devices. Leave devices out, and "
            "name them in keras.distribution.DeviceMesh(shape, axis_names, devices)."
        )
    if world := os.environ.get(WORLD):
        raise ValueError(
            f"A mesh needs all of its devices, and the launcher may go on with fewer: it was started with {world}. "
            f"Write one number there, of workers or nodes: {world.rpartition(':')[2]}, with --max-restarts 10."
        )
    if not options.exact:
        raise ValueError("exact=False, but a mesh trains as one device does. Leave exact out.")
    if options.shard is not None:
        raise ValueError(
            f"shard={options.shard!r} shards variables over replicas, and a mesh counts as one replica, whose layout "
            'divides variables. Remove shard, or write strategy="mirrored" in place of the mesh.'
        )
    if options.weighting != "auto":
        raise ValueError("weighting has no effect on a mesh, which is one replica. Leave it out.")


def check_mesh_model(model: keras.Model) -> None:
    """Refuses a model that can't be trained on a mesh."""
    if not model.built or not all(layer.built for layer in all_layers(model)):
        raise ValueError(
            f"{model.name!r} has no weights yet that could be divided. Call model.build(input_shape), or call it on "
            "a batch, within `with dist.scope():`."
        )
    if model.run_eagerly:
        raise ValueError(
            "The model is compiled with run_eagerly=True, and a mesh only runs compiled steps. Leave it out."
        )
    if not all(getattr(each, "trains_on_meshes", True) for each in [model, *all_layers(model)]):
        raise ValueError(
            f"{model.name!r} has PerExampleGradients, whose rules have not been verified on a mesh. "
            'Train it with DistributedFit("mirrored").'
        )
    stages = StepBuilder.of(model).stages
    accumulate = ", and compile with AccumulatingOptimizer, which accumulates there"
    for stage, name, advice in (("split", "microbatch", accumulate), ("take", "DistributedFit's replicas", "")):
        if getattr(stages, stage) is not None:
            raise ValueError(
                f"{model.name!r} already uses {name}, which can't be combined with a mesh. Call undo() of the handle "
                f"that it returned{advice}."
            )
    if stages.place is not None and stages.mesh is None:
        raise ValueError(
            f"{model.name!r} is in the stages of a pipeline. Call undo() of the handle that dist.prepare returned."
        )


def check_batch(rows: int | None, mesh: Mesh) -> None:
    """Refuses a batch size that isn't divisible by the batch axis."""
    size = 1 if mesh.batch_axis is None else mesh.shape[mesh.batch_axis]
    if rows is not None and rows % size:
        larger = -(-rows // size) * size
        raise ValueError(
            f"Batches of {rows} rows can't be divided by the axis {mesh.batch_axis!r}, of {size}. Write "
            f"batch_size={larger}. Only the last batch of an epoch may be smaller: each device computes all of it."
        )


PARALLELISM = MeshParallel
