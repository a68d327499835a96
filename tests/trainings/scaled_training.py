"""Updates of a `LossScaleOptimizer` on workers' shards and on one device, some of which overflow."""

import functools
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from trainings.sharded_training import LEAST_BYTES, Case, Updated, made_optimizer, make_devices, variables_to_update

from keras_paragrad import DistributedFit
from keras_paragrad.engine.step.apply import apply_gradient
from keras_paragrad.storage.sharded import sharded_value
from keras_paragrad.storage.updating import install_storages

SCALE, GROWTH = 2.0**10, 2


def scaled(case: Case) -> Any:
    return keras.optimizers.LossScaleOptimizer(made_optimizer(case), SCALE, dynamic_growth_steps=GROWTH)


def updates(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Applies the same scaled gradients to variables in shards and to whole ones; called on each of several workers.

    Each replica has gradients of its own, of which the whole variables are given the sums. An update that overflows
    does so in one element of the last replica's.
    """
    make_devices(argument["devices"])
    names = [f"CPU:{index}" for index in range(argument["devices"])]
    strategy: Any = "multi_worker" if "TF_CONFIG" in os.environ else "mirrored"
    found = []
    for case in [Case(*each[:3], tuple(each[3])) for each in argument["cases"]]:
        dist = DistributedFit(
            strategy, names if isinstance(strategy, str) else None, shard=case.shard, min_shard_bytes=LEAST_BYTES
        )
        strategy = dist.strategy
        with dist.scope():
            ours = Updated(scaled(case), variables_to_update())
            ours.optimizer.build(ours.trainable_weights)
        install_storages(ours.optimizer, ours.trainable_weights)

        def step(ours: Updated, *gradients: tf.Tensor) -> None:
            apply_gradient(ours.optimizer, ours.trainable_weights, list(map(tf.identity, gradients)), reduce_first=True)  # pyright: ignore

        run = tf.function(functools.partial(strategy.run, functools.partial(step, ours)), autograph=False)
        reference = Updated(scaled(case), variables_to_update())
        reference.optimizer.build(reference.trainable_weights)
        found.append(_compared(strategy, run, ours, reference, argument["overflows"]) | {"case": str(case)})
    return found


def _compared(strategy: Any, run: Any, ours: Updated, reference: Updated, overflows: list[bool]) -> dict[str, Any]:
    draw, found = np.random.default_rng(3), {"weights": 0.0, "slots": 0.0, "moved": [], "scales": [], "expected": []}
    replicas = strategy.num_replicas_in_sync
    for overflow in overflows:
        scale = float(reference.optimizer.dynamic_scale.numpy())
        parts = [
            [scale * draw.normal(size=each.shape).astype("float32") for each in reference.trainable_weights]
            for _ in range(replicas)
        ]
        if overflow:
            parts[-1][0].flat[-1] = np.inf
        before = _held(ours)
        run(args=[_by_replica(strategy, part) for part in zip(*parts, strict=True)])
        reference.optimizer.apply([sum(part) for part in zip(*parts, strict=True)], reference.trainable_weights)
        found["moved"].append(before != _held(ours))
        for each, one in (("scales", ours), ("expected", reference)):
            own = one.optimizer
            found[each].append([float(own.dynamic_scale.numpy()), *(int(v.numpy()) for v in _counters(own))])
    for each in (ours, reference):
        each.optimizer.finalize_variable_values(each.trainable_weights)
    largest = max(np.abs(each.numpy()).max() for each in reference.trainable_weights)
    pairs = zip(ours.trainable_weights, reference.trainable_weights, strict=True)
    found["weights"] = float(max(np.abs(one.numpy() - other.numpy()).max() for one, other in pairs) / largest)
    slots = zip(*(each.optimizer.inner_optimizer.variables for each in (ours, reference)), strict=True)
    found["slots"] = max(_apart(one.numpy(), other.numpy()) for one, other in slots)
    found["in_shards"] = sum(sharded_value(variable) is not None for variable in ours.trainable_weights)
    return found


def _counters(optimizer: Any) -> list[Any]:
    return [optimizer.step_counter, optimizer.iterations]


def _state(updated: Updated) -> list[keras.Variable]:
    """All that an update changes, but the loss scale and its counter."""
    return [*updated.trainable_weights, *updated.optimizer.inner_optimizer.variables]


def _held(updated: Updated) -> list[bytes]:
    """What this worker holds of it, to the bit."""
    storages = [sharded_value(variable) or variable.value for variable in _state(updated)]
    return [part.numpy().tobytes() for storage in storages for part in getattr(storage, "values", [storage])]


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6))


def _by_replica(strategy: Any, values: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )
