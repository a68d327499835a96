"""`DataParallel`: replicas of the model divide each batch, on one machine or several."""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.model import (
    check_no_row_states,
    may_choose_xla,
    overrides_predict,
    overrides_train_step,
)
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.state import log_once, warn_once
from keras_paragrad.compat.types import FitData, Specs
from keras_paragrad.compat.workers import NamedDevicesStrategy, barrier, parts_per_replica, replica_placement
from keras_paragrad.distribution.consistency.fitting import compared_fit, shard_again
from keras_paragrad.distribution.data import DistributedData, distributed_dataset
from keras_paragrad.distribution.decisions import decide_strategy
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Decisions, Options, refuse_devices
from keras_paragrad.distribution.parallelism import FittedMemory, Parallelism, PlannedRun, Preparation, Strategies
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.rendezvous import await_workers, join_workers
from keras_paragrad.distribution.replicas.memory import fit_memory
from keras_paragrad.engine.losses.dividers import (
    Divider,
    count_layers,
    layers_of_batch_statistics,
    warn_of_batch_statistics,
)
from keras_paragrad.engine.losses.divisors import DivisorFunction
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.replicas.prepared import (
    distributing_datasets_with,
    install_on_replicas,
    uninstall_from_replicas,
)
from keras_paragrad.engine.step.fixed_parts import FixedParts
from keras_paragrad.engine.step.stages import Take
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage.creation import may_be_in_shards
from keras_paragrad.storage.updating import check_optimizer_of_shards

Result = TypeVar("Result")
DIVIDER = Divider(
    configured_by="DistributedFit",
    parts="the replicas' parts of a batch",
    for_equal_parts="write DistributedFit(..., exact=False)",
    to_train_anyway="write DistributedFit(..., exact=False)",
    divides_calls=True,
    whole_batches='DistributedFit("none") trains on one device.',
    for_any_loss="DistributedFit('none') trains any loss.",
    divides_steps=True,
)

# For deterministic training, which adds the parts of a batch in a fixed order.
IN_ORDER = dataclasses.replace(
    DIVIDER,
    parts="the parts of a batch",
    for_equal_parts="leave deterministic out",
    to_train_anyway="leave deterministic out",
    whole_batches="Without deterministic, DistributedFit('none') trains on whole batches.",
    for_any_loss="Without deterministic, DistributedFit('none') trains any loss.",
)


