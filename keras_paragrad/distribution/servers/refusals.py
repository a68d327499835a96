"""Refuses models that can't be trained with parameter servers."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import accumulating, accumulation_steps, parts
from keras_paragrad.engine.step.builder import StepBuilder


def check_model(model: Any) -> None:
    """Refuses a model that can't be trained with parameter servers."""
    strategy = model.distribute_strategy
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            f"The model was built under {type(strategy).__name__}, so its weights are not on parameter servers. "
            "Build and compile it within `with dist.scope():`."
        )
    if not model.compiled:
        raise ValueError("The model has not been compiled. Write model.compile(...) before dist.prepare(model).")
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"Each worker has {strategy.num_replicas_in_sync} GPUs, but takes a step on only one. Start one worker per "
            "GPU: `python -m keras_paragrad launch --workers 2 --devices-per-worker 1 --ps 1 train.py`."
        )
    if model.jit_compile:
        raise ValueError(
            "The model was compiled with jit_compile=True, but XLA can't compile a step whose variables are on "
            "parameter servers. Write jit_compile=False."
        )
    if model.run_eagerly:
        raise ValueError(
            "The model was compiled with run_eagerly=True, but workers only run compiled steps. Write "
            'run_eagerly=False, or train with strategy="none" to debug a step.'
        )
    _check_optimizer(model.optimizer)
    _check_stages(model)


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    accumulator = accumulating(optimizer)
    if accumulator or accumulation_steps(optimizer) > 1:
        found = type(accumulator).__name__ if accumulator else "gradient_accumulation_steps"
        raise ValueError(
            f"The optimizer accumulates gradients ({found}), but workers step concurrently, and would mix up their "
            "windows. Compile with an optimizer that does not accumulate, and pass fit a larger batch_size."
        )
    if any(part.use_ema and part.ema_overwrite_frequency for part in parts(optimizer)):
        raise ValueError(
            "The optimizer overwrites the weights with their average (ema_overwrite_frequency), while other workers "
            "update them. Write ema_overwrite_frequency=None: the average then replaces the weights when fit ends."
        )


def _check_stages(model: keras.Model) -> None:
    filled = StepBuilder.of(model).stages.filled
    if filled:
        raise ValueError(
            f"The model's training step is modified ({', '.join(filled)}): by a callback, such as ExactAccumulation, "
            "by microbatch, or by another preparation. With parameter servers, workers take Keras's own step: leave "
            "those out, or undo() them."
        )
