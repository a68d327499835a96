"""Moves a model's stages to their devices, and runs batches through them in micro-batches.

A column has one device of each stage. Micro-batches take turns on the columns.
"""

import contextlib
import functools
import operator
from collections.abc import Generator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rich.table import Table
from rich.text import Text

from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.distribution.parallelism import Preparation
from keras_paragrad.distribution.pipeline.cutting import cut, variables_of_part
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, rows_at, rows_of, static_row_count
from keras_paragrad.engine.losses.dividers import Divider, warn_of_batch_statistics
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.pipeline.on_device import STAGE, Columns, CompiledPart, StageOnDevices
from keras_paragrad.engine.pipeline.placement import (
    device_of_variable,
    move_with_slots,
    placing_by_inputs,
    slot_bytes_by_device,
)
from keras_paragrad.engine.step.batch_part import BatchPart, compute_part
from keras_paragrad.engine.step.building import build_losses
from keras_paragrad.engine.step.gradient import Gradient, StepContext
from keras_paragrad.engine.step.segments import Part, RunPart, functional_of, run_in_stages
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.estimate import bytes_in_words
from keras_paragrad.storage.model_variables import TracedState, build_model_optimizer, build_optimizer_ahead

DIVIDER = Divider(
    configured_by="DistributedFit",
    parts="the micro-batches of a pipeline",
    for_equal_parts="write Pipeline(..., microbatches=1)",
    to_train_anyway="write Pipeline(..., microbatches=1)",
)


class PipelinePreparation(Preparation):
    """A model whose `fit`, `evaluate` and `predict` run its stages on their devices."""

    def start(self) -> None:
        """Cuts the model into stages, which run on their devices, and batches into micro-batches."""
        model = self.model
        pipeline, devices, weighting, jit, prove = self.settings
        # What fills *split* sets the current micro-batch there, and the stages choose their device by it.
        columns = Columns()
        split = self._micro_batches(pipeline, weighting, columns, max(map(len, devices)), prove)
        parts = cut(model, pipeline)
        if StepBuilder.of(model).stages.split is not None:
            raise ValueError(
                f"{model.name!r} already uses microbatch, and a pipeline cuts batches itself. Call undo() of the "
                "handle that microbatch returned, and write Pipeline(..., microbatches=...)."
            )
        self._stages: list[tuple[tuple[str, ...], Part]] = list(zip(devices, parts, strict=True))
        # Each variable and its original device, by the variable's `id`.
        self._homes: dict[int, tuple[keras.Variable, str]] = {}
        self._traced = TracedState()
        place = functools.partial(_place, columns, model, jit)
        wraps = [(part, functools.partial(place, index, names)) for index, (names, part) in enumerate(self._stages)]
        self._undo_stages = run_in_stages(functional_of(model), wraps)
        StepBuilder.of(model).fill(split=split, place=self._placing)

    def renew(self) -> None:
        """Moves variables and the optimizer's slots to the stages' devices."""
        # XLA compiles for one device: stages, and not the step.
        self.set_jit_compile(False)
        homes = {names[0]: variables_of_part(part) for names, part in self._stages}
        for variable in [variable for variables in homes.values() for variable in variables]:
            # Layers may have got more variables since, for example by `enable_lora`.
            self._homes.setdefault(id(variable), (variable, device_of_variable(variable)))
        move_with_slots(homes, self.model.optimizer)
        build_optimizer_ahead(self.model)
        if self._traced.update(self.model):
            self._retrace()

    @contextlib.contextmanager
    def _placing(self) -> Generator[None]:
        """Context in which a step is traced: its optimizer is built, and operations follow their inputs' devices."""
        with tf.init_scope():
            build_model_optimizer(self.model)
        with placing_by_inputs(self.model):
            yield

    def stop(self) -> None:
        self._undo_stages()
        homes: dict[str, list[keras.Variable]] = {}
        for variable, home in self._homes.values():
            homes.setdefault(home, []).append(variable)
        move_with_slots(homes, self.model.optimizer)
        StepBuilder.of(self.model).fill(split=None, place=None)
        self._retrace()

    @property
    def table(self) -> Table:
        """What each device holds."""
        table = Table(title=Text(f"Stages of {self.model.name}"), show_lines=True)
        for header in ("Stage", "Device", "Layers", "Parameters", "Weights", "Optimizer"):
            table.add_column(header, overflow="fold", justify="left" if header in ("Device", "Layers") else "right")
        slots = slot_bytes_by_device(self.model.optimizer)
        for index, (devices, part) in enumerate(self._stages):
            variables, names = variables_of_part(part), [layer.name for layer in part.layers]
            names = names if len(names) <= 3 else [names[0], "...", names[-1]]
            elements = sum(int(variable.shape.num_elements()) for variable in variables)
            # The first device of a stage holds its weights and optimizer state.
            sizes = sum(map(variable_bytes, variables)), slots.get(devices[0], 0)
            words = Text(" ".join(names)), f"{elements:,}", *map(bytes_in_words, sizes)
            table.add_row(str(index), " ".join(devices), *words)
        return table

    def _micro_batches(
        self, pipeline: Pipeline, weighting: str, columns: Columns, width: int, prove: bool
    ) -> "MicroBatches":
        """The filler of *split*, which cuts a batch into micro-batches."""
        accumulator = find_accumulator(self.model.optimizer)
        accumulated = accumulator.weighting if accumulator else "auto"
        # Even if accumulated batches are weighted uniformly, micro-batches of one may be uneven.
        loss_divisor = LossDivisor(weighting if accumulated in ("auto", "uniform") else accumulated, DIVIDER)
        if pipeline.microbatches > 1:
            loss_divisor.check(self.model)
            warn_of_batch_statistics(self.model)
        return MicroBatches(pipeline.microbatches, loss_divisor, columns, width, prove)

    def _retrace(self) -> None:
        """Has the model's functions traced again."""
        StepBuilder.of(self.model).retrace()
        self.model.test_function = self.model.predict_function = None