class ReplicaPreparation(Preparation):
    """A model whose `fit`, `evaluate` and `predict` on replicas give the results of one device on whole batches.

    Each replica batch is weighted by its loss divisor, so uneven and weighted ones are exact; gradients are
    all-reduced before they are clipped; if any replica overflows under a `LossScaleOptimizer`, all skip the update;
    metrics cover all examples; with `jit_compile=True` XLA compiles each replica's forward and backward pass.
    """

    changes_in_place = True

    def __init__(
        self,
        model: keras.Model,
        exact: bool = True,
        weighting: str | DivisorFunction = "auto",
        jit: bool | None = None,
        shard_policy: str = "data",
        prove: bool = True,
        deterministic: int = 0,
    ):
        super().__init__(model, exact, weighting, jit, shard_policy, prove, deterministic)

    def renew(self) -> None:
        """Installs this preparation in the model's step, again after each `compile`.

        It fills *take* with the loss divisor and, if `deterministic`, *split* with fixed parts; on several
        workers, it replaces `fit`, `evaluate` and `predict`.
        """
        model = self.model
        exact, weighting, jit, shard_policy, prove, deterministic = self.settings
        # The optimizers of a custom step are checked when it calls them.
        if may_be_in_shards(model) and not overrides_train_step(model):
            check_optimizer_of_shards(model.optimizer)
        replicas = model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            check_no_row_states(
                model, f"each of {replicas} replicas gets", 'train on one device: DistributedFit("none")'
            )
        loss_divisor = self._loss_divisor(weighting) if exact else None
        if loss_divisor and replicas > 1:
            loss_divisor.check(model)
            if not deterministic:
                self._warn_of_batch_statistics()
        # Keras turns XLA off in models where determinism is on; parts are compiled nevertheless, if requested.
        if jit is not None and not deterministic:
            self.set_jit_compile(jit)
        by_xla = replicas > 1 and bool(model.jit_compile) and not self._all_reduces_in_forward_pass()
        on_workers = replica_placement(model.distribute_strategy).workers > 1
        distribute = functools.partial(shard_again, model, shard_policy, deterministic)
        ordered = None
        if deterministic:
            ordered = self._divide_in_order(deterministic, weighting, prove, jit is True, replicas)
        if ordered is None:
            self._divide_as_before()
        take = Take(loss_divisor if replicas > 1 else None, by_xla, prove, ordered)
        install_on_replicas(model, take, distribute if on_workers or deterministic else None)
        if on_workers:
            fit = functools.partial(compared_fit, model)
            evaluate = functools.partial(_with_barrier, type(model).evaluate, model)
            predict = functools.partial(_with_barrier, _predict_in_order, model)
            self.replace(fit=fit, evaluate=evaluate, predict=predict)

    def _divide_in_order(
        self, parts: int, weighting: str | DivisorFunction, prove: bool, by_xla: bool, replicas: int
    ) -> FixedParts:
        """Fills *split* with parts whose sums are added in a fixed order, and returns them."""
        model = self.model
        synchronized = [layer.name for layer in layers_of_batch_statistics(model) if layer.synchronized]
        if synchronized:
            raise ValueError(
                f"{', '.join(synchronized)} normalize with the statistics of all replicas, which are added in no fixed "
                "order. Write BatchNormalization(synchronized=False), which normalizes each part of a batch by its own "
                "statistics, or GroupNormalization."
            )
        warn_of_batch_statistics(model)
        split = StepBuilder.of(model).stages.split
        if split is None or split.loss_divisor.divider is IN_ORDER:
            split = FixedParts(parts, dataclasses.replace(self._loss_divisor(weighting), divider=IN_ORDER))
        if not isinstance(split, FixedParts) or split.parts != parts:
            cuts = split.loss_divisor.divider.configured_by
            raise ValueError(
                f"{cuts} cuts the batches of {model.name!r} already, and deterministic={parts} cuts them too. Leave "
                f"one of the two out; of microbatch, write microbatch(model, size, deterministic={parts})."
            )
        _warn_of_idle_replicas(model, parts, replicas)
        split = split.on_replicas(replicas, prove=prove, by_xla=by_xla)
        StepBuilder.of(model).fill(split=split)
        return split

    def _divide_as_before(self) -> None:
        """Empties *split* if `_divide_in_order` has filled it."""
        split = StepBuilder.of(self.model).stages.split
        if split is not None and split.loss_divisor.divider is IN_ORDER:
            StepBuilder.of(self.model).fill(split=None)

    def stop(self) -> None:
        self._divide_as_before()
        uninstall_from_replicas(self.model)

    def _loss_divisor(self, weighting: str | DivisorFunction) -> LossDivisor:
        """How replica batches are weighted: as an accumulating optimizer states, or else by `weighting`."""
        accumulator = find_accumulator(self.model.optimizer)
        accumulated = accumulator.weighting if accumulator else "auto"
        # Even if micro-batches are weighted uniformly, their replica batches may be uneven.
        return LossDivisor(weighting if accumulated in ("auto", "uniform") else accumulated, DIVIDER)

    def _warn_of_batch_statistics(self) -> None:
        """Warns of batch normalization that each replica computes separately."""
        layers = [layer for layer in layers_of_batch_statistics(self.model) if not layer.synchronized]
        if layers:
            warn_once(
                self.model,
                f"{count_layers(layers, 'normalize')} each replica's part of a batch with its own statistics, so "
                "training differs from training on whole batches. Write BatchNormalization(synchronized=True), or set "
                "trainable=False.",
            )

    def _all_reduces_in_forward_pass(self) -> bool:
        """Whether batch normalization is synchronized, so that XLA can't compile the step."""
        layers = [layer for layer in layers_of_batch_statistics(self.model) if layer.synchronized]
        if layers:
            log_once(
                self.model,
                f"{count_layers(layers, 'all-reduce')} statistics in the forward pass, which XLA can't compile, so "
                "this model is trained without XLA.",
                logging.WARNING,
            )
        return bool(layers)


