"""Two train functions, with and without telemetry, between which the host picks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from keras_paragrad.engine.telemetry.watch import Watcher

if TYPE_CHECKING:
    from keras_paragrad.engine.step.stages import Apply

# Among a step's logs, what its telemetry has noted: an output costs nothing, and reading a variable an operation.
LATEST = "_keras_paragrad_latest"


class Telemetry(Watcher, Protocol):
    """Looks at updates of the weights, at those that it asks for."""

    def wants(self, updates: int | None) -> bool:
        """Whether to look at the next call, which makes so many updates; asked by the host before it runs.

        Args:
            updates: How many, at most, or `None` if only the optimizer knows.
        """
        ...

    def latest(self) -> tf.Tensor:
        """What was noted last, while a step is traced; one replica's step hands it to `ran`."""
        ...

    def ran(self, watched: bool, batches: int, latest: tf.Tensor | None) -> None:
        """Tells that the call has run, and what was noted last, if it is known."""
        ...


class LookAhead:
    """An `Apply` stage whose next plan can be seen before it is run.

    Args:
        apply: The stage.
    """

    def __init__(self, apply: "Apply"):
        self.apply = apply
        self._planned: list[bool] | None = None

    def look(self, batches: int) -> list[bool]:
        """The plan that `plan` will give for the next batches."""
        self._planned = self.apply.plan(batches)
        return self._planned

    def plan(self, batches: int) -> list[bool]:
        """The stage's plan."""
        planned, self._planned = self._planned, None
        return self.apply.plan(batches) if planned is None else planned

    def __getattr__(self, name: str) -> Any:
        return getattr(self.apply, name)


def pick_watched(
    plain: Callable[[Any], dict],
    watching: Callable[[Any], dict],
    telemetry: Telemetry,
    ahead: LookAhead | None,
    batches: Callable[[], int],
    updates_each_batch: bool,
) -> Callable[[Any], dict]:
    """Makes a train function of two.

    Args:
        plain: The one that doesn't look.
        watching: The one that does.
        telemetry: Says which to take.
        ahead: Plans the updates, or `None` if nobody does on the host.
        batches: How many batches the next call runs; 0 if some of them are passed over, and then nobody looks.
        updates_each_batch: Whether every batch makes an update, if nobody plans them.

    Returns:
        A function for `model.train_function`.
    """

    def train_function(iterator: Any) -> dict:
        count = batches()
        if not count:
            return plain(iterator)
        known = count if updates_each_batch else None
        watched = telemetry.wants(sum(ahead.look(count)) if ahead else known)
        logs = (watching if watched else plain)(iterator)
        telemetry.ran(watched, count, logs.pop(LATEST, None))
        return logs

    return train_function
