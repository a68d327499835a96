"""`GradientNoiseScale`: estimates the largest batch size that still pays off."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_choice, check_integer, check_number
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.optimizer import clips_gradients, find_accumulator
from keras_paragrad.compat.types import Gradients, Logs
from keras_paragrad.compat.workers import local_replica_values, replica_variable
from keras_paragrad.engine.losses.terms import is_summed
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.per_example.wrapped_model import find_per_example_layer


class Noise(NamedTuple):
    """The signal and the noise of gradients.

    Attributes:
        signal: The squared norm of the gradient over all data.
        variance: The variance of a per-example gradient, summed over the weights.
    """

    signal: float
    variance: float

    @property
    def scale(self) -> float:
        """The noise scale: the batch size at which noise and signal are equally large."""
        return self.variance / self.signal if self.signal > 0 else float("nan")


class NoiseEstimate:
    """Estimates signal and noise from the gradient norms of small and large batches.

    The expected squared norm of a gradient over B examples is |G|^2 + S / B, with the signal |G|^2 and the variance S.
    Two batch sizes give two equations. Each update's solution enters a moving average, which is normalized by the sum
    of its weights. The window is what one update sums over: a batch, or several micro-batches.

    Args:
        decay: Decay of the moving average per update.
        is_summed: Returns whether the loss is a sum over the examples rather than a mean; called while the step is
            traced.
        examples: Returns the sum of the squared norms of this replica's per-example gradients, for small batches of one
            example; by default, micro-batches are the small batches.
    """

    def __init__(self, decay: float, is_summed: Callable[[], bool], examples: Callable[[], tf.Tensor] | None = None):
        self.decay, self.is_summed, self.examples = decay, is_summed, examples
        # Sums over the window's small batches: of squared norms, of 1 / size, of 1, and of the number of examples.
        self.window = replica_variable([4])
        # The moving averages of signal, variance and 1, whose quotients are the estimates.
        self.average = replica_variable([3])

    def gradient(self, gradients: Gradients, rows: tf.Tensor) -> None:
        """Adds a replica's micro-batch of `rows` examples to the window; see `engine.telemetry.watch.Observe`."""
        rows = tf.cast(rows, "float32")
        if self.examples is not None:
            small = [self.examples(), rows, rows, rows]
        else:
            # Keras has divided a mean by the number of replicas; a sum is not divided.
            factor = 1 / rows if self.is_summed() else tf.constant(float(replica_count()))
            small = [_squared_norm(gradients) * tf.square(factor), 1 / rows, tf.constant(1.0), rows]
        self.window.assign_add(tf.stack(small))

    def update(self, gradients: Gradients) -> None:
        """Takes the gradient of the whole update, the window's large batch, and solves for signal and variance."""
        (window,) = sum_over_replicas([tf.identity(self.window)])
        squares, inverses, count, rows = tf.unstack(window)
        large = _squared_norm(gradients) / (tf.square(rows) if self.is_summed() else 1.0)
        small, inverse_small, inverse_large = squares / count, inverses / count, 1 / rows
        difference = inverse_small - inverse_large
        signal = (inverse_small * large - inverse_large * small) / difference
        variance = (small - large) / difference
        averaged = self.decay * self.average + (1 - self.decay) * tf.stack([signal, variance, 1.0])
        # A window of a single small batch has nothing to compare.
        self.average.assign(tf.where(difference > 1e-9, averaged, self.average))
        self.window.assign(tf.zeros([4]))

    def begin(self) -> None:
        """Discards an unfinished window; called by the host."""
        for part in local_replica_values(self.window):
            part.assign(tf.zeros([4]))

    def read(self) -> Noise:
        """Returns the average so far; called by the host."""
        signal, variance, weight = (float(number) for number in local_replica_values(self.average)[0].numpy())
        return Noise(signal / weight, variance / weight) if weight else Noise(float("nan"), float("nan"))


def _squared_norm(gradients: Gradients) -> tf.Tensor:
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(gradient, "float32"))) for gradient in dense])


SOURCES = ("auto", "examples", "accumulation", "replicas")