def _warn_of_idle_replicas(model: keras.Model, parts: int, replicas: int) -> None:
    """Logs that replicas get no part of a batch, and how many parts would keep all busy."""
    per_replica = parts_per_replica(parts, replicas)
    idle = replicas - -(-parts // per_replica)
    if idle:
        log_once(
            model,
            f"{idle} of {replicas} replicas compute nothing: deterministic={parts} gives each replica a "
            f"power-of-two number of parts. deterministic={per_replica * replicas} would keep all busy.",
            logging.WARNING,
        )


def _with_barrier(method: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Calls a method, and waits for the other workers, which may still read results from this process."""
    result = method(*args, **kwargs)
    barrier()
    return result


def _predict_in_order(
    model: keras.Model,
    x: FitData,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: object = None,
) -> Any:
    """`predict` on several workers, with rows in order: TensorFlow's sharding interleaves them."""
    strategy = model.distribute_strategy
    if isinstance(x, DistributedData) or not overrides_predict(model):
        if not isinstance(x, DistributedData):
            x = distributed_dataset(strategy, x, batch_size=batch_size, steps_per_epoch=steps)
        return type(model).predict(model, x, verbose=verbose, steps=steps, callbacks=callbacks)
    # An overridden `predict` makes its own dataset, which is then sharded; it need not accept all arguments of Keras's.
    arguments = {"batch_size": batch_size, "verbose": verbose, "steps": steps, "callbacks": callbacks}
    defaults = inspect.signature(keras.Model.predict).parameters
    arguments = {name: value for name, value in arguments.items() if value is not defaults[name].default}
    model.make_predict_function()
    with distributing_datasets_with(model, lambda data: distributed_dataset(strategy, data, steps_per_epoch=steps)):
        return type(model).predict(model, x, **arguments)


class DataParallel(Parallelism):
    """One replica or several; the default."""

    precedence = 100
    adds_in_order = True
    fits_memory = True
    # Of `compat.names.NAMES`.
    parts = ("replicas",)

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "DataParallel":
        return cls()

    @classmethod
    def check_options(cls, options: Options) -> None:
        if options.devices is None:
            return
        if options.strategy == "none":
            refuse_devices(options)
        if options.strategy == "one_device" and len(options.devices) > 1:
            raise ValueError(
                f'strategy="one_device" takes one device, and devices={list(options.devices)} names '
                f'{len(options.devices)}. Name one of them, or write strategy="mirrored".'
            )

    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        """This parallelism's own decision; the functions in `decisions.py` make the others."""
        strategy = decide_strategy(hardware, options)
        return Decisions([strategy], launched=self.kind(strategy.value).on_workers)

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        if options.given is not None:
            return Strategies.same(options.given)
        name, devices = plan.strategy.value, list(plan.devices.value)
        if name == "none":
            return Strategies.same(tf.distribute.get_strategy())
        if name == "one_device":
            return Strategies.same(tf.distribute.OneDeviceStrategy(f"/{devices[0]}"))
        if name == "multi_worker":
            return Strategies.same(_multi_worker(plan, hardware, options))
        # Others are TensorFlow's default.
        all_reduces = {"nccl": tf.distribute.NcclAllReduce, "one_device": tf.distribute.ReductionToOneDevice}
        all_reduce = all_reduces.get(plan.communication.value)
        return Strategies.same(tf.distribute.MirroredStrategy(devices, all_reduce and all_reduce()))

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        options, jit = run.options, run.options.jit
        if jit == "auto" and options.deterministic:
            # What XLA computes differs in the last bits, so it is used on all numbers of devices or on none.
            jit = False
        elif jit == "auto":
            # Keras disables XLA under every strategy, unless it is requested explicitly.
            unset = run.strategies.models.num_replicas_in_sync > 1 and may_choose_xla(model)
            jit = run.plan.jit.value != "none" if unset else None
        return ReplicaPreparation.of(
            model, options.exact, options.weighting, jit, options.shard_policy, options.prove, options.deterministic
        )

    def fit_memory(
        self, model: keras.Model, run: PlannedRun, batch_size: int, batch_spec: Specs, log: Callable[[str], None]
    ) -> FittedMemory:
        return fit_memory(model, run, batch_size, batch_spec, log)

    def data(self, run: PlannedRun, x: FitData, y: FitData, sample_weight: FitData, **options: Any) -> DistributedData:
        return super().data(run, x, y, sample_weight, parts=run.options.deterministic or None, **options)


def _multi_worker(plan: Plan, hardware: Hardware, options: Options) -> tf.distribute.Strategy:
    """Waits for all workers, and creates their strategy."""
    cluster = hardware.cluster
    if cluster is None:
        raise ValueError("The plan is for several workers, but the hardware has no cluster.")
    facts = {"replicas": len(plan.devices.value), "communication": plan.communication.value}
    instead = ", or pass its strategy on: DistributedFit(strategy=first.strategy)"
    await_workers(cluster, options.startup_timeout, facts, instead=instead)
    kinds = tf.distribute.experimental.CommunicationImplementation
    implementation = kinds.NCCL if plan.communication.value == "nccl" else kinds.RING
    communication = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return join_workers(NamedDevicesStrategy, cluster, plan.devices.value, communication)


PARALLELISM = DataParallel
