"""Puts a model's stages on their devices, and has `fit` run them as a pipeline."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_paragrad.compat.capabilities import accumulating
from keras_paragrad.compat.stand_ins import bytes_of
from keras_paragrad.distribution.pipeline.calls import variables_of
from keras_paragrad.distribution.pipeline.cutting import cut
from keras_paragrad.distribution.pipeline.microbatches import MicroBatches
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.distribution.pipeline.table import Stage, StageTable
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.engine.losses.normalization import LossNormalization, warn_of_batch_statistics
from keras_paragrad.engine.pipeline.columns import Columns
from keras_paragrad.engine.pipeline.compiled import CompiledPart
from keras_paragrad.engine.pipeline.on_device import STAGE, OnDevice
from keras_paragrad.engine.pipeline.placement import home_of, move_with_slots, placed_by_inputs, slots_by_home
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.segments import Part, functional_of, run_in_stages
from keras_paragrad.storage.checkpoint_state import build_optimizer


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
