"""`fit_memory` on replicas: plans what is recomputed, sliced and sharded, tries it, and applies it to the model."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.slices import microbatch
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.optimizer import find_accumulator, innermost_optimizer
from keras_paragrad.compat.types import Specs
from keras_paragrad.compat.workers import gather, replica_placement
from keras_paragrad.distribution.fitted_memory import FittedMemory
from keras_paragrad.distribution.options import Decision
from keras_paragrad.distribution.parallelism import PlannedRun
from keras_paragrad.engine.losses.dividers import layers_of_batch_statistics
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.available import cannot_try_on_gpus, memory_of_device
from keras_paragrad.memory.breakdown import SHARDS
from keras_paragrad.memory.estimate import bytes_in_words
from keras_paragrad.memory.plan import Candidate, MemoryPlan, Try, plan_memory, way_in_words
from keras_paragrad.memory.recomputation import recompute
from keras_paragrad.memory.trial import CannotTryError, Measured, PreparationCall, Runner, Trials
from keras_paragrad.storage.creation import add_copies, create_in_shards, create_whole, unshard
from keras_paragrad.storage.updating import check_optimizer_of_shards

# Steps of a trial: the first one traces it, the last one is timed.
_STEPS = 2


def fit_memory(
    model: keras.Model, run: PlannedRun, batch_size: int, batch_spec: Specs, log: Callable[[str], None]
) -> FittedMemory:
    """Plans how to train a model in the memory of its devices, and applies the plan; called on every worker."""
    if not model.built:
        raise ValueError(
            f"fit_memory=True estimates the memory of a step, and {model.name!r} has no weights yet. Build it within "
            "`with dist.scope():`, by calling it on a batch or with model.build(input_shape)."
        )
    strategy, options = run.strategies.models, run.options
    replicas, workers = strategy.num_replicas_in_sync, replica_placement(run.strategies.workers).workers
    untried = "several workers" if workers > 1 else cannot_try_on_gpus()
    steps = 0 if untried else _STEPS
    # Logical CPU devices share the machine's memory; each GPU has its own.
    sharing = 1 if run.hardware.of_kind("GPU") else replicas // workers
    device_bytes = options.device_bytes or memory_of_device(None, steps) // sharing
    device_bytes = int(gather(run.strategies.workers, np.array([device_bytes], np.int64)).min())
    shards, no_shards = _shards(model, run.plan.shard.value)
    plan = plan_memory(
        model,
        batch_size,
        device_bytes,
        None if untried else lambda spec: _make_trial(model, run, batch_size, spec, device_bytes),
        replicas=replicas,
        shards=shards,
        min_shard_bytes=options.min_shard_bytes,
        batch_spec=batch_spec,
        no_slices=_no_slices(model),
        log=log,
    )
    plan.left_out += [f"No shards: {no_shards}."] if no_shards else []
    plan.left_out += [f"No trials: {untried}."] if untried else []
    chosen = _agreed(plan, run) if workers > 1 else plan.chosen
    assert chosen is not None, "plan_memory chooses or raises"
    plan.chosen = chosen
    if chosen.choice.slices > 1 and (tables := _tables(model)):
        plan.left_out.append(
            f"Another step than Keras's of {tables}: where a batch looks up a row more than once, slices add up its "
            f"gradients, and Keras's {type(innermost_optimizer(model.optimizer)).__name__} squares them one by one."
        )
    log(f"{way_in_words(chosen, plan.recomputed)}, in {bytes_in_words(device_bytes)} on each device.")
    return FittedMemory(plan, _apply(model, run, chosen), _decision(run, chosen, shards))


def _agreed(plan: MemoryPlan, run: PlannedRun) -> Candidate:
    """The chief's choice, on all workers: their speeds differ, but in a sorted list their candidates are the same."""
    ways = sorted(plan.candidates, key=lambda candidate: str(candidate.choice))
    mine = next(index for index, candidate in enumerate(ways) if candidate is plan.chosen)
    return ways[int(gather(run.strategies.workers, np.array([mine], np.int64))[0, 0])]


def _no_slices(model: keras.Model) -> str:
    """Why the plan can't cut batches into slices; empty if it can."""
    if StepBuilder.of(model).stages.split is not None:
        return "microbatch(model, ...) was called; leave it out to have slices chosen"
    layers = layers_of_batch_statistics(model)
    names = ", ".join(layer.name for layer in layers[:3]) + (", ..." if len(layers) > 3 else "")
    return f"{names} would normalize slices with the statistics of a slice" if layers else ""


def _tables(model: keras.Model) -> str:
    """The names of embeddings, unless their optimizer is linear in the gradient, or gets sums of several batches."""
    if isinstance(innermost_optimizer(model.optimizer), keras.optimizers.SGD) or find_accumulator(model.optimizer):
        return ""
    return ", ".join(layer.name for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding))


