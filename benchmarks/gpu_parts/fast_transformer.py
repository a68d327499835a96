"""A Transformer of 12 blocks: accumulation in bfloat16, norms, clipped updates and recomputation, to plain steps."""

from gpu_parts import fast_accumulation, fast_examples
from gpu_parts.case import MEASURED, Cases, Line, Machine
from gpu_parts.timing import batches, by_turns, compiled, large, ratios_in_words, sized
from keras_paragrad import recompute

cases = Cases()


@cases(
    "accumulation with Adam: the large model in bfloat16, k={}",
    200,
    {str(steps): {"steps": steps} for steps in (4, 16)},
)
def accumulates(machine: Machine, steps: int) -> Line:
    return fast_accumulation.accumulates(machine, large(machine), steps, "mixed_bfloat16")


@cases("norms and clipped updates: the large model", 200)
def per_example(machine: Machine) -> Line:
    return fast_examples.per_example(machine, large(machine))


@cases("recompute, every block of the large model", 120)
def recomputes(machine: Machine) -> Line:
    fits = {}
    for way in ("plain", "recompute"):
        model, rows = sized(machine, large(machine))
        compiled(machine, model, "adam")
        if way == "recompute":
            recompute(model, every=1)
        fits[way] = model, batches(model, rows // 2), ()
    took = by_turns(machine, fits, steps=5)
    return Line(ratios_in_words(took), MEASURED, {"milliseconds": took})
