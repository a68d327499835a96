"""Batches in slices, and layers that run again, against whole batches."""

import numpy as np

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import difference, made
from gpu_parts.right import (
    LIMIT,
    MICRO_BATCH,
    OF_ALL,
    XLA,
    compiled,
    fit,
    on_whole_batches,
    optimizer,
    optimizer_in_words,
)
from keras_paragrad import microbatch, recompute

cases = Cases()


@cases("microbatch, uneven, weighted: {}", variants=OF_ALL)
def slices(machine: Machine, name: str, jit: bool) -> Line:
    whole = on_whole_batches(machine, name, jit, 2 * MICRO_BATCH)
    ours = compiled(machine, made(name), optimizer(name), jit)
    microbatch(ours, size=MICRO_BATCH - 1)
    return check(difference(fit(ours, 2 * MICRO_BATCH), whole), LIMIT, optimizer_in_words(name))


@cases("recompute, with dropout{}", variants=XLA)
def recomputes(machine: Machine, jit: bool) -> Line:
    def weights(recomputed: bool) -> list[np.ndarray]:
        made_with_dropout = made("Transformer", dropout=0.3, blocks=machine.size(2, 1))
        model = compiled(machine, made_with_dropout, optimizer(), jit)
        if recomputed:
            recompute(model, every=1)
        return fit(model, MICRO_BATCH, rows=3 * MICRO_BATCH)

    return check(difference(weights(recomputed=True), weights(recomputed=False)), LIMIT)
