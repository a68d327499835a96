"""Mixed precision: no further from whole batches than its own rounding takes them from float32."""

import keras

from gpu_parts.case import FAILS, HOLDS, Cases, Line, Machine
from gpu_parts.models import difference, made
from gpu_parts.right import MICRO_BATCH, STEPS, compiled, fit, on_whole_batches, optimizer
from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch

POLICIES = {
    f"{policy}{suffix}": {"policy": policy, "jit": jit}
    for policy in ("mixed_float16", "mixed_bfloat16")
    for suffix, jit in (("", False), (", XLA", True))
}
cases = Cases()


@cases("AccumulatingOptimizer and microbatch, {}", variants=POLICIES)
def rounds_as_the_policy_does(machine: Machine, policy: str, jit: bool) -> Line:
    size = STEPS * MICRO_BATCH
    exact = on_whole_batches(machine, "MLP", jit, size)
    keras.config.set_dtype_policy(policy)
    try:
        whole = on_whole_batches(machine, "MLP", jit, size)
        accumulating = compiled(machine, made("MLP"), AccumulatingOptimizer(optimizer(), STEPS), jit)
        sliced = compiled(machine, made("MLP"), optimizer(), jit)
        microbatch(sliced, size=MICRO_BATCH)
        ours = fit(accumulating, MICRO_BATCH, ExactAccumulation()), fit(sliced, size)
    finally:
        keras.config.set_dtype_policy("float32")
    rounding, error = difference(whole, exact), max(difference(each, whole) for each in ours)
    # Both ways round, whole and cut up.
    text = f"{error:.1e} from whole batches, which rounding takes {rounding:.1e} from float32"
    return Line(text, HOLDS if error <= 2 * rounding else FAILS, {"error": error, "rounding": rounding})
