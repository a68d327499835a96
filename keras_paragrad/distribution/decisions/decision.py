"""`Decision`: a decision of the plan, its reason, and how to override it."""

from dataclasses import dataclass
from typing import Any

NO_CHOICE = "nothing to choose"


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
        """The decision without its name, as data that JSON can hold."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"value": value, "reason": self.reason, "evidence": self.evidence, "override": self.override}


def list_of(names: tuple[str, ...]) -> str:
    """The names as one writes them in a list; the middle of a long one is left out."""
    if len(names) <= 4:
        return "[" + ", ".join(f'"{name}"' for name in names) + "]"
    return f'["{names[0]}", "{names[1]}", ..., "{names[-1]}"]'
