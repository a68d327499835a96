"""Accumulation over micro-batches, against whole batches."""

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import difference, made
from gpu_parts.right import (
    LIMIT,
    MICRO_BATCH,
    OF_ALL,
    STEPS,
    compiled,
    fit,
    on_whole_batches,
    optimizer,
    optimizer_in_words,
)
from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

cases = Cases()


@cases("AccumulatingOptimizer, uneven, weighted: {}", variants=OF_ALL)
def accumulates(machine: Machine, name: str, jit: bool) -> Line:
    whole = on_whole_batches(machine, name, jit, STEPS * MICRO_BATCH)
    ours = compiled(machine, made(name), AccumulatingOptimizer(optimizer(name), STEPS), jit)
    return check(difference(fit(ours, MICRO_BATCH, ExactAccumulation()), whole), LIMIT, optimizer_in_words(name))
