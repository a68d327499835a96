"""Training on two devices, against one of them on whole batches; or a refusal that says what to do."""

from dataclasses import replace

import keras
import numpy as np
import tensorflow as tf

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import data_for, difference
from gpu_parts.right import LIMIT, MICRO_BATCH, ROWS, STEPS, compiled, optimizer
from keras_paragrad import AccumulatingOptimizer, DistributedFit
from keras_paragrad.distribution import Pipeline

# After a collective has failed, every later one in the process does.
ALONE, DEVICES, REFUSES = True, 2, True
XLA = {"": {"jit": False}, ", XLA": {"jit": True}}
cases = Cases()


def model() -> keras.Model:
    """A model of two stages, with weights large enough to be cut into shards."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,))
    hidden = keras.layers.Dense(128, activation="tanh")(inputs)
    hidden = keras.layers.Dense(128, activation="tanh")(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


def trained(machine: Machine, dist: DistributedFit | None, jit: bool, steps: int = 1) -> list[np.ndarray]:
    """The weights after two epochs of uneven, weighted, clipped batches; alone, those of whole windows."""
    with dist.scope() if dist else tf.device(None):
        made = model()
        by = AccumulatingOptimizer(optimizer(), steps) if dist and steps > 1 else optimizer()
        compiled(machine if dist is None else replace(machine, eager=False), made, by, jit)
    x, y, weights = data_for(made, ROWS)
    size = MICRO_BATCH if dist else MICRO_BATCH * steps
    arguments = {"epochs": 2, "verbose": 0, "shuffle": False, "sample_weight": weights}
    if dist:
        dist.fit(made, x, y, batch_size=size, **arguments)
    else:
        made.fit(x, y, size, **arguments)
    return made.get_weights()


def compared(machine: Machine, dist: DistributedFit, jit: bool, steps: int = 1) -> Line:
    """How far `dist` ends from one device."""
    ours, alone = trained(machine, dist, jit, steps), trained(machine, None, jit, steps)
    line = check(difference(ours, alone), LIMIT, f"on {', '.join(machine.devices)}")
    by = dist.plan.communication.value
    return line if by in ("none", "given") else Line(f"{line.text}, all-reduce by {by}", line.outcome, line.values)


@cases("replicas{}", 90, XLA)
def replicas(machine: Machine, jit: bool) -> Line:
    return compared(machine, DistributedFit("mirrored", list(machine.devices)), jit)


@cases("replicas, accumulation over three batches", 90, small=False)
def accumulating_replicas(machine: Machine) -> Line:
    return compared(machine, DistributedFit("mirrored", list(machine.devices)), False, STEPS)


@cases('shard="{}"', 90, {shard: {"shard": shard} for shard in ("optimizer", "parameters")}, small=False)
def shards(machine: Machine, shard: str) -> Line:
    return compared(machine, DistributedFit("mirrored", list(machine.devices), shard=shard), False)


@cases("a pipeline of two stages{}", 90, XLA)
def pipeline(machine: Machine, jit: bool) -> Line:
    stages = [[name] for name in machine.devices]
    return compared(machine, DistributedFit(Pipeline(stages=2, microbatches=4), stages), jit)


@cases("a mesh of {}", 90, {"(2, 1)": {"shape": (2, 1)}, "(1, 2)": {"shape": (1, 2)}})
def mesh(machine: Machine, shape: tuple[int, int]) -> Line:
    axes = dict(zip(("batch", "model"), shape, strict=True))
    return compared(machine, DistributedFit(mesh=axes, layout="auto", devices=list(machine.devices)), False)
