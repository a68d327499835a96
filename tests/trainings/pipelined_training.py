"""Models trained in the stages of a pipeline, in processes that have the devices for it, and by Keras on one device."""

import csv
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers
from oracles.histories import defined
from trainings.sharded_training import OPTIMIZERS, SETTINGS

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    GradientTelemetry,
    Profiler,
    ProfileSchedule,
    Throughput,
    recompute,
)
from keras_paragrad.distribution import Backup, Pipeline
from keras_paragrad.engine.training.builder import StepBuilder

ROWS, LENGTH, VOCABULARY = 22, 6, 40
DEVICES = [f"CPU:{index}" for index in range(4)]


class AddsLoss(layers.Layer):
    """Passes on what it gets, and adds a loss of it."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        return inputs


def mlp() -> keras.Model:
    regular = {"kernel_regularizer": "l2", "kernel_constraint": keras.constraints.MaxNorm(1.0)}
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(12, "tanh", name="one", **regular),
            layers.Dense(10, "tanh", name="two"),
            layers.Dropout(0.0, name="none"),
            layers.Dense(4, name="three"),
        ]
    )


def skips() -> keras.Model:
    """One tensor is used in every stage, and one layer is called several times in the same."""
    inputs = keras.Input((8,))
    skip = hidden = layers.Dense(8, "tanh", name="first")(inputs)
    for index in range(4):
        hidden = layers.Add(name=f"add_{index}")([layers.Dense(8, "gelu", name=f"dense_{index}")(hidden), skip])
        hidden = layers.LayerNormalization(name=f"norm_{index}")(hidden)
    shared = layers.Dense(8, "tanh", name="shared")
    last = layers.Add(name="last")([shared(shared(hidden)), skip])
    return keras.Model(inputs, layers.Dense(4, name="head")(last))


def transformer() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 16, mask_zero=True, name="embedding")(inputs)
    for index in range(2):
        attention = layers.MultiHeadAttention(2, 8, name=f"attention_{index}")(hidden, hidden)
        hidden = layers.LayerNormalization(name=f"norm_{index}")(layers.Add(name=f"add_{index}")([hidden, attention]))
        narrow = layers.Dense(16, "gelu", name=f"narrow_{index}")(hidden)
        hidden = layers.LayerNormalization(name=f"block_{index}")(layers.Add(name=f"sum_{index}")([hidden, narrow]))
    return keras.Model(inputs, layers.Dense(4, name="head")(hidden))


def recurrent() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 8, mask_zero=True, name="embedding")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.GRU(8, name="gru")(hidden)))


def several() -> keras.Model:
    """Two inputs and two outputs, one of which is made in the first stage."""
    numbers, tokens = keras.Input((8,), name="numbers"), keras.Input((LENGTH,), dtype="int32", name="tokens")
    hidden = layers.Dense(8, "tanh", name="one")(numbers)
    early = layers.Dense(4, name="early")(hidden)
    words = layers.GlobalAveragePooling1D(name="pool")(layers.Embedding(VOCABULARY, 8, name="embedding")(tokens))
    late = layers.Dense(4, name="late")(AddsLoss(name="adds")(layers.Concatenate(name="both")([hidden, words])))
    return keras.Model([numbers, tokens], [early, late])


def masked() -> keras.Model:
    """A mask that every stage uses."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 8, mask_zero=True, name="embedding")(inputs)
    attended = layers.MultiHeadAttention(2, 8, name="attention")(hidden, hidden)
    pooled = [
        layers.GlobalAveragePooling1D(name=f"pool_{index}")(each) for index, each in enumerate([hidden, attended])
    ]
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Concatenate(name="both")(pooled)))


def stateful() -> keras.Model:
    """State that each micro-batch finds as the one before it left it."""
    inputs = keras.Input((8,))
    hidden = layers.Dropout(0.3, name="dropout", seed=3)(layers.Dense(8, "tanh", name="one")(inputs))
    hidden = layers.BatchNormalization(name="statistics")(layers.Dense(8, "tanh", name="two")(hidden))
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Dropout(0.3, name="again", seed=4)(hidden)))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "mlp": mlp,
    "skips": skips,
    "transformer": transformer,
    "recurrent": recurrent,
    "several": several,
    "masked": masked,
    "stateful": stateful,
}


class PipelineCase(NamedTuple):
    """How to train: `columns` are two devices for each stage, `uneven` one for the first and three for the second."""

    model: str
    cuts: tuple[str, ...] | int
    optimizer: str = "sgd"
    settings: tuple[str, ...] = ()
    microbatches: int = 3


def data_for(name: str) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(ROWS, 8)).astype("float32")
    tokens = generator.integers(0, VOCABULARY, (ROWS, LENGTH)).astype("int32") * generator.integers(
        0, 3, (ROWS, LENGTH)
    )
    tokens = np.minimum(tokens, VOCABULARY - 1).astype("int32")
    targets = generator.integers(0, 4, ROWS)
    weights = np.linspace(0.5, 2.0, ROWS).astype("float32")
    if name == "several":
        return [numbers, tokens], [targets, targets[::-1].copy()], [weights, weights]
    if name == "transformer":
        # One target a token: masked ones count for nothing.
        return tokens, generator.integers(0, 4, (ROWS, LENGTH)), np.repeat(weights[:, None], LENGTH, 1)
    return (tokens if name in ("recurrent", "masked") else numbers), targets, weights


