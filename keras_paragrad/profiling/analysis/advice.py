"""Recommends what to do first about training speed, with the supporting figures.

Each function decorated with `recommendation` looks for one cause of lost time. To add a cause, add a function here.
"""

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keras_paragrad.distribution.decisions import faster_policy, gains_from_xla
from keras_paragrad.distribution.hardware import kind_of_device
from keras_paragrad.profiling.analysis.events import NANOSECONDS, PYTHON_KINDS, Coverage, Trace
from keras_paragrad.profiling.analysis.operations import LayerNames, Operation, input_stages, slowest_input_stage
from keras_paragrad.profiling.summary import (
    LOSS,
    OPTIMIZER,
    VARIANT,
    Advice,
    Communication,
    LayerTime,
    OperationTime,
    PipelineTime,
    RunInfo,
    StepTime,
    shares_of,
)

_COMPUTE_BOUND = 0.4
# Operations that are named as what calls Python.
_MOST_NAMED = 3
# Calls of Python into TensorFlow in a step from which Python is said to start its operations.
_EAGER_CALLS = 20
# Runs of an operation in a step from which it is said to be in a loop.
_LOOPED = 8
# By how the class of a layer begins: what makes such layers cheaper.
_CHEAPER = {
    "Conv": "fewer filters, larger strides or SeparableConv2D",
    "SeparableConv": "fewer filters or larger strides",
    "Depthwise": "fewer filters or larger strides",
    "Dense": "fewer units",
    "EinsumDense": "fewer heads, or shorter sequences",
    "MultiHeadAttention": "shorter sequences, as attention compares each position with all",
}


@dataclass(frozen=True)
class Evidence:
    """The measurements of a trace window."""

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

    def part_of(self, layers: Iterable[LayerTime]) -> float:
        """The fraction of the operations' time that some layers take."""
        return sum(layer.total for layer in layers) / (sum(layer.total for layer in self.layers) or 1.0)

    def share_of(self, layers: Iterable[LayerTime]) -> float:
        """The fraction of the step's time that some layers take."""
        return self.part_of(layers) * self.shares["compute"]

    def outside(self, name: str) -> list[LayerTime]:
        """The time of operations outside of layers, by what they belong to."""
        return [layer for layer in self.layers if layer.name == name and not layer.is_layer]

    @property
    def longest(self) -> LayerTime | None:
        """The layer that takes longest."""
        return next((layer for layer in self.layers if layer.is_layer), None)

    @property
    def gains_from_xla(self) -> bool:
        """Whether XLA, which fuses small operations, is known to help, and isn't in use."""
        return not self.run.jit and gains_from_xla(self.device_kind)


class Finding(NamedTuple):
    """Time lost to one cause.

    Attributes:
        share: The fraction of the step's time.
        cause: What the step does in this time; completes "30% of the step".
        text: What to do about it.
        detail: Appended to the figures.
    """

    share: float
    cause: str
    text: str
    detail: str = ""


_RECOMMENDATIONS: dict[str, tuple[float, Callable[[Evidence], Finding]]] = {}


