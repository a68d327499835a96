"""`make_private`: a model with the same weights, whose `fit` is DP-SGD."""

import functools
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_choice, check_flag, check_instance, check_integer, check_number
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.losses import LossMatching
from keras_paragrad.compat.types import Config, FitData, Structure
from keras_paragrad.engine.losses.dividers import Divider
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.extras import require
from keras_paragrad.per_example.wrapped_model import PerExampleModel
from keras_paragrad.privacy.accounting import ACCOUNTANTS
from keras_paragrad.privacy.adaptive import AdaptiveClip, ClipState
from keras_paragrad.privacy.budget import EpsilonLogs, Privacy, Settings, UpdateCounter
from keras_paragrad.privacy.clipping import ClipNorm, PrivateGradients, check_clip
from keras_paragrad.privacy.ledger import ROWS, WORDS
from keras_paragrad.privacy.random_access import digest_of_examples, examples_of
from keras_paragrad.privacy.refusals import check_compiled, check_private_fit, check_private_layers, check_transforms
from keras_paragrad.privacy.releases import Releases
from keras_paragrad.privacy.sampling import PoissonSampling, present_rows, private_batches
from keras_paragrad.privacy.update import GaussianNoise, PhysicalBatches

_log = logging.getLogger("keras_paragrad")
DIVIDER = Divider(
    configured_by="make_private",
    parts="the physical batches of an update",
    for_equal_parts="let the loss be a sum or a mean of one value per example",
    to_train_anyway=None,
    # A wrong weighting would not bound the contribution of an example.
    takes_weighting=False,
    for_any_loss="For training with differential privacy, let each loss return one value per example.",
)


