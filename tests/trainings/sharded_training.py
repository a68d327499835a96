"""Updates of variables in shards, in processes that have the devices for it, and of whole ones."""

import functools
import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers

from keras_paragrad import DistributedFit
from keras_paragrad.engine.step.apply import apply_gradient
from keras_paragrad.storage.sharded import sharded_value
from keras_paragrad.storage.updating import install_storages

# All but the last are cut; biases of a few bytes too.
LEAST_BYTES = 64
RATE = 0.1


class Case(NamedTuple):
    """How to update."""

    optimizer: str
    shard: str
    settings: tuple[str, ...] = ()


class TrustRatio(keras.optimizers.Optimizer):
    """An optimizer of one's own, whose step looks at the shape, the norm and the rows of a whole variable."""

    def build(self, variables):
        super().build(variables)
        self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign(momentum, 0.9 * momentum + gradient / variable.shape[0])
        ratio = keras.ops.norm(keras.ops.reshape(variable, [-1])) / (1 + keras.ops.max(momentum, axis=0, keepdims=True))
        self.assign_sub(variable, learning_rate * ratio * momentum)


# A large epsilon, for a gradient near zero must not decide by its last digit between one step and its opposite.
OPTIMIZERS = {
    "sgd": lambda **options: optimizers.SGD(RATE, momentum=0.9, **options),
    "rmsprop": lambda **options: optimizers.RMSprop(0.01, centered=True, momentum=0.5, epsilon=1e-2, **options),
    "adam": lambda **options: optimizers.Adam(0.01, amsgrad=True, epsilon=1e-2, **options),
    "adamw": lambda **options: optimizers.AdamW(0.01, epsilon=1e-2, **{"weight_decay": 0.2, **options}),
    "adadelta": lambda **options: optimizers.Adadelta(RATE, epsilon=1e-2, **options),
    "adagrad": lambda **options: optimizers.Adagrad(RATE, **options),
    "adamax": lambda **options: optimizers.Adamax(0.01, epsilon=1e-2, **options),
    "nadam": lambda **options: optimizers.Nadam(0.01, epsilon=1e-2, **options),
    # It subtracts roots of accumulators, which from 0.1 on are alike but for rounding if gradients are clipped.
    "ftrl": lambda **options: optimizers.Ftrl(RATE, initial_accumulator_value=1e-6, **options),
    "lion": lambda **options: optimizers.Lion(1e-3, **options),
    "lamb": lambda **options: optimizers.Lamb(0.01, epsilon=1e-2, **options),
    "adafactor": lambda **options: optimizers.Adafactor(0.01, epsilon_1=1e-4, **options),
    "muon": lambda **options: optimizers.Muon(0.01, **options),
    "trust_ratio": lambda **options: TrustRatio(RATE, **options),
}
SETTINGS = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema_overwrite": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "weight_decay": {"weight_decay": 0.1},
    "scale_factor": {"loss_scale_factor": 64.0},
}


def made_optimizer(case: Case) -> Any:
    options = {key: value for name in case.settings for key, value in SETTINGS.get(name, {}).items()}
    optimizer: Any = OPTIMIZERS[case.optimizer](**options)
    if "schedule" in case.settings:
        optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    if "loss_scale" in case.settings:
        optimizer = optimizers.LossScaleOptimizer(optimizer, 2.0**10, dynamic_growth_steps=2)
    return optimizer


def make_devices(count: int) -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )


class Updated(NamedTuple):
    """As much of a model as the *apply* stage looks at."""

    optimizer: Any
    trainable_weights: list[keras.Variable]


def variables_to_update() -> list[keras.Variable]:
    """Matrices that are cut between rows and within them, a vector, and one that is too small to be cut.

    Half of the second matrix is as long as a row, for which Keras's `add` could take it.
    """
    draw = np.random.default_rng(2)
    return [
        keras.Variable(draw.normal(size=shape).astype("float32"), name=f"weight_{place}", constraint=constraint)
        for place, (shape, constraint) in enumerate(
            [
                ((16, 24), keras.constraints.MaxNorm(1.0)),
                ((2, 24), None),
                ((3, 3, 5), None),
                ((24,), None),
                ((3,), None),
            ]
        )
    ]


