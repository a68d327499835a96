"""Puts a model's stages on their devices, and has `fit` run them as a pipeline."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.compat.capabilities import accumulating
from keras_paragrad.compat.stand_ins import bytes_of
from keras_paragrad.distribution.pipeline.calls import variables_of
from keras_paragrad.distribution.pipeline.cutting import cut
from keras_paragrad.distribution.pipeline.microbatches import MicroBatches
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.engine.losses.normalization import LossNormalization, warn_of_batch_statistics
from keras_paragrad.engine.pipeline.columns import Columns
from keras_paragrad.engine.pipeline.compiled import CompiledPart
from keras_paragrad.engine.pipeline.on_device import STAGE, OnDevice
from keras_paragrad.engine.pipeline.placement import home_of, move_with_slots, placed_by_inputs, slots_by_home
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.segments import Part, functional_of, run_in_stages
from keras_paragrad.memory.estimated import bytes_in_words
from keras_paragrad.plain_text import Printable
from keras_paragrad.storage.model_variables import build_optimizer


class Stage(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        devices: The devices that it runs on, of which the first holds its weights and optimizer state.
        layers: The names of its layers, in order.
        parameters: The number of its weights' elements.
        weight_bytes: The bytes of its variables.
        slot_bytes: The bytes of what the optimizer has for them.
    """

    devices: tuple[str, ...]
    layers: tuple[str, ...]
    parameters: int
    weight_bytes: int
    slot_bytes: int


class StageTable(Printable):
    """The stages of a pipeline as a table, for `print` or a rich console.

    Args:
        model: The model's name.
        stages: Its stages, in order.
    """

    def __init__(self, model: str, stages: Iterable[Stage]):
        self.model = model
        self.stages = tuple(stages)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=Text(f"Stages of {self.model}"), show_lines=True)
        for header in ("Stage", "Device", "Layers", "Parameters", "Weights", "Optimizer"):
            table.add_column(header, overflow="fold", justify="left" if header in ("Device", "Layers") else "right")
        for index, stage in enumerate(self.stages):
            names = stage.layers if len(stage.layers) <= 3 else (stage.layers[0], "...", stage.layers[-1])
            size, slots = bytes_in_words(stage.weight_bytes), bytes_in_words(stage.slot_bytes)
            table.add_row(
                str(index), " ".join(stage.devices), Text(" ".join(names)), f"{stage.parameters:,}", size, slots
            )
        yield table


class PipelinePreparation(Preparation):
    """A model whose `fit`, `evaluate` and `predict` run its stages on their devices.

    Args:
        model: A compiled and built model.
        pipeline: How it is cut.
        devices: The devices of each stage, of which the first holds its variables.
        weighting: The weight of a micro-batch, as in `DistributedFit`.
        jit: Whether XLA compiles each stage.

    Raises:
        ValueError: The model can't be cut so, or the weights of micro-batches are unknown. The message says what to
            write.
    """

    def start(self) -> None:
        model = self.model
        pipeline, devices, weighting, jit = self.settings
        columns = Columns()
        split = self._split(pipeline, weighting, columns, max(map(len, devices)))
        parts = cut(model, pipeline, devices[0][0])
        self._refuse()
        self._stages: list[tuple[tuple[str, ...], Part]] = list(zip(devices, parts, strict=True))
        # By the `id` of a variable, it and where it was.
        self._homes: dict[int, tuple[keras.Variable, str]] = {}
        placed = functools.partial(_placed, columns, model, jit)
        wraps = [(part, functools.partial(placed, index, named)) for index, (named, part) in enumerate(self._stages)]
        self._whole_again = run_in_stages(functional_of(model), wraps)
        StepBuilder.of(model).fill(split=split, place=functools.partial(placed_by_inputs, model))

    def renew(self) -> None:
        # XLA compiles for one device: stages, and not the step.
        self.set_jit_compile(False)
        homes = {named[0]: _variables(part) for named, part in self._stages}
        for variable in [each for variables in homes.values() for each in variables]:
            # A layer may have got more variables since, as by `enable_lora`.
            self._homes.setdefault(id(variable), (variable, home_of(variable)))
        move_with_slots(homes, self.model.optimizer)
        build_optimizer(self.model)
        self._forget()

    def stop(self) -> None:
        self._whole_again()
        homes: dict[str, list[keras.Variable]] = {}
        for variable, home in self._homes.values():
            homes.setdefault(home, []).append(variable)
        move_with_slots(homes, self.model.optimizer)
        StepBuilder.of(self.model).fill(split=None, place=None)
        self._forget()

    @property
    def table(self) -> StageTable:
        """What each device holds."""
        slots = slots_by_home(self.model.optimizer)
        return StageTable(self.model.name, [_stage(named, part, slots) for named, part in self._stages])

    def _split(self, pipeline: Pipeline, weighting: str, columns: Columns, width: int) -> MicroBatches:
        accumulator = accumulating(self.model.optimizer)
        stated = accumulator.weighting if accumulator else "auto"
        # Even if accumulated batches are weighted uniformly, micro-batches of one may be uneven.
        normalize = LossNormalization(weighting if stated in ("auto", "uniform") else stated, "Pipeline")
        if pipeline.microbatches > 1:
            normalize.check(self.model)
            warn_of_batch_statistics(self.model)
        return MicroBatches(pipeline.microbatches, normalize, columns, width)

    def _refuse(self) -> None:
        if StepBuilder.of(self.model).stages.split is not None:
            raise ValueError(
                f"{self.model.name!r} is under microbatch, and a pipeline cuts batches itself. Call undo() of the "
                "handle that microbatch returned, and write Pipeline(..., microbatches=...)."
            )

    def _forget(self) -> None:
        StepBuilder.of(self.model).retrace()
        self.model.test_function = self.model.predict_function = None


def _placed(
    columns: Columns,
    model: keras.Model,
    jit: bool,
    index: int,
    devices: tuple[str, ...],
    part: Part,
    run: Callable[..., Any],
) -> OnDevice:
    runs = dict.fromkeys(devices, run)
    if jit:
        names = [STAGE.format(stage=index, column=column) for column in range(len(devices))]
        runs = {device: CompiledPart(part, run, name) for device, name in zip(devices, names, strict=True)}
    return OnDevice(part, index, runs, columns, model)


def _variables(part: Part) -> list[keras.Variable]:
    return list({id(each): each for layer in part.layers for each in variables_of(layer)}.values())


def _stage(devices: tuple[str, ...], part: Part, slots: dict[str, int]) -> Stage:
    variables = _variables(part)
    elements = sum(int(variable.shape.num_elements()) for variable in variables)
    names = tuple(layer.name for layer in part.layers)
    return Stage(devices, names, elements, sum(map(bytes_of, variables)), slots.get(devices[0], 0))