def make_private(
    model: keras.Model,
    *,
    clip_norm: ClipNorm,
    expected_batch_size: int,
    delta: float,
    target_epsilon: float | None = None,
    epochs: int | None = None,
    noise_multiplier: float | None = None,
    examples: int | None = None,
    physical_batch_size: int | None = None,
    accountant: str = "rdp",
    secure_noise: bool = False,
    seed: int | None = None,
) -> "PrivateModel":
    """A model with the same weights whose `fit` is DP-SGD: Poisson sampling, clipping, noise and their accounting.

    Compile it with any loss and optimizer, and call `fit(x, y, epochs=...)`, or `DistributedFit.fit`. Each update draws
    every example with the same probability, clips the drawn examples' gradients, divides their sum by the expected
    batch size, and adds Gaussian noise once; the optimizer's own clipping and step follow. The logs have `epsilon`.

    Args:
        model: A Sequential, Functional or subclassed model, in which no example's output depends on another's.
        clip_norm: The largest norm of an example's gradient: a number; a dictionary from regular expressions of layer
            names to norms, where the first match counts; `"per_layer"`, equal norms that together make 1; or an
            `AdaptiveClip`.
        expected_batch_size: Examples in a batch on average; an example's sampling rate is this over the number of
            examples.
        delta: Smaller than one over the number of examples.
        target_epsilon: The epsilon that `epochs` may spend; noise is calibrated to it, and training stops there.
            Releases of loaded weights count against it.
        epochs: The number of epochs that noise is calibrated for, of examples / expected_batch_size updates each.
        noise_multiplier: Instead of these, the standard deviation of the noise in units of the clip norm.
        examples: Number of examples in the data, if it has to be known before `fit`.
        physical_batch_size: The most rows to compute at a time, of all replicas together, to fit the memory; by default
            enough for most draws. Physical batches without a drawn row are not computed, so an update's time depends on
            the draw.
        accountant: `"rdp"`, or `"pld"` for a tighter epsilon, which takes longer; both are dp-accounting's.
        secure_noise: Whether to draw noise from the operating system's randomness, which is slow and not repeatable. It
            does not defend against attacks on floating-point arithmetic.
        seed: Makes sampling and noise repeatable: the same training from the same weights ends the same. Keep it
            secret, as `secrets.randbits(64)`; by default it is drawn. It is saved in no file.

    Returns:
        A model to compile and fit, with a `privacy` attribute: `epsilon`, `updates`, `sampling_rate`,
        `noise_multiplier`, `statement()`, and `event` for the accountants of dp-accounting.

    Raises:
        ValueError: An argument is out of its range, or the model mixes examples. The message says what to write.
        MissingExtraError: dp-accounting is not installed.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad.privacy import make_private
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> private = make_private(
    ...     model, clip_norm=1.0, expected_batch_size=64, delta=1e-4, target_epsilon=3.0, epochs=2, seed=0
    ... )
    >>> private.compile("sgd", loss="mse")
    >>> history = private.fit(np.ones((1000, 8)), np.ones((1000, 1)), epochs=2, verbose=0)
    >>> private.privacy.updates, round(private.privacy.epsilon, 2)
    (32, 3.0)

    Reference:
        Abadi et al., Deep learning with differential privacy (2016), https://arxiv.org/abs/1607.00133.
    """
    check_instance("model", model, keras.Model, "a Keras model", example="keras.Sequential([keras.layers.Dense(10)])")
    settings = Settings(
        check_clip(clip_norm),
        check_integer("expected_batch_size", expected_batch_size, example=256),
        float(check_number("delta", delta, above=0, below=1, example=1e-5)),
        check_number("target_epsilon", target_epsilon, above=0, example=3.0, optional=True),
        check_integer("epochs", epochs, example=10, optional=True),
        check_number("noise_multiplier", noise_multiplier, above=0, example=1.0, optional=True),
        check_integer("examples", examples, example=60_000, optional=True),
        check_integer("physical_batch_size", physical_batch_size, example=64, optional=True),
        check_choice("accountant", accountant, tuple(ACCOUNTANTS)),
        check_flag("secure_noise", secure_noise),
    )
    check_integer("seed", seed, least=0, most=2**64 - 1, example=7, optional=True)
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "Either `target_epsilon` has to be given, to which noise is calibrated, or `noise_multiplier`. Write "
            "make_private(..., target_epsilon=3.0, epochs=10), or make_private(..., noise_multiplier=1.0)."
        )
    if target_epsilon is not None and epochs is None:
        raise ValueError(
            "`target_epsilon` is given without `epochs`, and longer training needs more noise. Write "
            "make_private(..., target_epsilon=..., epochs=10)."
        )
    if noise_multiplier is not None and epochs is not None:
        raise ValueError(
            "`epochs` calibrates noise to a target_epsilon, and `noise_multiplier` is given instead. Leave epochs out "
            "here, and pass it to fit."
        )
    if settings.examples is not None:
        settings.check_examples(settings.examples)
    check_private_layers(model)
    require("make_private", "dp_accounting")
    private = PrivateModel(
        PrivateGradients(model, settings.clip_norm, settings.expected_batch_size),
        settings,
        name=f"{model.name}_private",
    )
    if model.built and getattr(model, "input_shape", None) is not None:
        private.build(model.input_shape)
    private.set_seed(seed)
    return private


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PrivateModel(PerExampleModel):
    """The model that `make_private` returns.

    Attributes:
        privacy: What training has spent, and what is left: `epsilon`, `updates`, `sampling_rate`, `noise_multiplier`,
            `statement()`, `event`, and `replace_unknown()` for weights without a known ledger.
    """

    def __init__(self, per_example: PrivateGradients, settings: Settings, **kwargs: Any):
        check_internals("steps", "data")
        super().__init__(per_example, **kwargs)
        # Saved with the weights, so that a loaded model continues to count.
        self._updates = self._add_state("updates", (), "int64")
        if isinstance(settings.clip_norm, AdaptiveClip):
            self._log_clip_norm = self._add_state("log_clip_norm", (), "float32")
            per_example.__dict__["state"] = ClipState(
                settings.clip_norm, settings.expected_batch_size, self._log_clip_norm
            )
        self._ledger = self._add_state("ledger", (ROWS, WORDS), "int64")
        # Bypasses Keras's tracking: none of this is state of the model, and no file may hold the key.
        releases = Releases(self, self._updates, self._ledger)
        self.__dict__.update(privacy=Privacy(settings, releases), _releases=releases, _noise=None)

    def _add_state(self, name: str, shape: tuple[int, ...], dtype: str) -> keras.Variable:
        """Creates a variable that is saved with the weights; it starts at zeros, and is the same on every replica."""
        return self.add_weight(
            name=name,
            shape=shape,
            dtype=dtype,
            initializer="zeros",
            trainable=False,
            aggregation="only_first_replica",
        )

    def set_seed(self, seed: int | None) -> None:
        """Sets the seed of sampling and noise, for a loaded model to continue as if it hadn't been interrupted.

        Args:
            seed: The `seed` of `make_private`; `None` draws one.
        """
        self._releases.set_seed(seed)

    def get_weights(self) -> list[np.ndarray]:
        """Returns all weights, and the ledger among them."""
        self._releases.entries()
        return super().get_weights()

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Sets all weights, and adds their ledger to the model's."""
        self._releases.entries()
        super().set_weights(weights)
        self._releases.sync()

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Saves the weights with the current ledger."""
        self._releases.entries()
        super().save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Loads the weights, and adds their ledger to the model's."""
        self._releases.entries()
        super().load_own_variables(store)
        self._releases.sync()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a `ValueError`: a batch of the caller's choice isn't a random sample."""
        raise ValueError(
            "train_on_batch takes a batch that you choose, and epsilon holds for random samples only. Call "
            "private.fit(x, y, epochs=...)."
        )

    def fit(
        self,
        x: FitData = None,
        y: FitData = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: FitData = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: FitData = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> keras.callbacks.History:
        """Trains with differential privacy: each batch is an update, of a Poisson sample of all examples.

        Args:
            x: Arrays, a `keras.utils.PyDataset`, or a `tf.data.Dataset` of batches with random access.
            y, sample_weight, class_weight: As in `keras.Model.fit`, beside arrays; batches of other data have all of
                these. An example's weight scales its loss.
            epochs: Of examples / expected_batch_size updates each.
            verbose, callbacks, initial_epoch, validation_data, validation_steps, validation_batch_size,
                validation_freq: As in `keras.Model.fit`. Epsilon doesn't cover validation data.
            batch_size, validation_split, shuffle, steps_per_epoch: Refused where they contradict the sampling.

        Returns:
            The `History`; its logs have `epsilon`.

        Raises:
            ValueError: The data have no random access, the budget is spent, or an argument is refused.
            MissingExtraError: dp-accounting is not installed.
        """
        # A loaded model hasn't gone through make_private.
        require("A private model's fit", "dp_accounting")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        listed = callbacks if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
        check_compiled(self)
        check_private_fit(self, listed, batch_size, validation_split, shuffle, steps_per_epoch)
        check_transforms(self, self._releases.seed)
        examples = examples_of(x, y, sample_weight, class_weight)
        self.privacy.set_examples(examples.count)
        left = self.privacy.updates_left
        if left == 0:
            raise ValueError(self.privacy.spent_budget_message())
        self._warn_once()
        padded, physical = self.privacy.rows(replicas := self.distribute_strategy.num_replicas_in_sync)
        builder = StepBuilder.of(self)
        split = PhysicalBatches(physical // replicas, LossDivisor("auto", DIVIDER), prove=False)
        self._install(builder, split, padded)
        sampling = PoissonSampling((0, 0), examples.count, self.privacy.sampling_rate, padded, replicas)
        digest_of_data = functools.cache(lambda: digest_of_examples(examples))

        def begin_epoch() -> tuple[int, int]:
            numbers = self._releases.begin_epoch(self.privacy.event_of_update, digest_of_data)
            sampling.key = self._sampling_key()
            return numbers

        steps = self.privacy.updates_per_epoch
        # Otherwise the budget, and with it the last epoch, ends early.
        whole = left is None or left % steps == 0
        counter = UpdateCounter(self.privacy, begin_epoch, lambda: builder.batches_to_skip, whole=whole)
        data = private_batches(examples, sampling, counter.update_numbers, self._nested_as_outputs)
        if whole:
            data = data.apply(tf.data.experimental.assert_cardinality(steps))
        self._releases.begin_fit()
        try:
            return super().fit(
                data,
                epochs=epochs,
                verbose=verbose,
                shuffle=False,
                callbacks=[EpsilonLogs(self.privacy, counter), *listed, counter],
                validation_data=validation_data,
                initial_epoch=initial_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size or physical,
                validation_freq=validation_freq,
            )
        finally:
            # Makes the layer refuse steps that are traced outside of fit.
            self.per_example.rows = None
            self._releases.end_fit()

    def _nested_as_outputs(self, targets: Structure) -> Structure:
        """Nests targets, or weights nested like targets, as the outputs are, where Keras looks for sample weights."""
        outputs = getattr(self.per_example.layer, "output", None)
        if outputs is None or not keras.tree.is_nested(targets) or self.loss is None:
            return targets
        names = getattr(self, "output_names", None)
        targets_of = {match.path: match.y_true for match in LossMatching(self.loss, names).match(targets, outputs)}
        leaves = keras.tree.flatten_with_path(outputs)
        found = [targets_of.get(path) for path, _ in leaves]
        # In a list, tf.data would stack the tensors.
        return keras.tree.pack_sequence_as(keras.tree.lists_to_tuples(outputs), found)

    def _install(self, builder: StepBuilder, split: PhysicalBatches, padded: int) -> None:
        """Fills the stages of the model's step with physical batches, of `padded` rows in all, and with noise."""
        layer = self.per_example
        layer.rows = padded
        if self._noise is None:
            deviation = self.privacy.gradient_noise_multiplier / self.privacy.settings.expected_batch_size
            self.__dict__["_noise"] = GaussianNoise(
                self._noise_key,
                self._releases.position,
                self._updates,
                lambda: deviation * layer.sensitivity,
                lambda: self.trainable_weights,
                secure=self.privacy.settings.secure_noise,
                on_end=layer.state.update if layer.state is not None else None,
            )
        # Filling a stage discards the compiled step.
        if (builder.stages.split, builder.stages.transform) != (split, self._noise):
            builder.fill(split=split, transform=self._noise, present=present_rows)

    def _sampling_key(self) -> tuple[int, int]:
        """The first half of the run's key, as the unsigned integers that Philox takes."""
        first, second, *_ = np.asarray(self._releases.key.numpy()).astype(np.uint64).tolist()
        return first, second

    def _noise_key(self) -> tf.Tensor:
        """The second half of the run's key, int64 `(2,)`."""
        return tf.identity(self._releases.key)[2:]

    def _warn_once(self) -> None:
        """Warns in the first `fit` of what epsilon doesn't cover."""
        if not self.__dict__.get("_warned"):
            self.__dict__["_warned"] = True
            _log.warning(
                "Epsilon holds for the weights. The losses and metrics of training, telemetry and norms of gradients "
                "are computed from private rows without noise: don't publish them."
            )

    def get_config(self) -> Config:
        """The constructor's arguments, serialized, with the number of examples if it is known."""
        # The layer's config has the clip norm.
        settings = {**vars(self.privacy.settings), "clip_norm": None, "examples": self.privacy.examples_if_known}
        return {**super().get_config(), "settings": settings}

    @classmethod
    def from_config(cls, config: Config, custom_objects: dict[str, type] | None = None) -> "PrivateModel":
        config = dict(config)
        layer = keras.saving.deserialize_keras_object(config.pop("per_example"), custom_objects)
        settings = config.pop("settings")
        return cls(layer, Settings(**{**settings, "clip_norm": layer.clip}), **config)
