"""The hardware, the plan for it, and its choices of XLA and precision beside what a step measures."""

import contextlib
import io

import keras
import tensorflow as tf

from gpu_parts.case import FAILS, HOLDS, MEASURED, Cases, Line, Machine
from gpu_parts.timing import milliseconds_of_steps
from keras_paragrad import DistributedFit
from keras_paragrad.distribution.diagnosis import diagnose
from keras_paragrad.distribution.hardware import detect

cases = Cases()


@cases("detection")
def detection(machine: Machine) -> Line:
    hardware = detect()
    used = hardware.gpus or hardware.of_kind("CPU")
    first = used[0]
    gibibytes = (first.memory_bytes or 0) / 2**30
    capability = ".".join(map(str, first.compute_capability or ()))
    name = first.description or "no name"
    text = f"{len(used)} {first.kind}: {name}, {gibibytes:.1f} GiB, capability {capability or '-'}"
    known = bool(first.memory_bytes) and (machine.cpu or bool(first.description and capability))
    found = {
        "count": len(used),
        "name": first.description,
        "memory_bytes": first.memory_bytes,
        "capability": capability,
    }
    return Line(text, HOLDS if known else FAILS, found)


# In the small form it would import TensorFlow once more; its tests do.
@cases("doctor", 150, small=False)
def doctor(machine: Machine) -> Line:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = diagnose(120, print)
    last = printed.getvalue().strip().splitlines()[-1]
    return Line(last, HOLDS if status == 0 else FAILS, {"printed": printed.getvalue()})


@cases("the plan")
def plan(machine: Machine) -> Line:
    dist = DistributedFit()
    lines = str(dist.explain()).splitlines()
    decided = {decision.name: str(decision.value) for decision in dist.plan}
    return Line("; ".join(lines[1:3]), MEASURED, {"decisions": decided, "explained": "\n".join(lines)})


@cases("the plan's XLA and precision, by the step", 120)
def choices(machine: Machine) -> Line:
    """A step in each precision, with XLA and without, beside what the plan takes and advises."""
    decided = DistributedFit().plan
    took = milliseconds_of_steps(
        machine,
        {
            f"{policy}{', XLA' if jit else ''}": (policy, jit)
            for policy in machine.size(("float32", "mixed_bfloat16", "mixed_float16"), ("float32",))
            for jit in (False, True)
        },
    )
    shown = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in took.items())
    keras.config.set_dtype_policy("float32")
    text = f"takes jit {decided.jit.value}, {decided.precision.value} ({decided.precision.reason}); measured: {shown}"
    by_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return Line(text, MEASURED, {"milliseconds": took, "tensor_float_32": by_tf32})
