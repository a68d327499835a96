"""`Evidence`: the measurements of a trace window that advice is based on."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keras_paragrad.distribution.hardware import kind_of_device
from keras_paragrad.profiling.analysis.events import Trace
from keras_paragrad.profiling.analysis.operations import Operation
from keras_paragrad.profiling.summary import (
    Communication,
    LayerTime,
    OperationTime,
    PipelineTime,
    RunInfo,
    StepTime,
    shares_of,
)


@dataclass(frozen=True)
class Evidence:
    """The measurements of a trace window.

    Attributes:
        steps: The batches.
        operations: The longest operations, in descending order.
        run: The run.
        trace: The events of the trace.
        recorded: All operations in the trace, including the input pipeline's.
        layers: The time of each layer, in descending order.
        communication: How much of collectives is hidden.
        pipeline: How the stages of a pipeline overlap.
    """

    steps: Sequence[StepTime]
    operations: Sequence[OperationTime] = ()
    run: RunInfo = RunInfo()
    trace: Trace = field(default_factory=Trace)
    recorded: Sequence[Operation] = ()
    layers: Sequence[LayerTime] = ()
    communication: Communication | None = None
    pipeline: PipelineTime | None = None

    @property
    def total(self) -> float:
        """The time of all batches, in milliseconds."""
        return sum(step.duration for step in self.steps)

    @functools.cached_property
    def shares(self) -> dict[str, float]:
        """Each part's fraction of the total."""
        return shares_of(self.steps)

    @property
    def device_kind(self) -> str:
        """The kind of device that holds the model; if unknown, the GPU or TPU of its process, or `""`."""
        kinds = [kind_of_device(device.rpartition("/device:")[2]) for device in self.run.devices]
        return self.run.device_kind or next((kind for kind in kinds if kind != "CPU"), "")

    def share_of(self, fraction: float) -> float:
        """Converts a fraction of the operations' time to a fraction of the step."""
        return fraction * self.shares["compute"]

    def part_of(self, layers: Iterable[LayerTime]) -> float:
        """The fraction of the operations' time that some layers take."""
        return sum(layer.total for layer in layers) / (sum(layer.total for layer in self.layers) or 1.0)
