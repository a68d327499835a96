"""Models trained in the stages of a pipeline, in processes that have the devices for it, and by Keras on one device."""

import csv
import functools
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from trainings import placed_models
from trainings.placed_models import DEVICES, LENGTH, apart, configure, data_for, made

from keras_paragrad import DistributedFit, GradientTelemetry, Profiler, ProfileSchedule, Throughput, recompute
from keras_paragrad.distribution import Pipeline
from keras_paragrad.engine.training.builder import StepBuilder

# The last batch has fewer rows than there are micro-batches.
BATCH = 10


class PipelineCase(NamedTuple):
    """How to train: `columns` are two devices for each stage, `uneven` one for the first and three for the second."""

    model: str
    cuts: tuple[str, ...] | int
    optimizer: str = "sgd"
    settings: tuple[str, ...] = ()
    microbatches: int = 3


def fitted(fit: Any, case: PipelineCase) -> dict[str, list[float]]:
    x, y, weights = data_for(case.model)
    return fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


def distribution(case: PipelineCase) -> DistributedFit:
    by = {"stages": case.cuts} if isinstance(case.cuts, int) else {"cuts": case.cuts}
    pipeline = Pipeline(**by, microbatches=case.microbatches)  # pyright: ignore
    weighting = "examples" if case.model == "several" else "auto"
    devices: Any = DEVICES[: pipeline.count]
    if "columns" in case.settings:
        devices = [[f"CPU:{2 * index}", f"CPU:{2 * index + 1}"] for index in range(pipeline.count)]
    if "uneven" in case.settings:
        devices = ["CPU:0", ["CPU:1", "CPU:2", "CPU:3"]]
    return DistributedFit(pipeline, devices=devices, weighting=weighting, jit="jit" in case.settings)


def homes(variables: Any) -> list[str]:
    return [variable.value.device[-5:] for variable in variables]


def compared(argument: list) -> list[dict[str, Any]]:
    """How far each case as a pipeline ends from one device, and where its variables are; in a process of its own."""
    configure()
    return [_compared(PipelineCase(name, cuts, optimizer, tuple(s), m)) for name, cuts, optimizer, s, m in argument]


def _compared(case: PipelineCase) -> dict[str, Any]:
    def change(model: keras.Model) -> None:
        if "recompute" in case.settings:
            recompute(model, ["norm_0", "narrow_1"])
        if "segments" in case.settings:
            # A cut goes through one of them.
            recompute(model, every=1 if case.model == "skips" else 3)

    case = case._replace(cuts=case.cuts if isinstance(case.cuts, int) else tuple(case.cuts))
    model, found = placed_models.compared(case, distribution(case), BATCH, change, evaluated=8)
    placed = {"homes": model.variables, "slots": model.optimizer.variables}
    for name, variables in placed.items():
        found[name] = dict(zip([each.path for each in variables], homes(variables), strict=True))
    return found


def saved(directory: str) -> dict[str, float]:
    """How far a pipeline's files are from what they hold."""
    configure()
    case = PipelineCase("mlp", ("one",), "adam")
    return placed_models.saved(case, lambda: distribution(case), directory, BATCH)


def stateful_in_columns(settings: list[str]) -> dict[str, float]:
    """How far a stateful model's weights and state end from those of a pipeline with one device for each stage."""
    configure()
    warnings.simplefilter("ignore")
    ended = []
    for more in ((), ("columns",)):
        case = PipelineCase("stateful", 2, "sgd", (*settings, *more), 2)
        dist = distribution(case)
        with dist.scope():
            model = made(case, alone=False)
        x, y, _ = data_for(case.model)
        dist.fit(model, x[:16], y[:16], batch_size=8, epochs=2, shuffle=False, verbose=0)
        ended.append(model)
    alone, columns = ended
    start = made(case, alone=True).get_weights()
    state = [[each.numpy() for each in model.variables if not each.trainable] for model in ended]
    return {
        "weights": apart(columns.get_weights(), alone.get_weights()),
        "state": apart(*state[::-1]),
        "moved": apart(alone.get_weights(), start),
    }


def watched(argument: list[str]) -> dict[str, Any]:
    """Of a model in mixed precision, under telemetry and the profiler: how far from one device's, and what was seen."""
    policy, directory = argument
    configure()
    warnings.simplefilter("ignore")
    # With the first loss scale, micro-batches of a row would overflow float16 by themselves.
    case = PipelineCase("mlp", 2, "sgd", ("columns", policy), 4)
    dist = distribution(case)
    with dist.scope():
        model = made(case, alone=False)
    alone = made(case, alone=True)
    start = alone.get_weights()
    watching, watching_alone = (GradientTelemetry(f"{directory}/{name}", every=1) for name in ("ours", "alone"))
    expected = fitted(functools.partial(alone.fit, callbacks=[watching_alone]), case)
    schedule = ProfileSchedule(skip_first=1, warmup=0, active=3)
    profiler = Profiler(f"{directory}/ours", schedule, summary=False, report=None)
    callbacks = [watching, Throughput(f"{directory}/ours"), profiler]
    history = fitted(functools.partial(dist.fit, model, callbacks=callbacks), case)
    ours, theirs = (_norms(f"{directory}/{name}") for name in ("ours", "alone"))
    return {
        "weights": apart(model.get_weights(), alone.get_weights()) / apart(start, alone.get_weights()),
        "loss": apart([np.asarray(history["loss"])], [np.asarray(expected["loss"])]),
        "norms": apart([np.asarray(ours)], [np.asarray(theirs)]),
        "updates": len(ours),
        "paces": len(list(Path(directory, "ours").glob("throughput*"))),
        "pipeline": json.loads(next(Path(directory).rglob("keras_paragrad.json")).read_text())["pipeline"],
    }


