"""The data of a profile, written by the profiler and read by the terminal output and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What was run.

    Attributes:
        model: The model's name.
        optimizer: The optimizer's class, with the wrapped one: `AccumulatingOptimizer(Adam)`.
        parameters: Number of trainable parameters.
        strategy: The class of the strategy, or `""` without one.
        replicas: Number of replicas over all workers.
        worker: Which worker this is, counted from 0.
        jit: Whether XLA compiles the step.
        steps_per_execution: Batches per call of the train function.
        precision: The name of the dtype policy.
        devices: The devices of this process, as TensorFlow names them.
        device_kind: The kind of devices that hold the model: `CPU`, `GPU` or `TPU`; `""` if unknown.
        compute_capability: The lowest of the GPUs that hold the model, such as `(8, 0)`, or `None` if unknown.
        versions: The versions of Python and of packages, by name.
        started: Start time, in ISO 8601 with time zone.
    """

    model: str = ""
    optimizer: str = ""
    parameters: int = 0
    strategy: str = ""
    replicas: int = 1
    worker: int = 0
    jit: bool = False
    steps_per_execution: int = 1
    precision: str = "float32"
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    started: str = ""
    device_kind: str = ""
    compute_capability: tuple[int, int] | None = None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "RunInfo":
        """Restores a `RunInfo` from JSON data, also of an earlier version.

        Example:

        >>> RunInfo.from_dict({"model": "digits", "devices": [], "compute_capability": [8, 0]}).compute_capability
        (8, 0)
        """
        capability = found.get("compute_capability")
        return cls(
            **{
                **found,
                "devices": tuple(found["devices"]),
                "compute_capability": None if capability is None else tuple(capability),
            }
        )


@dataclass(frozen=True)
class StepTime:
    """Where the time of one batch went, in milliseconds; the parts sum to the duration.

    Attributes:
        step: Which batch of the training it was, counted from 0.
        update: Which update of the optimizer it belongs to, counted from 0, or `None` if that isn't known.
        begins: Start time, relative to the start of the window.
        duration: Total time.
        input: Waiting for data.
        host: On the host, outside operations.
        compile: Tracing and compiling functions.
        compute: In operations on a device.
        collective: In collectives with other replicas, including waiting for them.
        idle: In none of these.
    """

    step: int
    update: int | None
    begins: float
    duration: float
    input: float = 0.0
    host: float = 0.0
    compile: float = 0.0
    compute: float = 0.0
    collective: float = 0.0
    idle: float = 0.0


PARTS = ("input", "host", "compile", "compute", "collective", "idle")


def shares_of(steps: Sequence[StepTime]) -> dict[str, float]:
    """The share of the total time of each part of a step, computed alike for terminal, report and advice.

    Example:

    >>> from keras_paragrad.profiling.summary import StepTime, shares_of
    >>> shares_of([StepTime(0, 0, 0.0, 4.0, input=3.0, compute=1.0)])["input"]
    0.75
    """
    total = sum(step.duration for step in steps) or 1.0
    return {part: sum(getattr(step, part) for step in steps) / total for part in PARTS}


@dataclass(frozen=True)
class OperationTime:
    """The time of one operation, over all of its executions.

    Attributes:
        name: Its name in the trace.
        kind: Its type, such as `MatMul`.
        layer: The layer it belongs to, or `""` if the trace doesn't say.
        count: Number of executions in the window.
        milliseconds: Its self time in the window.
        share: Its self time as a fraction of all operations' time.
    """

    name: str
    kind: str
    layer: str
    count: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class StageWork:
    """A stretch of time in which a device of a pipeline computes one micro-batch, forward or backward.

    Attributes:
        stage: Which stage, counted from 0.
        column: On which of the stage's devices.
        micro_batch: Which micro-batch.
        backward: Whether it is its backward pass.
        begins: Milliseconds after the first operation of all stages.
        duration: Milliseconds.
    """

    stage: int
    column: int
    micro_batch: int
    backward: bool
    begins: float
    duration: float


@dataclass(frozen=True)
class PipelineTime:
    """How the stages of a pipeline overlap.

    Attributes:
        stages: How many stages there are.
        columns: How many devices the widest of them has.
        microbatches: How many micro-batches.
        bubble: The share of the time in which the devices wait, from the first stage's first operation to the last
            operation of all, over all steps.
        ideal: What it would be with stages of equal time: (stages - 1) / (microbatches + stages - 1), where
            micro-batches are those of one column.
        step: Of which step `work` is: one of median length.
        duration: How long the stages took in it, in milliseconds.
        work: What the devices did in it.
    """

    stages: int
    columns: int
    microbatches: int
    bubble: float
    ideal: float
    step: int
    duration: float
    work: tuple[StageWork, ...]

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "PipelineTime":
        """That of JSON data."""
        return cls(**{**found, "work": tuple(StageWork(**each) for each in found["work"])})


@dataclass(frozen=True)
class Advice:
    """One recommendation, and why.

    Attributes:
        kind: What it is about: `"input"`, `"host"`, `"collective"`, `"compute"` or `"compile"`; `"none"` if nothing
            stands out.
        text: What to do.
        evidence: The measurements behind it.
    """

    kind: str
    text: str
    evidence: str


@dataclass(frozen=True)
class ProfileSummary:
    """The summary of one trace window.

    Attributes:
        run: What was run.
        steps: The window's batches in order.
        operations: The longest operations, in descending order.
        peak_memory: Peak memory in bytes by device or `"host"`, or `None` where unknown.
        advice: What to do first, or `None` if there were no steps.
        trace: The trace's folder, relative to the log directory.
        notes: Caveats: what is missing, and why.
        pipeline: How its stages overlap, if the model ran in a pipeline, or `None`.
    """

    run: RunInfo = RunInfo()
    steps: tuple[StepTime, ...] = ()
    operations: tuple[OperationTime, ...] = ()
    peak_memory: Mapping[str, int | None] = field(default_factory=dict)
    advice: Advice | None = None
    trace: str = ""
    notes: tuple[str, ...] = ()
    pipeline: PipelineTime | None = None

    def per_step(self, operation: OperationTime) -> float:
        """An operation's mean milliseconds per step; its total if the window has no steps."""
        return operation.milliseconds / (len(self.steps) or 1)

    def to_dict(self) -> dict[str, Any]:
        """The summary as data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "ProfileSummary":
        """The summary that `to_dict` described.

        Example:

        >>> summary = ProfileSummary(RunInfo("model"), (StepTime(0, 0, 0.0, 2.5, compute=2.5),))
        >>> ProfileSummary.from_dict(summary.to_dict()) == summary
        True
        """
        return cls(
            run=RunInfo.from_dict(found["run"]),
            steps=tuple(StepTime(**step) for step in found["steps"]),
            operations=tuple(OperationTime(**operation) for operation in found["operations"]),
            peak_memory=dict(found["peak_memory"]),
            advice=Advice(**found["advice"]) if found["advice"] else None,
            trace=found["trace"],
            notes=tuple(found["notes"]),
            # Summaries of earlier versions know nothing of it.
            pipeline=PipelineTime.from_dict(found["pipeline"]) if found.get("pipeline") else None,
        )
