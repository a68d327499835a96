"""`Decision`: one choice of the plan; and the values that arguments may give it."""

from dataclasses import dataclass
from typing import Any

STRATEGIES = ("auto", "none", "one_device", "mirrored", "multi_worker", "parameter_server")
COMMUNICATIONS = ("auto", "nccl", "ring", "hierarchical_copy", "one_device")
SHARD_POLICIES = ("auto", "data", "already_sharded")
WEIGHTINGS = ("auto", "examples", "sample_weight", "mask", "sum")
LAYOUTS = (None, "auto")
SHARDS = (None, "optimizer", "parameters")
# A year, in seconds: the waiting system calls do not accept more.
LONGEST_WAIT = 365 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of a plan.

    Attributes:
        name: The subject.
        value: The outcome: a string, number, bool, `None`, or a tuple of strings.
        reason: Why, in a sentence.
        override: What to write instead.
    """

    name: str
    value: Any
    reason: str
    override: str = "nothing to choose"

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON-serializable data, without its name."""
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"value": value, "reason": self.reason, "override": self.override}
