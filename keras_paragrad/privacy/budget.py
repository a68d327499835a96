"""`Privacy`: what a private model's training has spent, and what it may spend."""

import dataclasses
import functools
import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from keras_paragrad.extras import require
from keras_paragrad.plain_text import InNotebooks
from keras_paragrad.privacy.accounting.accountants import ACCOUNTANTS
from keras_paragrad.privacy.accounting.adaptive import gradient_noise_multiplier
from keras_paragrad.privacy.accounting.calibration import last_that, noise_multiplier
from keras_paragrad.privacy.accounting.composition import checked
from keras_paragrad.privacy.accounting.truncation import truncation_probability
from keras_paragrad.privacy.adaptive import AdaptiveClip
from keras_paragrad.privacy.ledger import Entry, Event, dp_event, epsilon_of
from keras_paragrad.privacy.physical import rows_of_update

# Of delta, what draws that are cut off may take at most.
_TRUNCATION = 1e-3
# Where neither the updates nor epsilon are known beforehand.
_MANY_UPDATES, _LARGE_EPSILON = 10**6, 10.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `make_private`, as they are saved; the seed is not among them."""

    clip_norm: Any
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
        """Refuses settings that make no sense for so many examples.

        Raises:
            ValueError: The message says what to write.
        """
        if self.delta * examples >= 1:
            raise ValueError(
                f"`delta` is {self.delta:g}, which allows to release whole examples of {examples}. Write "
                f"make_private(..., delta={0.1 / examples:.1g}), for instance."
            )
        if examples < self.expected_batch_size:
            raise ValueError(
                f"`expected_batch_size` is {self.expected_batch_size}, and the data have {examples} examples, of which "
                f"each is in a batch at most once. Write make_private(..., expected_batch_size={examples}), or less."
            )


class Released(Protocol):
    """What `Privacy` asks of a model."""

    def entries(self) -> list[Entry]:
        """All that its weights have released, up to now."""
        ...

    def replace_unknown(self, entries: Iterable[Entry]) -> None:
        """Replaces what nothing is known of by what the user states."""
        ...


class Privacy(InNotebooks):
    """What training has spent of a privacy budget, and what it may spend.

    Args:
        settings: The arguments of `make_private`.
        released: What the model's weights have released.
    """

    def __init__(self, settings: Settings, released: Released):
        self.settings = settings
        self._released = released
        self._examples = settings.examples
        self._noise: float | None = settings.noise_multiplier

    def __repr__(self) -> str:
        if self._examples is None and not self.entries():
            return "<Privacy: before fit(), how many examples there are is unknown>"
        return f"<Privacy: {self.statement()}>"

    def entries(self) -> list[Entry]:
        """The ledger: an entry for each run that the weights come from."""
        return self._released.entries()

    @property
    def updates(self) -> int:
        """How many updates the weights come from, those of weights that were loaded among them."""
        return sum(entry.updates for entry in self.entries())

    @property
    def event(self) -> Any:
        """The ledger as a `dp_accounting.DpEvent`, for any of its accountants. What draws that are cut off take of
        delta is not in it.

        Raises:
            MissingExtraError: dp-accounting is not installed.
        """
        require("privacy.event", "dp_accounting")
        return dp_event(self.entries())

    def replace_unknown(self, *updates: tuple[float, float, int]) -> None:
        """States how weights were trained of which no ledger is known.

        Args:
            *updates: The noise multiplier, the sampling rate and the number of updates of one kind each. None at all,
                if no private example had a part in these weights.
        """
        stated = [checked(*each) for each in updates]
        self._released.replace_unknown(
            Entry(secrets.randbits(62), 0, 0, 0, Event(noise, rate), count) for noise, rate, count, _ in stated
        )

    @property
    def examples(self) -> int:
        """How many examples there are to draw from.

        Raises:
            ValueError: They are known once `fit` was given data.
        """
        if self._examples is None:
            raise ValueError(
                "How many examples there are is known once fit() was given data. To know it before, write "
                "make_private(..., examples=60_000)."
            )
        return self._examples

    @property
    def known_examples(self) -> int | None:
        """How many examples there are, or `None` before that is known."""
        return self._examples

    def given(self, examples: int) -> None:
        """Takes note of the size of the data.

        Raises:
            ValueError: It is another one than stated, or than before.
        """
        if self._examples not in (None, examples):
            raise ValueError(
                f"The data have {examples} examples, and epsilon is computed for {self._examples}, as stated or as "
                "fit() was given before. Pass the same data, or write make_private(model, ...) anew, which adds to "
                "what was spent."
            )
        self.settings.check_examples(examples)
        self._examples = examples

    @property
    def sampling_rate(self) -> float:
        """The probability of each example to be in the batch of an update."""
        return self.settings.expected_batch_size / self.examples

    @property
    def updates_per_epoch(self) -> int:
        """How many updates see as many examples as there are, in expectation."""
        return max(1, round(self.examples / self.settings.expected_batch_size))

    @property
    def planned_updates(self) -> int | None:
        """How many updates `target_epsilon` was calibrated for, or `None` without one."""
        return None if self.settings.epochs is None else self.settings.epochs * self.updates_per_epoch

    @property
    def rows_needed(self) -> int:
        """Rows that are enough for the draws of all updates but with a probability that delta has room for."""
        updates = self.planned_updates or _MANY_UPDATES
        room = _TRUNCATION * self.settings.delta / updates
        room *= math.exp(-(self.settings.target_epsilon or _LARGE_EPSILON))
        return _rows_with_room(self.examples, self.settings.expected_batch_size, room)

    def rows(self, replicas: int = 1) -> tuple[int, int]:
        """Rows of an update's padded batch, and of each physical batch that it is computed in.

        Raises:
            ValueError: The physical batch can't be divided among the replicas.
        """
        settings = self.settings
        return rows_of_update(
            *(self.rows_needed, settings.expected_batch_size, self.sampling_rate),
            *(settings.physical_batch_size, replicas),
        )

    @property
    def truncation(self) -> float:
        """What `epsilon` is told of draws that are larger than the padded batch."""
        # Batches are padded further, to whole physical ones, so this is an upper bound.
        return _truncation(self.examples, self.sampling_rate, self.rows_needed)

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise that is accounted for, in units of the clip norm."""
        if self._noise is None:
            settings, updates = self.settings, self.planned_updates
            assert settings.target_epsilon is not None, "one of the two is given"
            assert updates is not None, "with target_epsilon, epochs are given"
            self._noise = noise_multiplier(
                *(settings.target_epsilon, self.sampling_rate, updates, settings.delta),
                settings.accountant,
                truncation=self.truncation,
            )
        return self._noise

    @property
    def gradient_noise_multiplier(self) -> float:
        """That of the noise on gradients: larger if a clip norm adapts, as that is paid for too."""
        clip = self.settings.clip_norm
        if not isinstance(clip, AdaptiveClip):
            return self.noise_multiplier
        return gradient_noise_multiplier(self.noise_multiplier, clip.noise_on_count(self.settings.expected_batch_size))

    @property
    def event_of_update(self) -> Event:
        """What the next update will release."""
        clip = self.settings.clip_norm
        norm = clip if isinstance(clip, float) else 0.0
        return Event(self.noise_multiplier, self.sampling_rate, self.truncation, norm)

    @property
    def epsilon(self) -> float:
        """Epsilon of all updates that the weights come from; infinite if how some were made isn't known."""
        return self.epsilon_of(self.entries())

    def epsilon_of(self, entries: Sequence[Entry], further: int = 0) -> float:
        """Epsilon of entries of a ledger, and of so many further updates with the settings of now."""
        event = (self.event_of_update, further) if further else None
        return epsilon_of(entries, self.settings.delta, self.settings.accountant, event)

    def epsilon_after(self, updates: int) -> float:
        """Epsilon of so many updates: those that were made, and then others with the settings of now."""
        entries = self.entries()
        return self.epsilon_of(entries, max(0, updates - sum(entry.updates for entry in entries)))

    @property
    def updates_left(self) -> int | None:
        """How many more updates the budget allows, or `None` without a `target_epsilon`."""
        planned = self.planned_updates
        if planned is None:
            return None
        entries, event = self.entries(), self.event_of_update
        alike = sum(entry.updates for entry in entries if entry.event[:3] == event[:3])
        left = max(0, planned - alike)
        if not any(entry.updates and entry.event[:3] != event[:3] or entry.is_unknown for entry in entries):
            return left
        target = self.settings.target_epsilon or 0.0
        return last_that(lambda further: self.epsilon_of(entries, further) <= target, left, left) if left else 0

    def spent_budget(self) -> str:
        """The message for training that the budget has no room for."""
        unknown = any(entry.is_unknown for entry in self.entries())
        way_out = (
            "Some weights have no known ledger: if you know how they were trained, write "
            "private.privacy.replace_unknown((noise_multiplier, sampling_rate, updates))"
            if unknown
            else "To train longer, begin anew with make_private(..., epochs=...) of the whole training, or ask for a "
            "larger target_epsilon"
        )
        return (
            f"The budget is spent: {self.updates} updates were made, for which epsilon is {self.epsilon:.4g}, and "
            f"target_epsilon is {self.settings.target_epsilon:g}. {way_out}."
        )

    def statement(self) -> str:
        """A paragraph for a paper: what is promised, of what, how it was computed, and what is outside of it."""
        settings, entries = self.settings, self.entries()
        accountant = ACCOUNTANTS[settings.accountant].in_words
        noise = (
            "drawn from the operating system's randomness; floating-point arithmetic is not defended against"
            if settings.secure_noise
            else "drawn by a counter-based generator (Philox) from a secret key, which isn't cryptographically secure; "
            "floating-point arithmetic is not defended against"
        )
        spent = self.epsilon_of(entries)
        promise = (
            f"the trained weights are ({spent:.3g}, {settings.delta:g})-differentially private after"
            if math.isfinite(spent)
            else "nothing can be promised of the trained weights after"
        )
        return (
            f"Trained with DP-SGD (Abadi et al., 2016): {promise} {self.updates} updates.{_unknown_in_words(entries)} "
            "The unit of privacy is one example, and neighbouring data sets differ by one example added or removed. "
            f"{self._updates_in_words(entries)} Examples are drawn independently (Poisson sampling; of draws beyond "
            "the rows of an update the excess is dropped, at random, which is accounted for). Gradients are clipped "
            f"per example ({_in_words(settings.clip_norm)}) and summed, and Gaussian noise is added once per update; "
            f"it is {noise}. Epsilon is computed with {accountant}. Not covered are metrics and losses on training "
            "data, the choice of hyperparameters, preprocessing that looks at the data, such as normalization, and "
            "what the model was trained on before make_private."
        )

    def _updates_in_words(self, entries: Sequence[Entry]) -> str:
        counts: dict[Event, int] = {}
        for entry in entries:
            if not entry.is_unknown and entry.updates:
                counts[entry.event] = counts.get(entry.event, 0) + entry.updates
        now = self.event_of_update if self._examples is not None else None
        if not counts and now is not None:
            counts[now] = 0
        said = []
        for event, updates in counts.items():
            examples = f"each of {self.examples} examples" if event == now else "each example"
            clip = f", {event.clip_norm:g}" if event.clip_norm else ""
            said.append(
                f"Each of {updates} updates draws {examples} with probability {event.sampling_rate:.6g}, and adds "
                f"noise with noise multiplier {event.noise_multiplier:.6g} (in units of the clip norm{clip})."
            )
        return " ".join(said)


def _unknown_in_words(entries: Sequence[Entry]) -> str:
    unknown = next((entry for entry in entries if entry.is_unknown), None)
    if unknown is None:
        return ""
    if unknown.updates:
        return f" Of {unknown.updates} updates the noise and the sampling are not known."
    return " Some weights were replaced outside of training, by others of which nothing is known."


# Kept for the next call: an epsilon is asked for after every update.
_truncation = functools.lru_cache(maxsize=64)(truncation_probability)


@functools.lru_cache(maxsize=64)
def _rows_with_room(examples: int, expected: int, probability: float) -> int:
    """The least rows that an update's draw exceeds, from the sight of one example, with so small a probability."""
    # With as many rows as examples, and one more, none is cut off.
    least, most = expected, examples + 1
    while least < most:
        middle = (least + most) // 2
        enough = truncation_probability(examples, expected / examples, middle) <= probability
        least, most = (least, middle) if enough else (middle + 1, most)
    return least


def _in_words(clip: Any) -> str:
    if isinstance(clip, AdaptiveClip):
        return f"to a norm that follows the {clip.quantile:g} quantile, with noise of its own, which is accounted for"
    return f"norm {clip:g}" if isinstance(clip, float) else f"layer by layer, {clip}"