def updates(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Applies the same gradients to variables in shards and to whole ones; called in processes of their own.

    Each replica has gradients of its own, of which the whole variables are given the sums. Under a loss scale, an
    update that overflows does so in one element of the last replica's.
    """
    make_devices(argument["devices"])
    strategy: Any = "multi_worker" if "TF_CONFIG" in os.environ else "mirrored"
    devices: Any = [f"CPU:{index}" for index in range(argument["devices"])]
    found = []
    for case in [Case(optimizer, shard, tuple(s)) for optimizer, shard, s in argument["cases"]]:
        keras.backend.clear_session(free_memory=False)
        dist = DistributedFit(strategy, devices, shard=case.shard, min_shard_bytes=LEAST_BYTES)
        # Workers join their cluster once.
        strategy, devices = dist.strategy, None
        with dist.scope():
            ours = Updated(made_optimizer(case), variables_to_update())
            ours.optimizer.build(ours.trainable_weights)
        install_storages(ours.optimizer, ours.trainable_weights)
        reference = Updated(made_optimizer(case), variables_to_update())
        reference.optimizer.build(reference.trainable_weights)
        found.append({"case": str(case), **_compared(dist.strategy, ours, reference, argument["overflows"])})
    return found


def _compared(strategy: Any, ours: Updated, reference: Updated, overflows: list[bool]) -> dict[str, Any]:
    def step(ours: Updated, *gradients: tf.Tensor) -> None:
        apply_gradient(ours.optimizer, ours.trainable_weights, list(map(tf.identity, gradients)), reduce_first=True)  # pyright: ignore

    run = tf.function(functools.partial(strategy.run, functools.partial(step, ours)), autograph=False)
    draw, found = np.random.default_rng(3), {"moved": [], "scales": [], "expected": []}
    for overflow in overflows:
        scale = getattr(reference.optimizer, "dynamic_scale", 1.0)
        parts = [
            [float(scale) * draw.normal(size=each.shape).astype("float32") for each in reference.trainable_weights]
            for _ in range(strategy.num_replicas_in_sync)
        ]
        if overflow:
            parts[-1][0].flat[-1] = np.inf
        before = _held(ours)
        run(args=[_by_replica(strategy, part) for part in zip(*parts, strict=True)])
        reference.optimizer.apply([sum(part) for part in zip(*parts, strict=True)], reference.trainable_weights)
        found["moved"].append(before != _held(ours))
        for name, each in (("scales", ours), ("expected", reference)):
            found[name].append([float(counter.numpy()) for counter in _counters(each.optimizer)])
    for each in (ours, reference):
        each.optimizer.finalize_variable_values(each.trainable_weights)
    found["weights"] = _apart(ours.trainable_weights, reference.trainable_weights)
    found["slots"] = _apart(*(_inner(each.optimizer).variables for each in (ours, reference)))
    found["in_shards"] = sum(sharded_value(variable) is not None for variable in ours.trainable_weights)
    return found


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _counters(optimizer: Any) -> list[Any]:
    scaled = [optimizer.dynamic_scale, optimizer.step_counter] if hasattr(optimizer, "dynamic_scale") else []
    return [*scaled, optimizer.iterations]


def _held(updated: Updated) -> list[bytes]:
    """What this worker holds of all that an update changes, but the loss scale and its counter, to the bit."""
    variables = [*updated.trainable_weights, *_inner(updated.optimizer).variables]
    storages = [sharded_value(variable) or variable.value for variable in variables]
    return [part.numpy().tobytes() for storage in storages for part in getattr(storage, "values", [storage])]


def held_after_updates(optimizer: str) -> float:
    """The memory of a matrix and its slots in shards, in matrices; called in a process of its own."""
    make_devices(2)
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], shard="parameters")
    before, side = _resident(), 4096
    with dist.scope():
        ours = Updated(OPTIMIZERS[optimizer](), [keras.Variable(keras.initializers.Zeros()((side, side)))])
        ours.optimizer.build(ours.trainable_weights)

    @tf.function(autograph=False)
    def step() -> None:
        dist.strategy.run(
            lambda: apply_gradient(ours.optimizer, ours.trainable_weights, [tf.ones((side, side))], reduce_first=True)
        )  # pyright: ignore

    step()
    ours.trainable_weights[0].assign(np.ones((side, side), "float32"))
    step()
    gc.collect()
    return (_resident() - before) / (4 * side**2)


def most_while_building(_: Any) -> float:
    """The most memory taken while a model and its optimizer are made in shards, in what they have in the end.

    Called in a process of its own.
    """
    make_devices(4)
    dist = DistributedFit("mirrored", [f"CPU:{index}" for index in range(4)], shard="parameters")
    side, matrices = 2048, 6
    with dist.scope():
        # TensorFlow and Keras make what they need for this later.
        small = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        small.compile("adam", "mse")
        small.optimizer.build(small.trainable_variables)
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")
        model = keras.Sequential([keras.Input((side,)), *[keras.layers.Dense(side) for _ in range(matrices)]])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    (peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return (int(peak) * 1024 - before) / (3 * matrices * 4 * side**2)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _by_replica(strategy: Any, values: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def _apart(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference in a variable over the largest value in it."""
    pairs = [(one.numpy().astype("float64"), other.numpy()) for one, other in zip(ours, theirs, strict=True)]
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6)) for one, other in pairs)
