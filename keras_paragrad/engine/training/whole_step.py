"""`CallDivider`: runs a step whole, as it is written, and divides the calls of layers.

    for each outermost call of a layer in the step:
        if it computes each row by itself: compute it in slices, on replicas, or in slices on replicas
        otherwise: enter it, and divide the calls of layers within it

So nothing has to be known of the step, such as what it divides by, compares, clips or logs, or how often it updates.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import (
    as_one_replica,
    replica_count,
    sum_over_replicas,
)
from keras_paragrad.compat.state import log_once
from keras_paragrad.compat.types import Batch, Gradients, StepLogs, Structure
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, counting_examples
from keras_paragrad.engine.calls.divided import Result, RowSlices, divided
from keras_paragrad.engine.calls.intercept import intercepting
from keras_paragrad.engine.calls.layer_call import LayerCall
from keras_paragrad.engine.calls.replicas import Share, gather_batch, metrics_of_one_device
from keras_paragrad.engine.proof.call_trials import untried_layers
from keras_paragrad.engine.step.apply import apply_same
from keras_paragrad.engine.step.building import build_for
from keras_paragrad.engine.step.gradient import in_function
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.storage.row_gradients import is_overwritten

# Applies gradients that are the same on every replica.
ApplySame = Callable[[keras.optimizers.Optimizer, Gradients, list[keras.Variable]], None]


class CallDivider:
    """Divides the calls of layers in a step, in `slices` if given, and on several replicas.

    `entered` has the reasons why calls of layers aren't divided, by the layers' ids; `None` enters all layers that
    weren't tried. `by_xla` says whether XLA compiles each replica's share of a call. `apply` updates with gradients
    that are the same on every replica.
    """

    def __init__(
        self,
        model: keras.Model,
        slices: RowSlices | None,
        entered: Mapping[int, str] | None,
        *,
        by_xla: bool = False,
        apply: ApplySame = apply_same,
    ):
        self.model, self.slices, self.by_xla, self.apply = model, slices, by_xla, apply
        self.entered = untried_layers(model) if entered is None else entered
        # The number of divided calls, and why others aren't, by the layer's name.
        self._divided, self._obstacles = 0, dict[str, str]()
        # The ids of the variables whose gradients divided calls sum over the replicas.
        self._summed: set[int] = set()

    def run(self, step: Callable[[Batch], StepLogs], data: Batch) -> StepLogs:
        """Runs a step on the whole batch, from this replica's rows `data`. Returns the logs."""
        if replica_count() == 1:
            with capturing_applies(self._apply), intercepting(self):
                logs = step(data)
        else:
            logs = self._on_replica(step, data)
        for name, why in self._obstacles.items():
            log_once(self.model, f"Calls of {name!r} get whole batches: {why}.")
        return logs

    def _on_replica(self, step: Callable[[Batch], StepLogs], data: Batch) -> StepLogs:
        whole = gather_batch(data, ReplicaBatch.of(data).rows)
        with (
            as_one_replica(),
            metrics_of_one_device(self.model),
            counting_examples(None),
            capturing_applies(self._apply),
            intercepting(self),
        ):
            return step(whole)

    def __call__(self, call: Callable[..., Structure], layer: keras.layers.Layer, arguments: Any, keywords: Any) -> Any:
        """Calls a layer in parts. Returns `NotImplemented` to enter the layer: to get the calls within it."""
        if id(layer) in self.entered:
            self._obstacles[layer.name] = self.entered[id(layer)]
            return NotImplemented
        layer_call = LayerCall(call, layer, arguments, keywords)
        if not layer_call.has_rows:
            return NotImplemented
        several = replica_count() > 1
        if not several and self.slices and layer_call.static is not None and layer_call.static <= self.slices.size:
            self._divided += 1
            return call(*arguments, **keywords)
        obstacle = layer_call.find_obstacle(runs_twice=self.slices is not None)
        if obstacle:
            self._obstacles[layer.name] = obstacle
            return NotImplemented
        self._divided += 1
        if several:
            return layer_call.finish(self._on_share(layer_call))
        return layer_call.finish(self._in_slices(layer_call, layer_call.rows, layer_call.whole, layer_call.state))

    def _in_slices(self, layer_call: LayerCall, rows: list[Any], whole: list[Any], state: list[Any]) -> Result:
        return divided(layer_call, rows, whole, self.slices, state) if self.slices else layer_call(rows, whole, state)

    def _on_share(self, layer_call: LayerCall) -> Result:
        """The result of a call for all rows, of which this replica computes its share."""
        share = Share(layer_call.rows)
        rows = share.own(layer_call.rows)
        whole, state = share.copy(layer_call.whole, rows), layer_call.state
        with counting_examples(share.nonempty):
            if self.by_xla and not self.slices:
                inputs: Any = (rows, whole, state)
                result: Result = in_function(functools.partial(_call, layer_call))(inputs)
            else:
                result = self._in_slices(layer_call, rows, whole, state)
        self._summed |= layer_call.read
        return result._replace(rows=share.whole(result.rows))

    def _apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]
    ) -> None:
        """Updates with the whole batch's gradients, which each replica has."""
        # Variables are made outside of the graph, which would otherwise be traced again.
        build_for(optimizer, variables)
        if replica_count() == 1:
            optimizer.apply(gradients, variables)
            return
        # Gradients that each replica has computed for itself may differ by rounding on GPUs. Their mean is the same.
        own = [
            index
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if isinstance(gradient, tf.Tensor) and id(variable) not in self._summed and not is_overwritten(variable)
        ]
        same = list(gradients)
        for index, total in zip(own, sum_over_replicas([tf.identity(same[index]) for index in own]), strict=True):
            same[index] = total / tf.cast(replica_count(), total.dtype)
        self.apply(optimizer, same, variables)

    @property
    def refusal(self) -> str | None:
        """After `run`, why no call could be divided, or `None`."""
        if self._divided:
            return None
        reasons = "; ".join(f"{name!r}: {why}" for name, why in self._obstacles.items()) or "it calls no layer"
        return (
            f"Nothing can be divided in the step of {type(self.model).__name__}: {reasons}. "
            "keras_paragrad.memory.recompute(model) saves memory with whole batches."
        )


def _call(layer_call: LayerCall, inputs: Any) -> Result:
    return layer_call(*inputs)
