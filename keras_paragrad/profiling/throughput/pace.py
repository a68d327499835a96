"""How many steps, updates and examples there were, in which time."""

from typing import Any

from keras_paragrad._keras.replicas.local import place_of
from keras_paragrad._keras.telemetry.counts import examples_seen


class Pace:
    """Counts what a model is fed and makes of it, and the time that it takes, within an epoch.

    Args:
        model: A built and compiled model.
        batch_size: How many examples a batch has, where the model's loss doesn't count them.

    Attributes:
        began: When it last began to count, or as much later as was left out since.
        steps: How many steps there were in this epoch.
        update: How many updates the optimizer had made by then.
    """

    def __init__(self, model: Any, batch_size: int | None):
        self.model, self.batch_size = model, batch_size
        self._workers = place_of(model.distribute_strategy).workers
        self._rates: dict[str, float | None] = {}
        self.begin(0.0)

    def begin(self, now: float, steps: int = 0) -> None:
        """Counts from here, so many steps into the epoch."""
        self.began, self.steps, self._from = now, steps, steps
        self._steps_left_out = 0
        self._examples, self.update = self.examples() if steps else 0.0, self.updates()

    def examples(self) -> float | None:
        """How many examples there were in this epoch, on all workers; `None` if nobody knows."""
        seen = examples_seen(self.model)
        if seen:
            # Workers have equal parts of a batch, and reading all of them would take a collective.
            return seen * self._workers
        return None if self.batch_size is None else float(self.batch_size * self.steps)

    def updates(self) -> int:
        """How many updates the optimizer has made."""
        return int(self.model.optimizer.iterations.numpy())

    def leave_out(self, seconds: float, steps: int = 0) -> None:
        """Takes some time out of the next rates, and the steps that ran in it."""
        self.began += seconds
        self._steps_left_out += steps

    def rates(self, now: float) -> dict[str, float | None]:
        """Examples, updates and steps a second since the last time, and counts from here.

        How many examples a step had that is left out nobody has looked up: as many as the others on average.
        """
        seconds = now - self.began
        steps = self.steps - self._from
        counted = steps - self._steps_left_out
        if seconds <= 0 or counted <= 0:
            return dict(self._rates)
        examples, updates, share = self.examples(), self.updates(), counted / steps
        new = None if examples is None or self._examples is None else examples - self._examples
        self._rates = {
            "examples_per_second": None if new is None else new * share / seconds,
            "updates_per_second": (updates - self.update) * share / seconds,
            "steps_per_second": counted / seconds,
        }
        self.began, self._from, self._examples, self.update = now, self.steps, examples, updates
        self._steps_left_out = 0
        return dict(self._rates)
