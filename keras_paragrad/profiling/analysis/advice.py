"""Recommends what to do first about training speed, with the supporting figures.

Each function decorated with `recommendation` looks for one cause of lost time. To add a cause, add a function here.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keras_paragrad.distribution.decisions.computation import faster_policy, gains_from_xla
from keras_paragrad.distribution.names import kind_of_device
from keras_paragrad.profiling.analysis.events import Trace
from keras_paragrad.profiling.analysis.operations import Operation, slowest_of_the_pipeline, stages_of_the_pipeline
from keras_paragrad.profiling.summary import Advice, OperationTime, RunInfo, StepTime, shares_of

COMPUTE_BOUND = 0.4
# How many milliseconds a step takes at least that other machines may shorten: they exchange gradients in each.
WORTH_A_NETWORK = 100.0


@dataclass(frozen=True)
class Evidence:
    """What is known about a trace window.

    Attributes:
        steps: The batches.
        operations: The longest operations, in descending order.
        run: What was run.
        trace: The events of the trace.
        recorded: All operations in the trace, also those of the input pipeline.
    """

    steps: Sequence[StepTime]
    operations: Sequence[OperationTime] = ()
    run: RunInfo = RunInfo()
    trace: Trace = field(default_factory=Trace)
    recorded: Sequence[Operation] = ()

    @property
    def total(self) -> float:
        """The milliseconds of all batches."""
        return sum(step.duration for step in self.steps)

    @functools.cached_property
    def shares(self) -> dict[str, float]:
        """The share of the total of each part of a step."""
        return shares_of(self.steps)

    @property
    def device_kind(self) -> str:
        """The kind of device that holds the model; if the run doesn't say, GPU or TPU if its process had any."""
        kinds = [kind_of_device(device.rpartition("/device:")[2]) for device in self.run.devices]
        return self.run.device_kind or next((kind for kind in kinds if kind != "CPU"), "")


class Finding(NamedTuple):
    """Time lost to one cause.

    Attributes:
        share: The share of the step's time.
        cause: What the step does in this time, after "30% of the step".
        text: What to do about it.
        detail: What follows the figures.
    """

    share: float
    cause: str
    text: str
    detail: str = ""


_RECOMMENDATIONS: dict[str, tuple[float, Callable[[Evidence], Finding]]] = {}


