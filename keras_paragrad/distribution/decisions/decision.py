"""`Decision`: one decision of the plan; and the functions that make them, called in the order that each states."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from keras_paragrad.distribution import decisions
from keras_paragrad.exports import modules_of

NO_CHOICE = "nothing to choose"
Decide = TypeVar("Decide", bound="Callable[..., Decision]")


@dataclass(frozen=True)
class Decision:
    """One decision of a plan.

    Attributes:
        name: The subject.
        value: The outcome: a string, number, bool, `None`, or a tuple of strings.
        reason: Why, in a sentence.
        evidence: The detected, measured or documented facts behind it.
        override: What to write to override it.
    """

    name: str
    value: Any
    reason: str
    evidence: str
    override: str

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON-serializable data, without its name."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"value": value, "reason": self.reason, "evidence": self.evidence, "override": self.override}


class Decider(NamedTuple):
    """A function that makes one decision of the plan.

    Attributes:
        name: The decision's name, as in `decide_<name>`.
        decide: The function. Its parameters name its inputs: `hardware`, `options`, the `kind` of the strategy, and
            decisions of a lower order, whose values are passed.
        order: Decisions are made, and listed in the plan, in ascending order.
        same_on_all_workers: Whether all workers must reach the same decision.
    """

    name: str
    decide: Callable[..., Decision]
    order: int
    same_on_all_workers: bool

    def __call__(self, known: Mapping[str, object]) -> Decision:
        """Makes the decision.

        Args:
            known: The hardware, the options, the strategy's kind, and the values of the decisions made so far, by name.

        Raises:
            TypeError: The function has a parameter that isn't known yet: its order is too low.
            ValueError: The options can't work on the hardware. The message says what to write instead.
        """
        inputs = inspect.signature(self.decide).parameters
        undecided = [name for name in inputs if name not in known]
        if undecided:
            name = self.decide.__name__
            raise TypeError(f"{name} asks for {', '.join(undecided)}, not decided yet. Give {name} a higher order.")
        return self.decide(**{name: known[name] for name in inputs})


_DECIDERS: dict[str, Decider] = {}


def decides(order: int, *, same_on_all_workers: bool = True) -> Callable[[Decide], Decide]:
    """Decorates a function `decide_<name>` that makes a decision of the plan.

    Args:
        order: Its place among the decisions.
        same_on_all_workers: Whether all workers must reach the same decision.
    """

    def register(decide: Decide) -> Decide:
        name = decide.__name__.removeprefix("decide_")
        _DECIDERS[f"{decide.__module__}.{decide.__name__}"] = Decider(name, decide, order, same_on_all_workers)
        return decide

    return register


def deciders() -> list[Decider]:
    """The functions that decide, in order; imports all modules of this folder."""
    modules_of(decisions)
    return sorted(_DECIDERS.values(), key=lambda decider: decider.order)


def list_of(names: tuple[str, ...]) -> str:
    """Names as a Python list, abbreviated if there are more than 4."""
    if len(names) <= 4:
        return "[" + ", ".join(f'"{name}"' for name in names) + "]"
    return f'["{names[0]}", "{names[1]}", ..., "{names[-1]}"]'
