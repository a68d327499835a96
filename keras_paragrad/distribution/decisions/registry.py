"""The functions that decide: found in the modules of this folder, and called in the order that each states."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from keras_paragrad.distribution import decisions
from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.exports import modules_of

Decide = TypeVar("Decide", bound=Callable[..., Decision])


class Decider(NamedTuple):
    """A function that makes one decision of the plan.

    Attributes:
        name: The decision's, as in `decide_<name>`.
        decide: The function. Its parameters name what it goes by: `hardware`, `options`, and decisions of a lower
            order, whose values it is called with.
        order: Decisions are made, and listed in the plan, in ascending order.
        alike: Whether all workers have to decide the same.
    """

    name: str
    decide: Callable[..., Decision]
    order: int
    alike: bool

    def __call__(self, known: Mapping[str, Any]) -> Decision:
        """Decides.

        Args:
            known: The hardware, the options, and the values of the decisions made so far, by name.

        Raises:
            ValueError: The options can't work on the hardware. The message says what to write instead.
        """
        needed = inspect.signature(self.decide).parameters
        later = [name for name in needed if name not in known]
        if later:
            name = self.decide.__name__
            raise TypeError(f"{name} asks for {', '.join(later)}, not decided yet. Give {name} a higher order.")
        return self.decide(**{name: known[name] for name in needed})


_DECIDERS: dict[str, Decider] = {}


def decides(order: int, *, alike: bool = True) -> Callable[[Decide], Decide]:
    """Decorates a function `decide_<name>` that makes a decision of the plan; see `Decider`.

    Args:
        order: Its place among the decisions.
        alike: Whether all workers have to decide the same.
    """

    def register(decide: Decide) -> Decide:
        name = decide.__name__.removeprefix("decide_")
        _DECIDERS[f"{decide.__module__}.{decide.__name__}"] = Decider(name, decide, order, alike)
        return decide

    return register


def deciders() -> list[Decider]:
    """The functions that decide, in order."""
    modules_of(decisions)
    return sorted(_DECIDERS.values(), key=lambda decider: decider.order)
