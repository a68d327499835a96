"""`Privacy`: what a private model's training has spent of its budget, and what is left; and callbacks that count it.

The budget is a target epsilon. The ledger lists the updates that the weights come from, in an entry for each run: a
sequence of updates whose samples and noise are drawn with one key.
"""

import dataclasses
import functools
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_paragrad.compat.types import Logs
from keras_paragrad.extras import require
from keras_paragrad.plain_text import InNotebooks, counted
from keras_paragrad.privacy.accounting import ACCOUNTANTS, check_updates
from keras_paragrad.privacy.adaptive import AdaptiveClip
from keras_paragrad.privacy.calibration import gradient_noise_multiplier, last_that, noise_multiplier
from keras_paragrad.privacy.clipping import ClipNorm
from keras_paragrad.privacy.ledger import Entry, Event, dp_event, epsilon_of
from keras_paragrad.privacy.releases import Releases
from keras_paragrad.privacy.sampling import least_rows, truncation_probability
from keras_paragrad.privacy.update import rows_of_update

_log = logging.getLogger("keras_paragrad")
# The largest fraction of delta that truncated draws may take.
_DELTA_FRACTION = 1e-3
# For that fraction, where the number of updates or epsilon isn't known beforehand.
_MANY_UPDATES, _LARGE_EPSILON = 10**6, 10.0
# Cached, as epsilon is computed after every update.
_cached_truncation_probability = functools.lru_cache(maxsize=64)(truncation_probability)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `make_private` without the seed, as they are saved."""

    clip_norm: ClipNorm
    expected_batch_size: int
    delta: float
    target_epsilon: float | None
    epochs: int | None
    noise_multiplier: float | None
    examples: int | None
    physical_batch_size: int | None
    accountant: str
    secure_noise: bool

    def check_examples(self, examples: int) -> None:
        """Refuses settings that make no sense for this number of examples."""
        if self.delta * examples >= 1:
            raise ValueError(
                f"`delta` is {self.delta:g}, so whole examples out of {examples} may be released. Write "
                f"make_private(..., delta={0.1 / examples:.1g}), for instance."
            )
        if examples < self.expected_batch_size:
            raise ValueError(
                f"`expected_batch_size` is {self.expected_batch_size}, and the data have {examples} examples, each of "
                f"which is in a batch at most once. Write make_private(..., expected_batch_size={examples}), or less."
            )


class Privacy(InNotebooks):
    """What training has spent of a privacy budget, and what is left of it."""

    def __init__(self, settings: Settings, releases: Releases):
        self.settings = settings
        self._releases = releases
        self.examples_if_known = settings.examples
        self._noise: float | None = settings.noise_multiplier

    def __repr__(self) -> str:
        if self.examples_if_known is None and not self.entries():
            return "<Privacy: before fit(), how many examples there are is unknown>"
        return f"<Privacy: {self.statement()}>"

    def entries(self) -> list[Entry]:
        """The ledger: an entry for each run that the weights come from."""
        return self._releases.entries()

    @property
    def updates(self) -> int:
        """Number of updates that the weights come from, including the updates of loaded weights."""
        return sum(entry.updates for entry in self.entries())

    @property
    def event(self) -> Any:
        """The ledger as a `dp_accounting.DpEvent`, from which the accountants of dp-accounting compute epsilon.

        `epsilon` is slightly larger: it also accounts for draws that exceed a batch's rows and are dropped. Updates
        whose noise is unknown become a `NonPrivateDpEvent`.

        Raises:
            MissingExtraError: dp-accounting is not installed.
        """
        require("privacy.event", "dp_accounting")
        return dp_event(self.entries())

    def replace_unknown(self, *updates: tuple[float, float, int]) -> None:
        """States how weights without a known ledger were trained.

        Args:
            *updates: The noise multiplier, the sampling rate and the number of updates, for each kind of updates. None
                at all, if no private example influenced these weights.
        """
        stated = [check_updates(*update) for update in updates]
        self._releases.replace_unknown(
            Entry(secrets.randbits(62), 0, 0, 0, Event(noise, rate), count) for noise, rate, count, _ in stated
        )

    @property
    def examples(self) -> int:
        """Number of examples in the data that batches are sampled from.

        Raises:
            ValueError: `fit` hasn't seen the data yet, and the number wasn't stated.
        """
        if self.examples_if_known is None:
            raise ValueError(
                "The number of examples is unknown until fit() gets the data. To state it before, write "
                "make_private(..., examples=60_000)."
            )
        return self.examples_if_known

    def set_examples(self, examples: int) -> None:
        """Sets the number of examples in the data; refuses one that differs from the stated or an earlier one."""
        if (known := self.examples_if_known) not in (None, examples):
            raise ValueError(
                f"The data have {examples} examples, and epsilon is computed for {known}, as stated or as in an "
                "earlier fit(). Pass the same data, or call make_private(model, ...) again, which adds to what was "
                "spent."
            )
        self.settings.check_examples(examples)
        self.examples_if_known = examples

    @property
    def sampling_rate(self) -> float:
        """The probability that an example is drawn into an update."""
        return self.settings.expected_batch_size / self.examples

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates in which each example is drawn once, in expectation."""
        return max(1, round(self.examples / self.settings.expected_batch_size))

    @property
    def planned_updates(self) -> int | None:
        """Number of updates that noise is calibrated for, or `None` without a `target_epsilon`."""
        return None if self.settings.epochs is None else self.settings.epochs * self.updates_per_epoch

    @property
    def rows_needed(self) -> int:
        """Rows that hold the draws of all updates, except with a probability that is small against delta."""
        # Truncation takes exp(epsilon) * updates * probability of delta.
        probability = _DELTA_FRACTION * self.settings.delta / (self.planned_updates or _MANY_UPDATES)
        probability *= math.exp(-(self.settings.target_epsilon or _LARGE_EPSILON))
        return least_rows(self.examples, self.settings.expected_batch_size, probability)

    def rows(self, replicas: int = 1) -> tuple[int, int]:
        """Rows of an update's padded batch, and of each physical batch, a part of it that is computed at a time."""
        settings = self.settings
        return rows_of_update(
            *(self.rows_needed, settings.expected_batch_size, self.sampling_rate),
            *(settings.physical_batch_size, replicas),
        )

    @property
    def truncation(self) -> float:
        """The `truncation_probability` of an update; an upper bound, as padding to whole physical batches adds rows."""
        return _cached_truncation_probability(self.examples, self.sampling_rate, self.rows_needed)

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise that is accounted for, in units of the clip norm."""
        if self._noise is None:
            settings, updates = self.settings, self.planned_updates
            assert settings.target_epsilon is not None, "make_private requires one of the two"
            assert updates is not None, "make_private requires epochs with target_epsilon"
            self._noise = noise_multiplier(
                *(settings.target_epsilon, self.sampling_rate, updates, settings.delta),
                settings.accountant,
                truncation=self.truncation,
            )
        return self._noise

    @property
    def gradient_noise_multiplier(self) -> float:
        """The noise multiplier of gradients: above `noise_multiplier` if an adaptive clip norm takes some budget."""
        clip = self.settings.clip_norm
        if not isinstance(clip, AdaptiveClip):
            return self.noise_multiplier
        return gradient_noise_multiplier(self.noise_multiplier, clip.count_deviation(self.settings.expected_batch_size))

    @property
    def event_of_update(self) -> Event:
        """The next update, as the ledger describes it."""
        clip = self.settings.clip_norm
        norm = clip if isinstance(clip, float) else 0.0
        return Event(self.noise_multiplier, self.sampling_rate, self.truncation, norm)

    @property
    def epsilon(self) -> float:
        """Epsilon of all updates that the weights come from; infinite if some weights have no known ledger."""
        return self.epsilon_of(self.entries())

    def epsilon_of(self, entries: Sequence[Entry], further: int = 0) -> float:
        """Epsilon of ledger entries, and of a number of further updates with the current settings."""
        event = (self.event_of_update, further) if further else None
        return epsilon_of(entries, self.settings.delta, self.settings.accountant, event)

    @property
    def updates_left(self) -> int | None:
        """How many more updates the budget allows, or `None` without a `target_epsilon`."""
        planned = self.planned_updates
        if planned is None:
            return None
        entries, event = self.entries(), self.event_of_update
        # The first three fields are all that epsilon depends on; the fourth is the clip norm.
        same_updates = sum(entry.updates for entry in entries if entry.event[:3] == event[:3])
        left = max(0, planned - same_updates)
        # Noise was calibrated for the planned updates alone. Other updates take a part of the budget.
        if not any(entry.updates and entry.event[:3] != event[:3] or entry.is_unknown for entry in entries):
            return left
        target = self.settings.target_epsilon or 0.0
        return last_that(lambda further: self.epsilon_of(entries, further) <= target, left, left) if left else 0

    def spent_budget_message(self) -> str:
        """The error message for a budget that is spent."""
        unknown = any(entry.is_unknown for entry in self.entries())
        advice = (
            "Some weights have no known ledger: if you know how they were trained, write "
            "private.privacy.replace_unknown((noise_multiplier, sampling_rate, updates))"
            if unknown
            else "To train longer, begin anew with make_private(..., epochs=...) of the whole training, or ask for a "
            "larger target_epsilon"
        )
        return (
            f"The budget is spent: {self.updates} updates were made, for which epsilon is {self.epsilon:.4g}, and "
            f"target_epsilon is {self.settings.target_epsilon:g}. {advice}."
        )

    def statement(self) -> str:
        """A paragraph for a paper: the guarantee, its unit, how it was computed, and what it doesn't cover."""
        settings, entries = self.settings, self.entries()
        accountant = ACCOUNTANTS[settings.accountant].description
        noise = (
            "drawn from the operating system's randomness; floating-point arithmetic is not defended against"
            if settings.secure_noise
            else "drawn by a counter-based generator (Philox) from a secret key, which isn't cryptographically secure; "
            "floating-point arithmetic is not defended against"
        )
        spent, updates = self.epsilon_of(entries), sum(entry.updates for entry in entries)
        promise = (
            f"the trained weights are ({spent:.3g}, {settings.delta:g})-differentially private after"
            if math.isfinite(spent)
            else "nothing can be promised of the trained weights after"
        )
        return (
            f"Trained with DP-SGD (Abadi et al., 2016): {promise} {counted(updates, 'update')}."
            f"{_describe_unknown(entries)} The unit of privacy is one example, and neighbouring data sets differ by "
            "one example added or removed. "
            f"{self._describe_updates(entries)} Examples are drawn independently (Poisson sampling; of draws beyond "
            "the rows of an update the excess is dropped, at random, which is accounted for). Gradients are clipped "
            f"per example ({_describe_clip(settings.clip_norm)}) and summed, and Gaussian noise is added once per "
            f"update; it is {noise}. Epsilon is computed with {accountant}. Not covered are metrics and losses on "
            "training data, the choice of hyperparameters, preprocessing that looks at the data, such as "
            "normalization, and what the model was trained on before make_private."
        )

    def _describe_updates(self, entries: Sequence[Entry]) -> str:
        """Sentences that state how many updates of each kind were made, with their sampling and noise."""
        counts: dict[Event, int] = {}
        for entry in entries:
            if not entry.is_unknown and entry.updates:
                counts[entry.event] = counts.get(entry.event, 0) + entry.updates
        current = self.event_of_update if self.examples_if_known is not None else None
        if not counts and current is not None:
            counts[current] = 0
        sentences = []
        for event, updates in counts.items():
            examples = f"each of {self.examples} examples" if event == current else "each example"
            clip = f", {event.clip_norm:g}" if event.clip_norm else ""
            sentences.append(
                f"Each of {updates} updates draws {examples} with probability {event.sampling_rate:.6g}, and adds "
                f"noise with noise multiplier {event.noise_multiplier:.6g} (in units of the clip norm{clip})."
            )
        return " ".join(sentences)


