"""JAX's clipping of each example by `vmap`, where JAX with a GPU is installed: the MLP of the other lines."""

import importlib.util
import os
import time
from typing import Any

import numpy as np
from harness import interleaved

from gpu_parts.case import MEASURED, Cases, Line, Machine

TENSORFLOW = False
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Those of `timing.SIZES`.
WIDTH, ROWS = (4096, 32), (8192, 16)
cases = Cases()


@cases("JAX, vmap(grad) clipped: MLP", 90)
def clipped(machine: Machine) -> Line:
    if importlib.util.find_spec("jax") is None:
        return Line("JAX isn't installed, so there is no row of it.", MEASURED)
    import jax

    kind = jax.default_backend()
    if not machine.cpu and kind != "gpu":
        return Line(f"JAX computes on the {kind.upper()} here, so there is no row of it.", MEASURED)
    from peers.per_example_jax import Weights, dense, ways

    def predict(weights: Any, x: Any) -> Any:
        for layer in weights[:-1]:
            x = jax.numpy.tanh(dense(layer, x))
        return dense(weights[-1], x)

    draw, width = Weights(), machine.size(*WIDTH)
    # All gradients at once take the memory of each; where they don't fit, fewer rows are compared.
    rows = min(machine.size(*ROWS), 2**33 // (4 * width * width))
    weights = [draw.layer(32, width), draw.layer(width, width), draw.layer(width, 10)]
    data = np.random.default_rng(0)
    x, y = data.normal(size=(rows, 32)).astype("float32"), data.integers(0, 10, rows)
    functions = ways(predict, x, y)
    runs = {way: timed(jax.jit(functions[way]), weights) for way in ("plain", "clipped: JAX vmap(grad)")}
    plain, took = interleaved(runs, machine.size(5, 1)).values()
    text = f"{took / plain:.2f} of its plain gradient, {plain:.2f} ms, for batches of {rows}"
    return Line(text, MEASURED, {"plain": plain, "clipped": took, "rows": rows})


def timed(function: Any, weights: Any, calls: int = 5):
    """A function that returns the milliseconds of a call."""
    import jax

    def run() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(function(weights))
        return (time.perf_counter() - began) / calls * 1e3

    return run