def _norms(directory: str) -> list[float]:
    with next(Path(directory).glob("telemetry*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    return [float(row["value"]) for row in rows if row["quantity"] == "gradient_norm" and not row["layer"]]


def held(count: int) -> dict[str, Any]:
    """The bytes of variables and slots on each device of a Transformer of eight equal blocks in `count` stages."""
    configure()
    inputs = keras.Input((LENGTH, 32))
    hidden = inputs
    for index in range(8):
        hidden = hidden + layers.MultiHeadAttention(2, 16, name=f"attention_{index}")(hidden, hidden)
        hidden = layers.LayerNormalization(name=f"norm_{index}")(hidden)
        hidden = hidden + layers.Dense(32, name=f"narrow_{index}")(layers.Dense(128, "gelu")(hidden))
    dist = DistributedFit(Pipeline(stages=count), devices=DEVICES[:count])
    with dist.scope():
        model = keras.Model(inputs, layers.Dense(1, name="head")(hidden))
        model.compile("adam", "mse")
    dist.prepare(model)
    found: dict[str, int] = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        home = variable.value.device[-5:]
        found[home] = found.get(home, 0) + variable.numpy().nbytes
    return found


def recomputed(optional: None) -> dict[str, Any]:
    """Of the traced step of a perceptron whose segments are recomputed: products, and how many are in a second run."""
    configure()
    found = {}
    for again in (False, True):
        dist = DistributedFit(Pipeline(cuts=["dense_2"], microbatches=2), devices=DEVICES[:2])
        with dist.scope():
            dense = [layers.Dense(8, "tanh", name=f"dense_{index}") for index in range(6)]
            model = keras.Sequential([keras.Input((8,)), *dense])
            model.compile("sgd", "mse")
        dist.prepare(model)
        if again:
            recompute(model, every=2)
        rows = tf.zeros((4, 8))
        step = tf.function(StepBuilder.of(model).one_step, autograph=False)
        operations = step.get_concrete_function((rows, rows)).graph.get_operations()
        products = [each.device[-5:] for each in operations if each.type == "MatMul"]
        found[str(again)] = {name: products.count(name) for name in sorted(set(products))}
    return found


def placed(cuts: list[str]) -> dict[str, Any]:
    """Of the traced step of a perceptron: where products are computed, and on what those of the first stage depend."""
    configure()
    dist = DistributedFit(Pipeline(cuts=cuts, microbatches=2), devices=DEVICES[: len(cuts) + 1])
    with dist.scope():
        model = keras.Sequential(
            [keras.Input((8,)), *(layers.Dense(8, "tanh", name=f"dense_{index}") for index in range(3))]
        )
        model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "mse", metrics=["mae"])
    dist.prepare(model)
    rows = tf.zeros((4, 8))
    step = tf.function(StepBuilder.of(model).one_step, autograph=False)
    graph = step.get_concrete_function((rows, rows)).graph
    operations = graph.get_operations()
    products = [each for each in operations if each.type == "MatMul"]
    devices = [each.device[-5:] for each in products]
    applied = [each for each in operations if each.type in ("AssignSubVariableOp", "AssignAddVariableOp")]
    first = [each for each in products if each.device.endswith("CPU:0")]
    others = {each for each in products if not each.device.endswith("CPU:0")}
    # Both forward products of the first stage wait for none of another stage: so it goes on while those compute.
    return {
        "devices": {name: devices.count(name) for name in sorted(set(devices))},
        "free": sum(not (_needed(each) & others) for each in first),
        "updates": {name: sum(each.device.endswith(name) for each in applied) for name in DEVICES},
        "moved": sorted(
            {(each.name, tensor.name) for each in operations for tensor in each.inputs if _moves(tensor, each)}
        ),
        "unplaced": sorted(each.name for each in operations if not each.device and _computes(each)),
    }


def _moves(tensor: Any, to: Any) -> bool:
    """Whether a gradient or weight goes to another device."""
    there, here = tensor.op.device[-5:], to.device[-5:]
    return tensor.shape == (8, 8) and bool(there) and bool(here) and there != here


def _computes(operation: Any) -> bool:
    arithmetic = {"AddV2", "L2Loss", "MatMul", "Mul", "RealDiv", "Sqrt", "Square", "Sub", "Tanh", "TanhGrad"}
    # What makes as many gradients of a mean as it has elements begins with constants.
    of_loss = "gradient_tape/compile_loss" in operation.name
    return operation.type in arithmetic and bool(operation.outputs[0].shape.rank) and not of_loss


def _needed(operation: Any) -> set[Any]:
    seen, waiting = set(), [operation]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += [tensor.op for tensor in each.inputs] + list(each.control_inputs)
    return seen