def _place(
    columns: Columns,
    model: keras.Model,
    jit: bool,
    index: int,
    devices: tuple[str, ...],
    part: Part,
    run: RunPart,
) -> StageOnDevices:
    """Wraps the function `run` of a part, so that it runs on its stage's devices."""
    runs = dict.fromkeys(devices, run)
    if jit:
        names = [STAGE.format(stage=index, column=column) for column in range(len(devices))]
        runs = {device: CompiledPart(part, run, name) for device, name in zip(devices, names, strict=True)}
    return StageOnDevices(part, index, runs, columns, model)


class MicroBatches(NamedTuple):
    """Fills the *split* stage: unrolls micro-batches in one graph, so that TensorFlow runs several stages at once.

    Attributes:
        parts: The number of micro-batches of a batch; a batch of fewer rows has one for each row.
        loss_divisor: Measures the weight of a micro-batch.
        columns: Is set to the micro-batch that is computed: they take turns on a stage's devices.
        width: The number of columns: the most devices that a stage has.
        prove: Whether the first batch must prove that its micro-batches give the same results as the whole.
    """

    parts: int
    loss_divisor: LossDivisor
    columns: Columns
    width: int
    prove: bool = True

    def part_rows(self, rows: int) -> int:
        """The rows of a micro-batch."""
        return -(-rows // self.parts)

    @property
    def size(self) -> int:
        """A single example is never cut."""
        return 1

    @property
    def refusal_prefix(self) -> str:
        """Why a batch can't be cut, for the error of a model that allows no micro-batches."""
        return f"A batch can't be cut into microbatches={self.parts}."

    def cuts(self, data: Batch) -> bool | None:
        """Whether a batch is cut; `None` if its static shape is unknown."""
        if self.parts == 1:
            return False
        rows = static_row_count(data)
        return None if rows is None else rows > 1

    def __call__(self, context: StepContext, data: Batch) -> Gradient:
        """The gradient of a batch, from its micro-batches' gradients."""
        # Metrics are updated in a branch, in which they can't create their variables.
        build_losses(context.model, rows_at(data, 0, 1), metrics=True)
        static_rows = static_row_count(data)
        rows: Any = rows_of(data) if static_rows is None else static_rows
        count = self.parts if static_rows is None else min(self.parts, static_rows)
        # Each device sums the gradients that it has computed; only the sums move to the variables' devices.
        totals: list[BatchPart] = []
        with self.columns.batch():
            for index in range(count):
                self.columns.micro_batch = index
                first, last = index * rows // count, (index + 1) * rows // count
                if static_rows is not None:
                    micro_batch, options = rows_at(data, first, last - first), {}
                else:
                    micro_batch = rows_at(data, first, tf.maximum(last - first, 1))
                    options: dict[str, Any] = {"replica_batch": _PossiblyEmpty(last - first, last > first)}
                part = compute_part(context, micro_batch, rows, before=totals[0] if totals else None, **options)
                if index < self.width:
                    totals.append(part)
                else:
                    totals[index % self.width] += part
        return functools.reduce(operator.add, totals).finish()


class _PossiblyEmpty(ReplicaBatch):
    """A micro-batch that is empty if the batch has fewer rows than micro-batches.

    It then repeats a row of another micro-batch, with weight 0, and its gradient is finite if the other's is.
    """

    def gradients(self, gradients: Gradients) -> list[GradientTensor | None]:
        """The gradients, unchanged: their weight is 0 if the row is repeated."""
        return list(gradients)