def _describe_unknown(entries: Sequence[Entry]) -> str:
    """A sentence on updates whose noise isn't known."""
    unknown = next((entry for entry in entries if entry.is_unknown), None)
    if unknown is None:
        return ""
    if unknown.updates:
        return f" Of {unknown.updates} updates the noise and the sampling are not known."
    return " Some weights were replaced outside of training, by weights of unknown origin."


def _describe_clip(clip: ClipNorm) -> str:
    if isinstance(clip, AdaptiveClip):
        return f"to a norm that follows the {clip.quantile:g} quantile, with separate noise, which is accounted for"
    return f"norm {clip:g}" if isinstance(clip, float) else f"layer by layer, {clip}"


class UpdateCounter(keras.callbacks.Callback):
    """Starts or continues a run at each epoch, and counts updates on the host. Runs after callbacks that load weights.

    A run is a sequence of updates whose samples and noise are drawn with one key; its updates are numbered from 0.

    `begin` is `Releases.begin_epoch`, `skipped` returns how many batches an epoch skips because an interrupted `fit`
    trained on them, and `whole` says whether each epoch must have all of its updates.

    Attributes:
        first: Number of the epoch's first update.
        end: Number of the first update beyond the budget, or `None` without a budget.
        spent: The ledger's entries before this epoch.
    """

    def __init__(
        self, privacy: Privacy, begin: Callable[[], tuple[int, int]], skipped: Callable[[], int], *, whole: bool
    ):
        super().__init__()
        self.privacy, self._begin, self._skipped, self._whole = privacy, begin, skipped, whole
        # Numbers of the next update when the epoch began, and of the first one that isn't in the ledger yet.
        self._next, self._accounted = 0, 0
        self.first = 0
        self.end: int | None = None
        self.spent: list[Entry] = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Reads from the ledger how many updates the budget has left, also after weights were loaded."""
        self._next, repeated = self._begin()
        self._accounted = self._next + repeated
        self.first = self._next - self._skipped()
        self.spent = self.privacy.entries()
        left = self.privacy.updates_left
        self.end = None if left is None else self._accounted + left
        if self.end == self._next:
            raise ValueError(self.privacy.spent_budget_message())
        if self.end is not None and self._whole and self.end < self.first + self.privacy.updates_per_epoch:
            raise ValueError(
                f"Weights were loaded within fit, and what they have released leaves {left} updates of the budget, "
                "less than an epoch. Load them before fit()."
            )

    def update_numbers(self) -> np.ndarray:
        """The numbers of the epoch's updates; skipped updates may have any, as their rows are never read."""
        last = self.first + self.privacy.updates_per_epoch
        return np.maximum(np.arange(self.first, last if self.end is None else min(last, self.end)), 0)

    def number_after(self, batch: int) -> int:
        """The number of the next update after a batch of the epoch, without waiting for the device."""
        # With steps_per_execution, Keras counts beyond the end of an epoch.
        return self.first + min(batch + 1, self.privacy.updates_per_epoch)

    def epsilon_after(self, batch: int) -> float:
        """Epsilon after a batch of the epoch, without waiting for the device."""
        return self.privacy.epsilon_of(self.spent, max(0, self.number_after(batch) - self._accounted))

    def end_of_fit(self, epoch: int) -> int:
        """The number of the first update beyond this `fit`, which is in the given epoch."""
        return self.first + (self.params["epochs"] - epoch) * self.privacy.updates_per_epoch