class GradientNoiseScale(keras.callbacks.Callback):
    """Estimates the gradient noise scale during `fit`: roughly the largest batch size that still speeds up learning.

    Well below it, doubling the batch halves the number of steps; far above it, larger batches are wasted. The estimate
    compares the gradient norms of small and large batches, takes no extra backward pass, and is averaged over updates.
    At the end of each epoch `logs` gets `gradient_noise_scale`, `gradient_signal` (the squared norm of the gradient
    over all data) and `gradient_variance` (of a per-example gradient, summed over the weights); list callbacks that
    write logs, such as `TensorBoard` and `CSVLogger`, after this one.

    Args:
        source: Where the small batches come from. `"examples"`: single examples, of a model with a
            `PerExampleGradients` layer around all its weights that keeps norms. `"accumulation"`: the micro-batches of
            an `AccumulatingOptimizer`. `"replicas"`: each replica's part of the batch. `"auto"`: the first of these
            that is available.
        decay: Decay of the moving average per update, at least 0 and below 1.
        update_freq: `"epoch"`, or every how many batches to add the estimates to the batch `logs` as well.

    Attributes:
        noise: The estimate so far, with `signal`, `variance` and `scale`.

    Raises:
        ValueError: An argument is invalid; or, when `fit` begins, the source is not available.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import GradientNoiseScale, wrap
    >>> model = wrap(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
    >>> model.compile("sgd", loss="mse")
    >>> x = np.random.default_rng(0).normal(size=(1000, 8))
    >>> history = model.fit(x, x[:, :1], verbose=0, callbacks=[GradientNoiseScale()])
    >>> history.history["gradient_noise_scale"][0] > 0
    True

    Reference:
        McCandlish et al., An empirical model of large-batch training, https://arxiv.org/abs/1812.06162, appendix A.
    """

    def __init__(self, source: str = "auto", decay: float = 0.99, update_freq: int | str = "epoch"):
        check_internals("models", "steps")
        super().__init__()
        self.source = check_choice("source", source, SOURCES)
        self.decay = check_number("decay", decay, least=0, below=1, example=0.99)
        self.update_freq = check_integer("update_freq", update_freq, also=("epoch",), example=100)
        self._estimate: NoiseEstimate | None = None
        self._estimated_model: keras.Model | None = None

    @property
    def noise(self) -> Noise:
        return Noise(float("nan"), float("nan")) if self._estimate is None else self._estimate.read()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts observing gradients; a second `fit` of the same model resumes the average."""
        if self._estimated_model is not self.model:
            with self.model.distribute_strategy.scope():
                self._estimate = self._make_estimate()
            self._estimated_model = self.model
        StepBuilder.of(self.model).begin_fit(self._fillers)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Discards a window that the previous epoch left unfinished."""
        if self._estimate:
            self._estimate.begin()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Adds the estimates to the batch logs every `update_freq` batches."""
        if self.update_freq != "epoch" and logs is not None and (batch + 1) % self.update_freq == 0:
            logs.update(self._logs())

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the estimates to the epoch's logs."""
        if logs is not None:
            logs.update(self._logs())

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Stops observing."""
        StepBuilder.of(self.model).end_fit(self._fillers)

    def _fillers(self) -> dict[str, NoiseEstimate | None]:
        """What fills the stages of the model's step, by the stage's name."""
        return {"observe": self._estimate}

    def _logs(self) -> dict[str, float]:
        noise = self.noise
        return {
            "gradient_noise_scale": noise.scale,
            "gradient_signal": noise.signal,
            "gradient_variance": noise.variance,
        }

    def _make_estimate(self) -> NoiseEstimate:
        """Chooses the gradients of small batches to compare with; refuses a model that has none."""
        model = self.model
        layer = find_per_example_layer(model)
        replicas = model.distribute_strategy.num_replicas_in_sync
        available = {
            "examples": bool(layer) and layer.stored == {"norms"} and not layer.reweights,
            "accumulation": find_accumulator(model.optimizer) is not None,
            "replicas": replicas > 1,
        }
        source = self.source if self.source != "auto" else next((name for name in available if available[name]), None)
        if source is None or not available[source]:
            raise ValueError(
                f"GradientNoiseScale(source={self.source!r}) has no gradients of small batches to compare with. Wrap "
                "the model with keras_paragrad.wrap(model), without clip_norm or transform; or compile it with an "
                "AccumulatingOptimizer of several steps; or train it on several replicas."
            )
        stages = StepBuilder.of(model).stages
        weighted = stages.take is not None and stages.take.loss_divisor is not None
        clips_after_sum = available["accumulation"] or weighted or stages.chain is not None
        if replicas > 1 and clips_gradients(model.optimizer) and not clips_after_sum:
            raise ValueError(
                "Under a strategy, Keras clips gradients before the all-reduce, so the gradient of the whole batch "
                "before clipping is not available. Train with DistributedFit(), or write "
                "model.compile(AccumulatingOptimizer(optimizer, steps=1))."
            )
        examples = layer.sum_of_squared_norms if layer and source == "examples" else None
        return NoiseEstimate(self.decay, lambda: is_summed(model), examples)
