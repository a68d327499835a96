"""Learning-rate scaling with the batch size."""

from typing import Any

import keras


class ScaledLearningRate(keras.callbacks.Callback):
    """Scales the learning rate while `fit` runs, after a warm-up that starts at the unscaled rate.

    Args:
        factor: The factor of the rate.
        warmup_steps: Number of updates over which the rate grows to that, in equal steps.

    Raises:
        ValueError: When `fit` begins: the optimizer has a schedule, which has to be scaled where it is defined.

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD (2017), https://arxiv.org/abs/1706.02677: gradual warmup.
    """

    def __init__(self, factor: float, warmup_steps: int = 0):
        super().__init__()
        self.factor = factor
        self.warmup_steps = warmup_steps
        self._rate: float | None = None
        self._grows = False
        self._began = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Records the rate."""
        optimizer = self._optimizer
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        try:
            optimizer.learning_rate = rate
        except TypeError as error:
            raise ValueError(
                f"The learning rate of {optimizer.name} follows a schedule, which lr_scaling= can't scale. "
                f"Leave lr_scaling out, and multiply the schedule's rates by {self.factor:g}."
            ) from error
        self._rate, self._grows = rate, True
        self._began = int(optimizer.iterations.numpy())

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the next update during warm-up; afterwards other callbacks may change it."""
        if not self._grows or self._rate is None:
            return
        done = int(self._optimizer.iterations.numpy()) - self._began
        self._grows = done < self.warmup_steps
        share = done / self.warmup_steps if self._grows else 1.0
        self._optimizer.learning_rate = self._rate * (1 + (self.factor - 1) * share)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Divides the rate by the factor, so that the next `fit` starts unscaled."""
        self.leave()

    def leave(self) -> None:
        """Does the same once, also after a `fit` that failed with an error."""
        if self._rate is not None:
            rate = float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))
            self._optimizer.learning_rate = self._rate if self._grows else rate / self.factor
            self._rate = None

    @property
    def _optimizer(self) -> Any:
        model: Any = self.model
        return model.optimizer
