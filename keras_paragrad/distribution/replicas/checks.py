"""Refuses options and models that replicas can't be trained with."""

from typing import Any

from keras_paragrad._keras.objects.capabilities import accumulation_steps
from keras_paragrad._keras.objects.model import has_own_train_step
from keras_paragrad._keras.storage.creation import may_be_in_shards
from keras_paragrad._keras.storage.updating import own_update
from keras_paragrad.distribution.options import Options, refuse_devices


def check_devices(options: Options) -> None:
    """Refuses `devices` with a named strategy that doesn't take as many.

    Raises:
        ValueError: The message says what to write.
    """
    if options.devices is None:
        return
    if options.strategy in ("none", "tpu"):
        refuse_devices(options)
    if options.strategy == "one_device" and len(options.devices) > 1:
        raise ValueError(
            f'strategy="one_device" takes one device, and devices={list(options.devices)} names '
            f'{len(options.devices)}. Name one of them, or write strategy="mirrored".'
        )


def check_shards(model: Any) -> None:
    """Refuses what would read or update shards as if they were whole.

    Raises:
        ValueError: The model is refused. The message says what to write.
    """
    if not may_be_in_shards(model):
        return
    if has_own_train_step(model):
        raise ValueError(
            f"{type(model).__name__} defines its own train_step, which hands the optimizer whole gradients, and this "
            "optimizer updates shards. Move what train_step does into compute_loss, or write DistributedFit(..., "
            "shard=None)."
        )
    optimizer = model.optimizer
    if accumulation_steps(optimizer) > 1:
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps), in a branch in which "
            "TensorFlow can't scatter them. Remove that argument, and compile with AccumulatingOptimizer(optimizer, "
            f"steps={accumulation_steps(optimizer)})."
        )
    if own := own_update(optimizer):
        raise ValueError(
            f"{own} is an optimizer's own, and would be given shards in place of whole gradients and weights. Move "
            "what it does into update_step, as keras.optimizers.Optimizer documents it, which is given whole ones; or "
            "write DistributedFit(..., shard=None)."
        )