def _shards(model: keras.Model, planned: str) -> tuple[Sequence[str | None], str]:
    """The values of `shard` to choose from, and why there are no others."""
    if planned != "auto":
        return [None if planned == "none" else planned], ""
    try:
        if model.optimizer is not None:
            check_optimizer_of_shards(model.optimizer)
    except ValueError as error:
        return [None], str(error).rstrip(".")
    return SHARDS, ""


def _make_trial(model: keras.Model, run: PlannedRun, rows: int, spec: Specs, device_bytes: int) -> Try:
    """Returns a function that trains a `Candidate` on zeros in a child process.

    It returns what it measured, or `None` if memory ran out. `rows` is the batch size over all replicas.
    """
    trials = Trials(model, _zeros(spec), device_bytes, _STEPS)
    replicas = run.strategies.models.num_replicas_in_sync

    def trial(candidate: Candidate) -> Measured | None:
        runner = _runner(run, candidate, replicas) if replicas > 1 or run.options.jit != "auto" else None
        return trials.measure(rows, _preparations(run, candidate), runner)

    return trial


def _zeros(spec: Specs) -> list[Any]:
    """A row of `x`, `y` and `sample_weight`, of zeros."""

    def zeros(leaf: Any) -> np.ndarray:
        if not isinstance(leaf, tf.TensorSpec) or leaf.dtype == tf.string:
            raise CannotTryError(f"its data isn't made of dense numbers, but has {leaf}")
        shape = (1, *(size or 1 for size in leaf.shape[1:]))
        return np.zeros(shape, leaf.dtype.as_numpy_dtype)

    parts = keras.utils.unpack_x_y_sample_weight(spec)
    return [None if part is None else tf.nest.map_structure(zeros, part) for part in parts]


def _runner(run: PlannedRun, candidate: Candidate, replicas: int) -> Runner:
    """Describes how to recreate this process's replicas in a trial's process."""
    kind, options = "GPU" if run.hardware.of_kind("GPU") else "CPU", run.options
    arguments: dict[str, Any] = {
        **{"shard": candidate.choice.shard, "min_shard_bytes": options.min_shard_bytes, "jit": options.jit},
        **{"exact": options.exact, "weighting": options.weighting, "prove": False},
    }
    if replicas == 1:
        arguments["strategy"] = "none"
    else:
        arguments |= {"strategy": "mirrored", "devices": [f"{kind}:{index}" for index in range(replicas)]}
    return Runner("keras_paragrad.distribution.fit", "DistributedFit", arguments, replicas)


def _preparations(run: PlannedRun, candidate: Candidate) -> list[PreparationCall]:
    """The calls that prepare a model in a trial."""
    calls = []
    if form := candidate.choice.recompute:
        calls.append(PreparationCall(recompute.__module__, recompute.__name__, {"layers": form}))
    if candidate.choice.slices > 1:
        # Zeros prove nothing; the first batch of `fit` does.
        arguments = {"size": candidate.rows, "weighting": run.options.weighting, "prove": False}
        calls.append(PreparationCall(microbatch.__module__, microbatch.__name__, arguments))
    return calls


def _apply(model: keras.Model, run: PlannedRun, candidate: Candidate) -> Callable[[], None]:
    """Applies a choice to the model; returns a function that undoes everything except sharding."""
    with contextlib.ExitStack() as applied:
        if form := candidate.choice.recompute:
            applied.callback(recompute(model, form).undo)
        if candidate.choice.slices > 1:
            microbatch(model, candidate.rows, weighting=run.options.weighting, prove=run.options.prove)
            builder: Any = StepBuilder.of(model)
            builder.fill(split=builder.stages.split.as_planned())
            applied.callback(_undo_slices, builder, builder.stages.split)
        if run.plan.shard.value == "auto":
            _reshard(model, run.strategies.models, candidate.choice.shard, run.options.min_shard_bytes)
        return applied.pop_all().close


def _reshard(model: keras.Model, strategy: tf.distribute.Strategy, shard: str | None, min_bytes: int) -> None:
    """Changes a model built in shards: `"optimizer"` adds whole copies of parameters, `None` makes variables whole."""
    if shard == "optimizer":
        add_copies(strategy, model)
        create_in_shards(strategy, copies=True, min_bytes=min_bytes)
    elif shard != "parameters":
        create_whole(strategy)
        unshard(strategy, model)


def _undo_slices(builder: StepBuilder, slices: object) -> None:
    """Ends slices, unless the user's own took their place."""
    if builder.stages.split is slices:
        builder.fill(split=None)


def _decision(run: PlannedRun, candidate: Candidate, shards: Sequence[str | None]) -> Decision | None:
    """The decision on shards, or `None` if the plan has made it already."""
    if run.plan.shard.value != "auto":
        return None
    shard = candidate.choice.shard
    override = " or ".join(f"shard={other!r}" for other in shards if other not in (shard, None))
    reason = "the fastest way to train that fits, in the table below"
    return Decision(name="shard", value=shard or "none", reason=reason, override=override or "fit_memory=False")