def made(case: PipelineCase, *, alone: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(next((name for name in case.settings if name.startswith("mixed")), "float32"))
    try:
        model = MODELS[case.model]()
    finally:
        keras.config.set_dtype_policy("float32")
    options = {key: value for name in case.settings for key, value in SETTINGS.get(name, {}).items()}
    optimizer: Any = OPTIMIZERS[case.optimizer](**options)
    if "excluded" in case.settings:
        optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:2])
    if "accumulate" in case.settings and not alone:
        optimizer = AccumulatingOptimizer(optimizer, 2)
    if "loss_scale" in case.settings:
        optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    several = case.model == "several"
    model.compile(
        optimizer,
        [loss, loss] if several else loss,
        loss_weights=[0.3, 0.7] if several else None,
        metrics=[["accuracy"], ["accuracy"]] if several else ["accuracy"],
        run_eagerly="eager" in case.settings,
    )
    if "built" in case.settings:
        optimizer.build(model.trainable_variables)
    return model


def fitted(fit: Any, case: PipelineCase, batch_size: int = 10) -> dict[str, list[float]]:
    x, y, weights = data_for(case.model)
    # The last batch has fewer rows than there are micro-batches.
    settings = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    return fit(x, y, sample_weight=weights, **settings).history


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


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference between two lists of arrays, in parts of the largest number."""
    most = max(float(np.abs(each).max(initial=0)) for each in theirs)
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(ours, theirs, strict=True)) / max(most, 1e-9)


def configure() -> None:
    logical = [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)


def compared(argument: list) -> list[dict[str, Any]]:
    """Trains each case as a pipeline and on one device, and returns how far apart they end; in a process of its own."""
    configure()
    return [_compared(PipelineCase(name, cuts, optimizer, tuple(s), m)) for name, cuts, optimizer, s, m in argument]


def _compared(case: PipelineCase) -> dict[str, Any]:
    keras.backend.clear_session(free_memory=False)
    cuts = case.cuts if isinstance(case.cuts, int) else tuple(case.cuts)
    case = case._replace(cuts=cuts)
    alone = made(case, alone=True)
    expected = fitted(alone.fit, case)
    dist = distribution(case)
    with dist.scope():
        model = made(case, alone=False)
    if "recompute" in case.settings:
        recompute(model, ["norm_0", "narrow_1"])
    if "segments" in case.settings:
        # A cut goes through one of them.
        recompute(model, every=1 if case.model == "skips" else 3)
    history = fitted(functools.partial(dist.fit, model), case, 5 if "accumulate" in case.settings else 10)
    x, y, weights = data_for(case.model)
    evaluated, also = (
        defined(each.evaluate(x, y, sample_weight=weights, verbose=0, batch_size=8, return_dict=True))
        for each in (model, alone)
    )
    predicted, those = (keras.tree.flatten(each.predict(x, verbose=0)) for each in (model, alone))
    slots = dict(zip([each.path for each in model.optimizer.variables], homes(model.optimizer.variables), strict=True))
    return {
        "weights": apart(model.get_weights(), alone.get_weights()),
        "history": apart(
            map(np.asarray, defined(history).values()), [np.asarray(expected[name]) for name in defined(history)]
        ),
        "evaluated": apart([np.asarray(list(evaluated.values()))], [np.asarray(list(also.values()))]),
        "predicted": apart(predicted, those),
        "names": list(history) == list(expected),
        "homes": dict(zip([each.path for each in model.variables], homes(model.variables), strict=True)),
        "slots": slots,
        "explained": str(dist.explain()),
    }


def undone(optional: None) -> float:
    """How far training ends from that of one device, if it was there first, then in a pipeline, and there again."""
    configure()
    case = PipelineCase("mlp", ("two",), "adam")
    alone, model = made(case, alone=True), made(case, alone=False)
    for _ in range(3):
        fitted(alone.fit, case)
    one = DistributedFit("none")
    fitted(functools.partial(one.fit, model), case)
    prepared = distribution(case).prepare(model)
    fitted(model.fit, case)
    prepared.undo()
    fitted(functools.partial(one.fit, model), case)
    return apart(model.get_weights(), alone.get_weights())


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


def saved(directory: str) -> dict[str, float]:
    """How far a pipeline's files, and its backup resumed on one device, are from what they hold."""
    configure()
    case = PipelineCase("mlp", ("one",), "adam")
    x, y, _ = data_for(case.model)
    settings = {"batch_size": 10, "shuffle": False, "verbose": 0}
    uninterrupted = made(case, alone=True)
    uninterrupted.fit(x, y, epochs=2, **settings)
    dist = distribution(case)
    with dist.scope():
        model = made(case, alone=False)
    dist.fit(model, x, y, epochs=1, callbacks=[Backup(f"{directory}/backup", delete_when_done=False)], **settings)
    model.save(f"{directory}/model.keras")
    model.save_weights(f"{directory}/model.weights.h5")
    tf.train.Checkpoint(model=model).save(f"{directory}/checkpoint")
    loaded: Any = keras.saving.load_model(f"{directory}/model.keras")
    others = [made(case, alone=True) for _ in range(3)]
    others[0].load_weights(f"{directory}/model.weights.h5")
    tf.train.Checkpoint(model=others[1]).restore(f"{directory}/checkpoint-1").assert_existing_objects_matched()
    weights, slots = model.get_weights(), [each.numpy() for each in model.optimizer.variables]
    again = distribution(case)
    again.fit(loaded, x, y, initial_epoch=1, epochs=2, **settings)
    resumed = others[2]
    resumed.fit(x, y, epochs=2, callbacks=[Backup(f"{directory}/backup")], **settings)
    expected = uninterrupted.get_weights()
    read: Any = keras.saving.load_model(f"{directory}/model.keras")
    return {
        "keras": apart(read.get_weights(), weights),
        "slots": apart([each.numpy() for each in read.optimizer.variables], slots),
        "weights": apart(others[0].get_weights(), weights),
        "checkpoint": apart(others[1].get_weights(), weights),
        "loaded": apart(loaded.get_weights(), expected),
        "resumed": apart(resumed.get_weights(), expected),
    }
