"""The data of a profile: the profiler writes them, the terminal and the report show them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class RunInfo:
    """A training run: the model, its compilation and the devices.

    Attributes:
        model: The model's name.
        optimizer: The optimizer's class, with the wrapped one: `AccumulatingOptimizer(Adam)`.
        parameters: Number of trainable parameters.
        strategy: The class of the strategy, or `""` without one.
        replicas: Number of replicas over all workers.
        worker: Which worker this is, counted from 0.
        workers: Number of workers.
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
    workers: int = 1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RunInfo":
        """Restores a `RunInfo` from JSON data."""
        return _restored(cls, data)


@dataclass(frozen=True)
class StepTime:
    """Where the time of one batch went, in milliseconds; the parts sum to the duration.

    Attributes:
        step: Number of the batch in the training, from 0.
        update: Number of the optimizer's update, from 0, or `None` if unknown.
        begins: Start time, relative to the start of the window.
        duration: Total time.
        input: Waiting for data.
        host: On the host, outside operations.
        compile: Tracing and compiling functions.
        compute: In operations on a device, and in Python code that they call.
        collective: In collectives with other replicas, including waiting for them.
        idle: The rest.
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
    """Each part's fraction of the total time, for terminal, report and advice."""
    total = sum(step.duration for step in steps) or 1.0
    return {part: sum(getattr(step, part) for step in steps) / total for part in PARTS}


@dataclass(frozen=True)
class OperationTime:
    """The time of one operation, over all of its executions.

    Attributes:
        name: Its name in the trace.
        kind: Its type, such as `MatMul`.
        layer: Its layer, or `""` if the trace doesn't say.
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
class LayerTime:
    """The self times of a layer's operations in the window, in milliseconds.

    Attributes:
        name: The layer; for operations outside of layers, what they belong to: the loss, the optimizer, collectives, or
            unknown.
        forward: In the forward pass.
        backward: In the backward pass.
        recompute: In the forward passes that `recompute` runs again.
        other: In neither.
        is_layer: Whether it is a layer.
        kind: The class of the layer, such as `Conv2D`, or `""` if unknown.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    other: float = 0.0
    is_layer: bool = True
    kind: str = ""

    @property
    def total(self) -> float:
        """The sum of all passes."""
        return self.forward + self.backward + self.recompute + self.other


COLLECTIVES, LOSS, OPTIMIZER = "collectives", "loss", "optimizer"
# The prefix in the names of oneDNN's variants of an operation.
VARIANT = re.compile(r"^_(Mkl)?(Native)?")
PASSES = ("forward", "backward", "recompute", "other")


@dataclass(frozen=True)
class KindTime:
    """The self time of all operations of a kind; `OperationTime` has the attributes."""

    kind: str
    count: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Communication:
    """The time of collectives in the window's batches, in milliseconds, added up over the devices of this process.

    Attributes:
        milliseconds: All of it, including waiting for other replicas.
        hidden: The part in which the same device computes.
    """

    milliseconds: float
    hidden: float

    @property
    def share(self) -> float:
        """The hidden fraction."""
        return self.hidden / self.milliseconds if self.milliseconds else 0.0


@dataclass(frozen=True)
class MemoryUse:
    """The memory in use over the window.

    Attributes:
        name: The allocator, or `"host"` for the whole process.
        batches: When, in batches: 12.5 is halfway through batch 12. Ascending.
        values: Bytes, one value per entry of `batches`.
    """

    name: str
    batches: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class PipelineTime:
    """How the stages of a pipeline overlap.

    Attributes:
        stages: Number of stages.
        microbatches: Number of micro-batches.
        bubble: The fraction of the time in which devices wait, between the first and the last operation of all stages,
            over all steps.
        ideal: The bubble of stages of equal time: (stages - 1) / (microbatches + stages - 1), with the micro-batches of
            one of a stage's devices.
    """

    stages: int
    microbatches: int
    bubble: float
    ideal: float


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        kind: The bottleneck: `"input"`, `"host"`, `"python"`, `"collective"`, `"compile"`, `"recompute"` or
            `"pipeline"`; in a step that computes, `"optimizer"`, `"loss"`, `"recurrent"`, `"normalization"` or
            `"compute"`; or `"none"`.
        text: What to do.
        evidence: The supporting measurements.
    """

    kind: str
    text: str
    evidence: str


@dataclass(frozen=True)
class ProfileSummary:
    """The summary of one trace window.

    Attributes:
        run: The run.
        steps: The window's batches in order.
        operations: The longest operations, in descending order.
        peak_memory: Peak memory in bytes by device or `"host"`, or `None` where unknown.
        advice: What to do first, or `None` if there were no steps.
        trace: The trace's folder, relative to the log directory.
        notes: Caveats: what is missing, and why.
        pipeline: How the stages of a pipeline overlap, or `None` without one.
        layers: The time of each layer, in descending order; empty where the trace names none.
        kinds: The time of each kind of operation, in descending order.
        communication: How much of collectives is hidden, or `None` without any.
        memory: The memory in use, by allocator where the trace has them, else of the process.
    """

    run: RunInfo = RunInfo()
    steps: tuple[StepTime, ...] = ()
    operations: tuple[OperationTime, ...] = ()
    peak_memory: Mapping[str, int | None] = field(default_factory=dict)
    advice: Advice | None = None
    trace: str = ""
    notes: tuple[str, ...] = ()
    pipeline: PipelineTime | None = None
    layers: tuple[LayerTime, ...] = ()
    kinds: tuple[KindTime, ...] = ()
    communication: Communication | None = None
    memory: tuple[MemoryUse, ...] = ()

    def per_step(self, operation: OperationTime) -> float:
        """An operation's mean milliseconds per step; its total if the window has no steps."""
        return operation.milliseconds / (len(self.steps) or 1)

    def to_dict(self) -> dict[str, Any]:
        """Converts the summary to JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ProfileSummary":
        """Restores a summary from the data of `to_dict`.

        Example:

        >>> summary = ProfileSummary(RunInfo("model"), (StepTime(0, 0, 0.0, 2.5, compute=2.5),))
        >>> ProfileSummary.from_dict(summary.to_dict()) == summary
        True
        """
        return _restored(cls, data)


def _restored(kind: Any, data: Any) -> Any:
    """What `asdict` has made JSON data of, by the type that it is annotated with."""
    inner = get_args(kind)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        values = {field.name: _restored(types[field.name], data[field.name]) for field in fields(kind)}
        return cast("Any", kind)(**values)
    if get_origin(kind) is tuple:
        return tuple(_restored(inner[0], value) for value in data)
    if get_origin(kind) is UnionType and data is not None:
        return _restored(inner[0], data)
    return data
