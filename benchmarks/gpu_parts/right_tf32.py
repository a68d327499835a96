"""How far TensorFloat-32, which TensorFlow uses unless told otherwise, takes steps and norms from their references."""

import keras
import tensorflow as tf

from gpu_parts import right_accumulation, right_examples
from gpu_parts.case import MEASURED, Cases, Line, Machine
from gpu_parts.models import difference
from gpu_parts.right import MICRO_BATCH, STEPS, on_whole_batches

cases = Cases()


def with_tensor_float_32(run, *arguments):
    """Runs a function with TensorFloat-32 on, as TensorFlow has it."""
    tf.config.experimental.enable_tensor_float_32_execution(True)
    try:
        keras.utils.clear_session()
        return run(*arguments)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(False)


@cases("TensorFloat-32: {}", variants={name: {"name": name} for name in ("MLP", "CNN", "Transformer")})
def how_far(machine: Machine, name: str) -> Line:
    size = STEPS * MICRO_BATCH
    jit = not machine.eager
    exact = on_whole_batches(machine, name, jit, size)
    rounded = with_tensor_float_32(on_whole_batches, machine, name, jit, size)
    steps = with_tensor_float_32(right_accumulation.accumulates, machine, name, jit)
    norms = with_tensor_float_32(right_examples.norms_and_gradients, machine, name, jit)
    rounding = difference(rounded, exact)
    text = (
        f"accumulation is {steps.values['error']:.1e} from whole batches, norms and gradients are "
        f"{norms.values['error']:.1e} from a loop; whole batches themselves are {rounding:.1e} from those in float32"
    )
    values = {"steps": steps.values["error"], "examples": norms.values["error"], "rounding": rounding}
    return Line(text, MEASURED, values)
