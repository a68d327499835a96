"""`PrivateModel`: what `make_private` returns, whose `fit` is DP-SGD."""

import functools
import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.engine.losses.normalization import LossNormalization
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.extras import require
from keras_paragrad.per_example.model import PerExampleModel
from keras_paragrad.privacy.adaptive import AdaptiveClip, ClipState
from keras_paragrad.privacy.budget import Privacy, Settings
from keras_paragrad.privacy.callback import Epochs, PrivacyLogs
from keras_paragrad.privacy.clipping import PrivateGradients
from keras_paragrad.privacy.ledger import ROWS, WORDS
from keras_paragrad.privacy.noise import GaussianNoise
from keras_paragrad.privacy.physical import PhysicalBatches
from keras_paragrad.privacy.refusals import check_compiled, check_fit, check_transforms
from keras_paragrad.privacy.releases import Releases
from keras_paragrad.privacy.rows import rows_from
from keras_paragrad.privacy.sampling import PoissonSampling, present, private_batches
from keras_paragrad.privacy.secret import digest_of_rows

_log = logging.getLogger("keras_paragrad")


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PrivateModel(PerExampleModel):
    """What `make_private` returns.

    Attributes:
        privacy: What has been spent, and what may be: `epsilon`, `updates`, `sampling_rate`, `noise_multiplier`,
            `statement()`, `event`, and `replace_unknown()` for weights of which no ledger is known.
    """

    def __init__(self, per_example: PrivateGradients, settings: Settings, **kwargs: Any):
        super().__init__(per_example, **kwargs)
        # Saved with the weights: a loaded model goes on counting.
        self._updates = self.add_weight(
            name="updates",
            shape=(),
            dtype="int64",
            initializer="zeros",
            trainable=False,
            aggregation="only_first_replica",
        )
        if isinstance(settings.clip_norm, AdaptiveClip):
            self._log_clip_norm = self.add_weight(
                name="log_clip_norm",
                shape=(),
                dtype="float32",
                initializer="zeros",
                trainable=False,
                aggregation="only_first_replica",
            )
            per_example.__dict__["state"] = ClipState(
                settings.clip_norm, settings.expected_batch_size, self._log_clip_norm
            )
        # The last one: files from before it lack it.
        self._ledger = self.add_weight(
            name="ledger",
            shape=(ROWS, WORDS),
            dtype="int64",
            initializer="zeros",
            trainable=False,
            aggregation="only_first_replica",
        )
        # Bypass Keras's tracking: none of this is state of the model, and the key must be in no file.
        releases = Releases(self, self._updates, self._ledger)
        self.__dict__.update(privacy=Privacy(settings, releases), _releases=releases, _noise=None)

    @classmethod
    def around(cls, model: keras.Model, settings: Settings, seed: int | None) -> "PrivateModel":
        """A private model with the weights of another."""
        layer = PrivateGradients(model, settings.clip_norm, settings.expected_batch_size)
        made = cls(layer, settings, name=f"{model.name}_private")
        if model.built and getattr(model, "input_shape", None) is not None:
            made.build(model.input_shape)
        made.set_seed(seed)
        return made

    def set_seed(self, seed: int | None) -> None:
        """Makes sampling and noise those of a seed, for a loaded model to go on as if it hadn't been interrupted.

        Args:
            seed: What `make_private` was given; `None` draws one.
        """
        self._releases.set_seed(seed)

    def get_weights(self) -> list[np.ndarray]:
        """The values of all weights, with the ledger of what they have released."""
        self._releases.sync()
        return super().get_weights()

    def set_weights(self, weights: list[Any]) -> None:
        """Sets the values of all weights, and adds what they have released to the ledger."""
        self._releases.sync()
        super().set_weights(weights)
        self._releases.sync()

    def save_own_variables(self, store: Any) -> None:
        """Saves the ledger as it is now."""
        self._releases.sync()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Adds what loaded weights have released to the ledger."""
        self._releases.sync()
        stored = {name: store[name] for name in store.keys()}  # noqa: SIM118
        last = str(len(self._non_trainable_variables) - 1)
        super().load_own_variables({last: np.zeros((ROWS, WORDS), np.int64), **stored})
        self._releases.sync()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a batch of one's own is no random sample.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "train_on_batch takes a batch of your own, and epsilon holds for random samples only. Call "
            "private.fit(x, y, epochs=...)."
        )

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Trains with differential privacy: each batch is an update, of a Poisson sample of all examples.

        Args:
            x: Arrays, a `keras.utils.PyDataset`, or a `tf.data.Dataset` of batches with random access.
            y, sample_weight, class_weight: As in `keras.Model.fit`. An example's weight is a part of its loss.
            epochs: Of examples / expected_batch_size updates each.
            verbose, callbacks, initial_epoch, validation_data, validation_steps, validation_batch_size,
                validation_freq: As in `keras.Model.fit`. Validation data are outside of epsilon.
            batch_size, validation_split, shuffle, steps_per_epoch: Refused, where they contradict the sampling.

        Returns:
            The `History`; its logs have `epsilon`.

        Raises:
            ValueError: The data have no random access, the budget is spent, or an argument is refused.
            MissingExtraError: dp-accounting is not installed.
        """
        # Of a loaded model, too, and before the first update rather than after it.
        require("A private model's fit", "dp_accounting")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        listed = callbacks if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
        check_compiled(self)
        check_fit(self, listed, batch_size, validation_split, shuffle, steps_per_epoch)
        check_transforms(self, self._releases.seed)
        rows = rows_from(x, y, sample_weight, class_weight)
        self.privacy.given(rows.count)
        self._releases.begin_fit()
        left = self.privacy.updates_left
        if left == 0:
            raise ValueError(self.privacy.spent_budget())
        self._warn_once()
        padded, physical = self.privacy.rows(replicas := self.distribute_strategy.num_replicas_in_sync)
        builder = StepBuilder.of(self)
        split = PhysicalBatches(physical // replicas, LossNormalization(asked_by="make_private"))
        self._install(builder, split, padded)
        sampled = self.privacy.examples, self.privacy.sampling_rate, padded
        sampling = PoissonSampling((0, 0), *sampled, replicas)

        digest_of_data = functools.cache(lambda: digest_of_rows(rows))

        def begin_epoch() -> tuple[int, int]:
            begun = self._releases.begin_epoch(self.privacy.event_of_update, digest_of_data)
            sampling.key = self._sampling_key()
            return begun

        steps = self.privacy.updates_per_epoch
        # Else the budget ends within an epoch, and the epoch with it.
        whole = left is None or left % steps == 0
        counted = Epochs(self.privacy, begin_epoch, lambda: builder.batches_to_skip, whole=whole)
        data = private_batches(rows, sampling, counted.numbers)
        if whole:
            data = data.apply(tf.data.experimental.assert_cardinality(steps))
        try:
            return super().fit(
                data,
                epochs=epochs,
                verbose=verbose,
                shuffle=False,
                callbacks=[PrivacyLogs(self.privacy, counted), *listed, counted],
                validation_data=validation_data,
                initial_epoch=initial_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size or physical,
                validation_freq=validation_freq,
            )
        finally:
            # Steps that are traced elsewhere are none of an update, and refused.
            self.per_example.rows = None
            self._releases.end_fit()

    def _install(self, builder: StepBuilder, split: PhysicalBatches, padded: int) -> None:
        layer: Any = self.per_example
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
                ended=layer.state.update if layer.state is not None else None,
            )
        if (builder.stages.split, builder.stages.transform) != (split, self._noise):
            builder.fill(split=split, transform=self._noise, present=present)

    def _sampling_key(self) -> tuple[int, int]:
        first, second, *_ = np.asarray(self._releases.key.numpy()).astype(np.uint64).tolist()
        return first, second

    def _noise_key(self) -> tf.Tensor:
        return tf.identity(self._releases.key)[2:]

    def _warn_once(self) -> None:
        if not self.__dict__.get("_warned"):
            self.__dict__["_warned"] = True
            _log.warning(
                "Epsilon is that of the weights. The losses and metrics of training, telemetry and norms of gradients "
                "are computed from private rows without noise: don't publish them."
            )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serialized, with the size of the data if it is known."""
        # The layer has the clip norm.
        settings = {**vars(self.privacy.settings), "clip_norm": None, "examples": self.privacy.known_examples}
        return {**super().get_config(), "settings": settings}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "PrivateModel":
        config = dict(config)
        layer = keras.saving.deserialize_keras_object(config.pop("per_example"), custom_objects)
        settings = config.pop("settings")
        return cls(layer, Settings(**{**settings, "clip_norm": layer.clip}), **config)