def recommendation(kind: str, *, worth: float) -> Callable[..., Callable[[Evidence], Finding]]:
    """Decorates a function that looks for a cause of lost time.

    Args:
        kind: What `Advice.kind` says.
        worth: The share of the step from which the cause is worth acting on.
    """

    def add(find: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
        _RECOMMENDATIONS[kind] = worth, find
        return find

    return add


def advise(evidence: Evidence) -> Advice | None:
    """One recommendation: about the cause that most exceeds what is worth acting on, or about computing.

    Returns:
        The advice, or `None` if there are no steps.
    """
    if not evidence.total:
        return None
    found = {kind: find(evidence) for kind, (_, find) in _RECOMMENDATIONS.items()}
    excess = {kind: found[kind].share / worth for kind, (worth, _) in _RECOMMENDATIONS.items()}
    kind = max(excess, key=lambda kind: excess[kind])
    if excess[kind] < 1:
        return _about_computing(evidence)
    share, cause, text, detail = found[kind]
    mean = evidence.total / len(evidence.steps)
    return Advice(kind, text, f"{share:.0%} of the step {cause} ({share * mean:.2f} of {mean:.2f} ms){detail}")


@recommendation("compile", worth=0.1)
def _compiling(evidence: Evidence) -> Finding:
    lines = {marker.line for marker in evidence.trace.markers}
    if any(call.traced > 1 for line in lines for call in evidence.trace.compiling(line)):
        text = "Give all batches one shape: dataset.batch(n, drop_remainder=True), and pad sequences to few lengths."
    else:
        last = max((step.step for step in evidence.steps if step.compile), default=0)
        text = f"That is once, at a function's first call. Trace later batches: ProfileSchedule(skip_first={last + 1})."
    return Finding(evidence.shares["compile"], "is spent compiling functions", text)


@recommendation("input", worth=0.2)
def _waiting_for_input(evidence: Evidence) -> Finding:
    slowest = slowest_of_the_pipeline(evidence.recorded)
    detail = f", most of it in the pipeline's {slowest}" if slowest else ""
    return Finding(evidence.shares["input"], "waits for input", _about_input(evidence), detail)


def _about_input(evidence: Evidence) -> str:
    """Only what the pipeline doesn't do yet."""
    stages = stages_of_the_pipeline(evidence.recorded)
    if "Generator" in stages:
        return (
            "Python prepares one batch at a time. With a PyDataset, prepare several in parallel: "
            "super().__init__(workers=4, use_multiprocessing=True). A generator can't run in parallel: turn it into a "
            "keras.utils.PyDataset with workers, or a tf.data.Dataset that reads and maps without Python."
        )
    # TensorFlow itself runs some maps in parallel: these are named ParallelMap in the trace, and are not advised again.
    parallel = bool(stages) and "Map" not in stages
    prefetched = "Prefetch" in stages
    what = [*([] if prefetched else ["prefetch"]), *([] if parallel else ["prepare batches in parallel"])]
    cached = any("Cache" in stage for stage in stages)
    if not what:
        cache = "" if cached else ".cache() what fits into memory, "
        first = "The pipeline already prefetches, and has no sequential map: "
        return f"{first}{cache}make its slowest stage cheaper, or do that work once, before training."
    map_in_parallel = "" if parallel else ".map(f, num_parallel_calls=tf.data.AUTOTUNE)"
    calls = f"dataset{map_in_parallel}{'' if prefetched else '.prefetch(tf.data.AUTOTUNE)'}"
    sentence = " and ".join(what)
    return f"{sentence[0].upper()}{sentence[1:]}: {calls}{'.' if cached else '; .cache() what fits into memory.'}"


@recommendation("collective", worth=0.25)
def _waiting_for_replicas(evidence: Evidence) -> Finding:
    text = "Use larger batches per replica, or update less often: AccumulatingOptimizer(optimizer, steps=4)."
    return Finding(evidence.shares["collective"], "waits for other replicas", text)


# The host always has some work between operations, and some of its apparent time is operation threads starting.
@recommendation("host", worth=0.5)
def _outside_of_operations(evidence: Evidence) -> Finding:
    shares = evidence.shares
    # The parts that the terminal and the report show, so that the host's figure is the same in all three.
    cause = f"runs no operation: {shares['host']:.1%} on the host between operations, {shares['idle']:.1%} idle"
    # Time without any recorded event is spent in Python.
    return Finding(shares["host"] + shares["idle"], cause, _about_the_host(evidence))


def _about_the_host(evidence: Evidence) -> str:
    run = evidence.run
    compiles = not run.jit and gains_from_xla(evidence.device_kind)
    if run.replicas > 1:
        # Plain Keras can't compile a step across replicas, and several steps per call gain nothing there.
        compiled = ", or train with DistributedFit(jit=True), which compiles the step" if compiles else ""
        return f"Use larger batches per replica{compiled}."
    if compiles:
        return (
            "Compile the step, or run several per call: model.compile(..., jit_compile=True, steps_per_execution=16)."
        )
    if run.steps_per_execution == 1:
        return "Run several batches per call: model.compile(..., steps_per_execution=16); or use larger batches."
    return "Use larger batches, so that operations take longer than the gaps between them."


def _about_computing(evidence: Evidence) -> Advice:
    steps, run = evidence.steps, evidence.run
    share = sum(step.compute for step in steps) / evidence.total
    median = statistics.median(step.duration for step in steps)
    figures = f"{share:.0%} of the step computes (median {median:.2f} ms)"
    if share < COMPUTE_BOUND or not evidence.operations:
        return Advice("none", "Nothing stands out.", figures)
    first = evidence.operations[0]
    where = f"{first.kind} in {first.layer}" if first.layer else first.kind
    figures += f", {first.share:.0%} of operations' time is {where}"
    kind = evidence.device_kind
    policy, _ = faster_policy(kind, [run.compute_capability] if kind == "GPU" else [])
    means = [
        "jit_compile=True" if gains_from_xla(kind) and not run.jit else "",
        f'keras.mixed_precision.set_global_policy("{policy}")' if policy and run.precision == "float32" else "",
    ]
    if kind in ("GPU", "TPU"):
        means.append("" if any(means) else "more replicas")
    elif median >= WORTH_A_NETWORK:
        # CPU replicas on one machine share its cores.
        means.append("more replicas, on other machines,")
    helps = " or ".join(each for each in means if each)
    text = f"{helps} may help" if helps else "nothing else stands out"
    return Advice("compute", f"The model itself takes the time; {text}.", figures)
