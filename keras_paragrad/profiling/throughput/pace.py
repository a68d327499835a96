"""Counts steps, updates and examples over time."""

from typing import Any

from keras_paragrad.compat.local import place_of
from keras_paragrad.engine.telemetry.counts import examples_seen


class Pace:
    """Counts a model's steps, updates and examples within an epoch, and the time they take.

    Args:
        model: A built and compiled model.
        batch_size: Examples per batch, if the model's loss metric doesn't count them.

    Attributes:
        began: When it last started counting, shifted by the time excluded since.
        steps: How many steps there were in this epoch.
        update: How many updates the optimizer had made by then.
    """

    def __init__(self, model: Any, batch_size: int | None):
        self.model, self.batch_size = model, batch_size
        self._workers = place_of(model.distribute_strategy).workers
        self._rates: dict[str, float | None] = {}
        self.begin(0.0)

    def begin(self, now: float, steps: int = 0) -> None:
        """Restarts counting, `steps` steps into the epoch."""
        self.began, self.steps, self._from = now, steps, steps
        self._excluded_steps = 0
        self._examples, self.update = self.examples() if steps else 0.0, self.updates()

    def examples(self) -> float | None:
        """The number of examples in this epoch over all workers; `None` if unknown."""
        seen = examples_seen(self.model)
        if seen:
            # Workers have equal shards of a batch, and reading all counts would take a collective.
            return seen * self._workers
        return None if self.batch_size is None else float(self.batch_size * self.steps)

    def updates(self) -> int:
        """How many updates the optimizer has made."""
        return int(self.model.optimizer.iterations.numpy())

    def exclude(self, seconds: float, steps: int = 0) -> None:
        """Excludes some time, and the steps that ran in it, from the next rates."""
        self.began += seconds
        self._excluded_steps += steps

    def rates(self, now: float) -> dict[str, float | None]:
        """Examples, updates and steps per second since the last call; restarts counting.

        Excluded steps are taken to have the average number of examples.
        """
        seconds = now - self.began
        steps = self.steps - self._from
        counted = steps - self._excluded_steps
        if seconds <= 0 or counted <= 0:
            return dict(self._rates)
        examples, updates, share = self.examples(), self.updates(), counted / steps
        new = None if examples is None or self._examples is None else examples - self._examples
        if new is not None and new <= 0:
            # The metrics were reset since, as by an `evaluate` in the middle of the epoch.
            new = None
        self._rates = {
            "examples_per_second": None if new is None else new * share / seconds,
            "updates_per_second": (updates - self.update) * share / seconds,
            "steps_per_second": counted / seconds,
        }
        self.began, self._from, self._examples, self.update = now, self.steps, examples, updates
        self._excluded_steps = 0
        return dict(self._rates)