class EpsilonLogs(keras.callbacks.Callback):
    """Adds `epsilon` to the logs of callbacks after this one, and stops training when the budget is spent."""

    def __init__(self, privacy: Privacy, counter: UpdateCounter):
        super().__init__()
        self.privacy, self._counter = privacy, counter
        self._epsilon, self._epoch = 0.0, 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Records the epoch's index."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Logs epsilon, and stops training after the last update of the budget."""
        counter, settings = self._counter, self.privacy.settings
        if ACCOUNTANTS[settings.accountant].fast:
            self._epsilon = counter.epsilon_after(batch)
        if logs is not None:
            logs["epsilon"] = self._epsilon
        if counter.end is None or self.model.stop_training:
            return
        if counter.end_of_fit(self._epoch) > counter.number_after(batch) >= counter.end:
            self.model.stop_training = True
            _log.warning(
                "%d updates were made, as many as make_private(target_epsilon=%g, epochs=%d) allows: training stops. "
                "To train longer, ask for more epochs there, which makes the noise larger.",
                *(self.privacy.updates, settings.target_epsilon, settings.epochs),
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Logs the epsilon of all updates, which may take a second with privacy loss distributions."""
        self._epsilon = self.privacy.epsilon
        if logs is not None:
            logs["epsilon"] = self._epsilon
