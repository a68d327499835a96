"""Recommends what to do first about training speed, with the supporting figures."""

import statistics
from collections.abc import Collection, Sequence

from keras_paragrad.distribution.gains import faster_policy, gains_from_xla
from keras_paragrad.distribution.names import kind_of_device
from keras_paragrad.profiling.analysis.events import Trace
from keras_paragrad.profiling.analysis.input_advice import about_input
from keras_paragrad.profiling.parts import shares_of
from keras_paragrad.profiling.summary import Advice, OperationTime, RunInfo, StepTime

# The share of the step from which a part is worth acting on. The host always has some work between operations, and some
# of its apparent time is operation threads starting.
WORTH = {"compile": 0.1, "input": 0.2, "collective": 0.25, "host": 0.5}
COMPUTE_BOUND = 0.4
_UNKNOWN = RunInfo()


def advise(
    steps: Sequence[StepTime],
    operations: Sequence[OperationTime],
    run: RunInfo = _UNKNOWN,
    compiling: float = 0.0,
    pipeline: str = "",
    stages: Collection[str] = (),
) -> Advice | None:
    """One recommendation, about the largest part of the step that is not compute.

    Args:
        steps: The batches.
        operations: The longest operations, in descending order.
        run: What was run.
        compiling: The milliseconds of all steps spent on retracing.
        pipeline: The slowest stage of the input pipeline, if known.
        stages: All of its stages, as the trace names them.

    Returns:
        The advice, or `None` if there are no steps.
    """
    total = sum(step.duration for step in steps)
    if not total:
        return None
    shares = shares_of(steps)
    spent = {
        "compile": compiling / total,
        "input": shares["input"],
        "collective": shares["collective"],
        # Time without any recorded event is spent in Python.
        "host": shares["host"] + shares["idle"],
    }
    excess = {kind: share / WORTH[kind] for kind, share in spent.items()}
    kind = max(excess, key=lambda kind: excess[kind])
    if excess[kind] < 1:
        return _about_computing(steps, operations, run)
    mean = total / len(steps)
    does = _DOES[kind] if kind != "host" else _outside_of_operations(shares)
    figures = f"{spent[kind]:.0%} of the step {does} ({spent[kind] * mean:.2f} of {mean:.2f} ms)"
    if kind == "input" and pipeline:
        figures += f", most of it in the pipeline's {pipeline}"
    return Advice(kind, about_input(stages) if kind == "input" else _what_to_do(kind, run), figures)


_DOES = {
    "compile": "goes into tracing functions again",
    "input": "waits for input",
    "collective": "waits for other replicas",
}


def _outside_of_operations(shares: dict[str, float]) -> str:
    """Uses the parts that the terminal and the report show, so that the host's figure is the same in all three."""
    return f"runs no operation: {shares['host']:.1%} on the host between operations, {shares['idle']:.1%} idle"


def _what_to_do(kind: str, run: RunInfo) -> str:
    if kind == "compile":
        return "Give all batches one shape: dataset.batch(n, drop_remainder=True), and pad sequences to few lengths."
    if kind == "collective":
        return "Take larger batches on each replica, or update less often: AccumulatingOptimizer(optimizer, steps=4)."
    compiles = not run.jit and gains_from_xla(_device_kind(run))
    if run.replicas > 1:
        # Plain Keras can't compile a step across replicas, and several steps per call gain nothing there.
        larger = "Take larger batches on each replica"
        return f"{larger}, or train with DistributedFit(jit=True), which compiles it." if compiles else f"{larger}."
    if compiles:
        return (
            "Compile the step, or run several in a call: model.compile(..., jit_compile=True, steps_per_execution=16)."
        )
    if run.steps_per_execution == 1:
        return "Run several batches in a call: model.compile(..., steps_per_execution=16); or take larger batches."
    return "Take larger batches, so that operations are longer than what lies between them."


def _about_computing(steps: Sequence[StepTime], operations: Sequence[OperationTime], run: RunInfo) -> Advice:
    total = sum(step.duration for step in steps)
    share = sum(step.compute for step in steps) / total
    median = statistics.median(step.duration for step in steps)
    figures = f"{share:.0%} of the step computes (median {median:.2f} ms)"
    if share < COMPUTE_BOUND or not operations:
        return Advice("none", "Nothing stands out.", figures)
    first = operations[0]
    where = f"{first.kind} in {first.layer}" if first.layer else first.kind
    figures += f", {first.share:.0%} of operations' time is {where}"
    kind = _device_kind(run)
    policy, _ = faster_policy(kind, [run.compute_capability] if kind == "GPU" else [])
    means = [
        "jit_compile=True" if gains_from_xla(kind) and not run.jit else "",
        f'keras.mixed_precision.set_global_policy("{policy}")' if policy and run.precision == "float32" else "",
    ]
    # CPU replicas on one machine share its cores.
    replicas = "more replicas" if kind in ("GPU", "TPU") else "more replicas, on other machines,"
    cheaper = " or ".join(each for each in means if each)
    return Advice("compute", f"The model is what takes the time; {cheaper or replicas} may make it cheaper.", figures)


def _device_kind(run: RunInfo) -> str:
    """The kind of device that holds the model; if the run doesn't say, GPU or TPU if its process had any."""
    kinds = [kind_of_device(device.rpartition("/device:")[2]) for device in run.devices]
    return run.device_kind or next((kind for kind in kinds if kind != "CPU"), "")


def milliseconds_compiling(trace: Trace) -> float:
    """The total time of calls that retraced a `tf.function`, in milliseconds.

    Args:
        trace: What was read from a file. A function's first call in it is not counted: it may have been traced before.
    """
    total = 0.0
    for calls in trace.functions.values():
        calls = sorted(calls)
        for (_, _, before), (begin, end, count) in zip(calls, calls[1:], strict=False):
            total += (end - begin) / 1e6 if count > before else 0.0
    return total