def recommendation(kind: str, *, worth: float) -> Callable[..., Callable[[Evidence], Finding]]:
    """Decorates a function that measures the time lost to a cause.

    Args:
        kind: The `Advice.kind`.
        worth: The fraction of the step from which the cause is worth acting on.
    """

    def add(find: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
        _RECOMMENDATIONS[kind] = worth, find
        return find

    return add


def advise(evidence: Evidence) -> Advice | None:
    """Recommends what to do about the cause most above its threshold, or about computing; `None` without steps."""
    if not evidence.total:
        return None
    findings = {kind: find(evidence) for kind, (_, find) in _RECOMMENDATIONS.items()}
    excess = {kind: findings[kind].share / worth for kind, (worth, _) in _RECOMMENDATIONS.items()}
    kind = max(excess, key=lambda kind: excess[kind])
    if excess[kind] < 1:
        return _about_computing(evidence)
    share, cause, text, detail = findings[kind]
    mean = evidence.total / len(evidence.steps)
    return Advice(kind, text, f"{share:.0%} of the step {cause} ({share * mean:.2f} of {mean:.2f} ms){detail}")


@recommendation("compile", worth=0.1)
def _compiling(evidence: Evidence) -> Finding:
    """Time in which functions are compiled."""
    lines = {marker.line for marker in evidence.trace.markers}
    if any(int(call.stats["tracing_count"]) > 1 for line in lines for call in evidence.trace.compiling(line)):
        text = "Give all batches one shape: dataset.batch(n, drop_remainder=True), and pad sequences to few lengths."
    else:
        last = max((step.step for step in evidence.steps if step.compile), default=0)
        text = f"That is once, at a function's first call. Trace later batches: ProfileSchedule(skip_first={last + 1})."
    return Finding(evidence.shares["compile"], "is spent compiling functions", text)


@recommendation("input", worth=0.2)
def _waiting_for_input(evidence: Evidence) -> Finding:
    slowest = slowest_input_stage(evidence.recorded)
    detail = f", most of it in the pipeline's {slowest}" if slowest else ""
    return Finding(evidence.shares["input"], "waits for input", _about_input(evidence), detail)


def _about_input(evidence: Evidence) -> str:
    """Advises improvements that the pipeline lacks."""
    stages = input_stages(evidence.recorded)
    if "Generator" in stages:
        return (
            "Python prepares one batch at a time. With a PyDataset, prepare several in parallel: "
            "super().__init__(workers=4, use_multiprocessing=True). A generator can't run in parallel: turn it into a "
            "keras.utils.PyDataset with workers, or a tf.data.Dataset that reads and maps without Python."
        )
    if "MapAndBatch" in stages:
        # The trace is the same with num_parallel_calls and without, and the stage prepares the next batch on its own.
        cache = "" if any("Cache" in stage for stage in stages) else ".cache() what fits into memory, or "
        return (
            "Map in parallel: dataset.map(f, num_parallel_calls=n), with the number of cores as n. If it does already, "
            f"{cache}make f cheaper. TensorFlow runs .map(f) and .batch() as one stage, which works ahead of the step, "
            "so to prefetch gains little."
        )
    # Maps that TensorFlow itself runs in parallel are named ParallelMap in the trace.
    parallel, prefetched = bool(stages) and "Map" not in stages, "Prefetch" in stages
    cached = any("Cache" in stage for stage in stages)
    if parallel and prefetched:
        cache = "" if cached else ".cache() what fits into memory, "
        first = "The pipeline already prefetches, and has no sequential map: "
        return f"{first}{cache}make its slowest stage cheaper, or do that work once, before training."
    missing = " and ".join(["prefetch"] * (not prefetched) + ["prepare batches in parallel"] * (not parallel))
    calls = "" if parallel else ".map(f, num_parallel_calls=tf.data.AUTOTUNE)"
    calls += "" if prefetched else ".prefetch(tf.data.AUTOTUNE)"
    return f"{missing.capitalize()}: dataset{calls}{'.' if cached else '; .cache() what fits into memory.'}"


@recommendation("python", worth=0.1)
def _running_python(evidence: Evidence) -> Finding:
    """Time of Python code: in a step that runs eagerly, or that a step's operations call."""
    trace, shares = evidence.trace, evidence.shares
    if (calls := _eager_calls(evidence)) >= _EAGER_CALLS:
        text = (
            "Run the step as a graph: model.compile(...) without run_eagerly=True, and no "
            "tf.config.run_functions_eagerly(True); in a loop of your own, decorate the step with @tf.function."
        )
        cause = f"runs eagerly: Python starts each operation, in {calls:.0f} calls of TensorFlow"
        return Finding(shares["host"] + shares["idle"] + shares["compute"], cause, text)
    names = [name for name, _, kind in (run.rpartition(":") for run in trace.runs) if kind in PYTHON_KINDS]
    layers = LayerNames([layer.name for layer in evidence.layers if layer.is_layer], names)
    callers = {layers.of(name) or "/".join(name.split("/")[-3:-1]) for name in names}
    text = (
        f"Write what {' and '.join(sorted(callers)[:_MOST_NAMED])} calls in Python (tf.numpy_function, tf.py_function) "
        "with TensorFlow's operations or keras.ops: XLA, a GPU or steps_per_execution don't make Python faster. What "
        "needs the data alone, compute before training, or in dataset.map(...).prefetch(tf.data.AUTOTUNE)."
    )
    share = Coverage(trace.python).total / NANOSECONDS / evidence.total
    return Finding(min(share, 1.0), "waits for Python code that its operations call", text)


def _eager_calls(evidence: Evidence) -> float:
    """How often Python calls TensorFlow in a step, on average, if no step calls a `tf.function`."""
    calls, trace = 0, evidence.trace
    for marker in trace.markers:
        functions = [call.begin for call in trace.functions if call.line == marker.line]
        if any(marker.begin <= begin < marker.end for begin in functions):
            return 0.0
        calls += sum(marker.begin <= begin < marker.end for begin, _ in trace.python_calls[marker.line])
    return calls / len(evidence.steps)


@recommendation("collective", worth=0.25)
def _waiting_for_replicas(evidence: Evidence) -> Finding:
    text = f"Use larger batches per replica, or {_update_less_often(evidence)}."
    found = evidence.communication
    detail = f", {found.share:.0%} of collectives being hidden behind compute" if found else ""
    return Finding(evidence.shares["collective"], "waits for other replicas", text, detail)


@recommendation("recompute", worth=0.15)
def _recomputing(evidence: Evidence) -> Finding:
    share = evidence.share_of(LayerTime("", recompute=layer.recompute) for layer in evidence.layers)
    costliest = max(evidence.layers, key=lambda layer: layer.recompute, default=None)
    text = f"If memory allows, recompute fewer layers; {costliest.name} costs most." if costliest else ""
    return Finding(share, "computes forward passes a second time", text)


@recommendation("optimizer", worth=0.3)
def _updating(evidence: Evidence) -> Finding:
    """Time of the optimizer, which is the same for a batch of any size."""
    text = (
        f"{_compile_first(evidence)}Use larger batches, or {_update_less_often(evidence)}. An update takes as long for "
        "a batch of any size. Optimizers that keep less for each weight take less time: SGD, Lion."
    )
    return Finding(evidence.share_of(evidence.outside(OPTIMIZER)), "updates the weights", text)


@recommendation("loss", worth=0.2)
def _computing_the_loss(evidence: Evidence) -> Finding:
    """Time of the loss's operations, outside of layers."""
    longest = evidence.longest
    text = (
        f"{_compile_first(evidence)}Predict fewer classes, as of a smaller vocabulary, or fewer positions: the loss "
        "and the layer before it take time for each."
    )
    detail = (
        f"; the layer that takes longest is {_named(longest)}, {evidence.part_of([longest]):.0%}" if longest else ""
    )
    return Finding(evidence.share_of(evidence.outside(LOSS)), "computes the loss", text, detail)


@recommendation("recurrent", worth=0.3)
def _recurring(evidence: Evidence) -> Finding:
    """Time in the loops of recurrent layers, whose passes compute little."""
    kinds = {layer.name: layer.kind for layer in evidence.layers if layer.is_layer}
    names = LayerNames(kinds, [operation.name for operation in evidence.operations])
    times: dict[str, float] = defaultdict(float)
    turns = 0
    for operation in evidence.operations:
        # The loop that a layer makes, and not one around it, as over micro-batches.
        before, loop, _ = operation.name.rpartition("/while/")
        layer = names.of(before + loop)
        if layer and operation.count >= _LOOPED * len(evidence.steps):
            times[layer] += operation.share
            turns = max(turns, operation.count // len(evidence.steps))
    longest = max(times, key=lambda layer: times[layer], default="")
    cudnn = " cuDNN computes LSTM and GRU at once with their default activations, dropout and unroll."
    text = (
        f"Use larger batches, or shorter sequences: {longest} computes one time step after another, {turns} in "
        f"all, which take less than twice as long for twice the rows.{cudnn if evidence.device_kind == 'GPU' else ''}"
    )
    share = sum(times.values()) * evidence.shares["compute"]
    return Finding(share, "is in the loops of recurrent layers", text)


@recommendation("normalization", worth=0.25)
def _normalizing(evidence: Evidence) -> Finding:
    """Time of normalization layers."""
    layers = [layer for layer in evidence.layers if "Normalization" in layer.kind]
    kinds = " or ".join(sorted({layer.kind for layer in layers}))
    text = (
        f"{_compile_first(evidence)}Normalize after fewer layers, or smaller outputs: each {kinds} reads and writes "
        "all activations several times."
    )
    detail = f"; the longest is {layers[0].name}, {evidence.part_of(layers[:1]):.0%}" if layers else ""
    return Finding(evidence.share_of(layers), "normalizes activations", text, detail)


def _update_less_often(evidence: Evidence) -> str:
    if "Accumul" in evidence.run.optimizer:
        return "take more batches for an update"
    return "update less often: AccumulatingOptimizer(optimizer, steps=4)"


def _compile_first(evidence: Evidence) -> str:
    how = "DistributedFit(jit=True)" if evidence.run.replicas > 1 else "model.compile(..., jit_compile=True)"
    return f"Fuse the operations: {how}. " if evidence.gains_from_xla else ""


def _named(layer: LayerTime) -> str:
    return f"{layer.name} ({layer.kind})" if layer.kind else layer.name


@recommendation("pipeline", worth=0.3)
def _waiting_for_stages(evidence: Evidence) -> Finding:
    """Time in which a pipeline's stages wait for each other, while others compute."""
    times = evidence.pipeline
    if times is None:
        return Finding(0.0, "", "")
    more = f"Cut batches into more micro-batches: Pipeline(microbatches={2 * times.microbatches})."
    balance = "Stages differ in time: name the last layers of shorter ones, as in Pipeline(cuts=[...])."
    detail = f"; stages of equal time would wait {times.ideal:.0%}"
    text = balance if times.bubble > 1.5 * times.ideal else more
    return Finding(times.bubble * evidence.shares["compute"], "has stages wait for each other", text, detail)


# The host always works a little between operations, and starting their threads counts as its time.
@recommendation("host", worth=0.5)
def _outside_of_operations(evidence: Evidence) -> Finding:
    """Time in which neither operations run nor input is awaited."""
    shares, run = evidence.shares, evidence.run
    if run.replicas > 1:
        # Keras alone can't compile a step across replicas, and several steps per call gain nothing there.
        text = "Use larger batches per replica."
        if evidence.gains_from_xla:
            text = "Use larger batches per replica, or compile the step: train with DistributedFit(jit=True)."
    elif evidence.gains_from_xla:
        how = "model.compile(..., jit_compile=True, steps_per_execution=16)"
        text = f"Compile the step, or run several per call: {how}."
    elif run.steps_per_execution == 1:
        text = "Run several batches per call: model.compile(..., steps_per_execution=16); or use larger batches."
    else:
        text = "Use larger batches, so that operations take longer than the gaps between them."
    # The two parts that the terminal and the report show. Idle time is Python's.
    cause = f"runs no operation: {shares['host']:.1%} on the host between operations, {shares['idle']:.1%} idle"
    return Finding(shares["host"] + shares["idle"], cause, text)


def _about_computing(evidence: Evidence) -> Advice:
    """The recommendation where no cause of lost time stands out."""
    steps = evidence.steps
    share = sum(step.compute for step in steps) / evidence.total
    median = statistics.median(step.duration for step in steps)
    figures = f"{share:.0%} of the step computes (median {median:.2f} ms)"
    if share < _COMPUTE_BOUND or not evidence.operations:
        return Advice("none", "Nothing stands out.", figures)
    first = evidence.operations[0]
    kind_of_first = VARIANT.sub("", first.kind)
    where = f"{kind_of_first} in {first.layer}" if first.layer else kind_of_first
    figures += f", {first.share:.0%} of operations' time is {where}"
    layer, run, kind = evidence.longest, evidence.run, evidence.device_kind
    policy, _ = faster_policy(kind, [run.compute_capability] if kind == "GPU" else [])
    measures = ["model.compile(..., jit_compile=True)"] if evidence.gains_from_xla else []
    if policy and run.precision == "float32":
        measures.append(f'keras.mixed_precision.set_global_policy("{policy}")')
    if kind in ("GPU", "TPU") and not measures:
        measures.append(f"train on more {kind}s, with DistributedFit")
    if layer:
        figures += f"; the layer that takes longest is {_named(layer)}, {evidence.part_of([layer]):.0%}"
        measures.append(_cheaper(evidence, layer))
    text = "; or ".join(measures) or "compute less, or train on a GPU"
    return Advice("compute", f"The model itself takes the time: {text}.", figures)


def _cheaper(evidence: Evidence, layer: LayerTime) -> str:
    """Which layers to make cheaper, and how."""
    alike = [other for other in evidence.layers if other.is_layer and other.kind == layer.kind != ""]
    batches = len(evidence.steps)
    passes = f"{layer.forward / batches:.1f} ms forward, {layer.backward / batches:.1f} ms backward"
    where = f"{_named(layer)} is the longest, with {passes}"
    if len(alike) > 1:
        where = f"{layer.kind} layers take {evidence.part_of(alike):.0%} of it; {where}"
    how = next((how for kind, how in _CHEAPER.items() if layer.kind.startswith(kind)), "a smaller one")
    elsewhere = "" if evidence.device_kind in ("GPU", "TPU") else ", or train on a GPU"
    return f"{where}. Compute less there: {how}{elsewhere}"
