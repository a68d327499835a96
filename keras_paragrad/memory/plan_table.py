"""`MemoryPlan`: the ways to train a model in the memory of its devices, as a table."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.memory.trial import Measured
from keras_paragrad.plain_text import Printable, bytes_in_words, counted

# Rows of the table after the chosen one.
_SHOWN_AFTER = 4


@dataclass(frozen=True)
class Choice:
    """One way to train.

    Attributes:
        recompute: What is recomputed: nothing (`None`), what `"auto"` chooses, or `"all"` that frees memory.
        slices: Number of slices of each device's part of a batch.
        shard: What is in shards: nothing (`None`), the `"optimizer"`'s state, or all `"parameters"`.
    """

    recompute: str | None = None
    slices: int = 1
    shard: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what it takes on each device.

    Attributes:
        choice: The way.
        rows: The most rows of a slice.
        estimated: The estimated bytes and seconds of a step.
        measured: The same in a trial; `None` if it was not tried, or ran out of memory.
        why_not: Why it wasn't chosen; empty for the one that was, and for slower ones.
    """

    choice: Choice
    rows: int
    estimated: Measured
    measured: Measured | None = None
    why_not: str = ""


@dataclass(repr=False, eq=False)
class MemoryPlan(Printable):
    """The ways to train a model in the memory of its devices, from the fastest on, for `print` or a rich console.

    Attributes:
        model: The model's name.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        device_bytes: What training may take on each, in bytes.
        candidates: The ways, by estimated seconds.
        chosen: The chosen one.
        recomputed: The names of the parts that each value of `recompute` recomputes.
        left_out: Why some ways aren't candidates.
        trials: Number of trials.
    """

    model: str
    batch_size: int
    replicas: int
    device_bytes: int
    candidates: list[Candidate] = field(default_factory=list)
    chosen: Candidate | None = None
    recomputed: dict[str | None, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    trials: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON's types, in bytes and seconds."""
        candidates = [
            {**dataclasses.asdict(candidate), "chosen": candidate is self.chosen} for candidate in self.candidates
        ]
        return {
            **{"model": self.model, "batch_size": self.batch_size, "replicas": self.replicas},
            **{"device_bytes": self.device_bytes, "trials": self.trials, "left_out": self.left_out},
            "recomputed": {str(form): names for form, names in self.recomputed.items() if form},
            "candidates": candidates,
        }

    def in_words(self) -> str:
        """What was chosen, on one line."""
        assert self.chosen is not None
        return way_in_words(self.chosen, self.recomputed)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        devices = counted(self.replicas, "device")
        yield Text(
            f"{self.model}, batches of {self.batch_size} on {devices}, {bytes_in_words(self.device_bytes)} on each",
            "bold",
        )
        table = Table()
        for name in ("recompute", "Slices", *(("shard",) if self.replicas > 1 else ()), "Per device", "Seconds", ""):
            table.add_column(name, justify="right" if name in ("Slices", "Per device", "Seconds") else "left")
        last = (
            next((index for index, candidate in enumerate(self.candidates) if candidate is self.chosen), 0)
            + _SHOWN_AFTER
        )
        for candidate in self.candidates[: last + 1]:
            recompute, slices, shard = candidate.choice.recompute, candidate.choice.slices, candidate.choice.shard
            cells = [recompute or "nothing", f"{slices} x {candidate.rows}" if slices > 1 else "1"]
            cells += [shard or "nothing"] if self.replicas > 1 else []
            measured = candidate.measured or candidate.estimated
            how = "tried" if candidate.measured else "estimated"
            chosen = candidate is self.chosen
            note = ", ".join(filter(None, [how, "chosen" if chosen else candidate.why_not]))
            row = (*cells, bytes_in_words(measured.bytes), f"{measured.seconds:.3g}", note)
            table.add_row(*row, style="bold" if chosen else None)
        yield table
        if (slower := len(self.candidates) - last - 1) > 0:
            yield Text(f"{slower} slower ones are not shown; to_dict() has all.", "dim")
        for line in self.left_out:
            yield Text(line, "dim", overflow="fold")


def way_in_words(candidate: Candidate, recomputed: dict[str | None, list[str]]) -> str:
    """A way to train, in words."""
    recompute, slices, shard = candidate.choice.recompute, candidate.choice.slices, candidate.choice.shard
    words = [f"{counted(len(recomputed[recompute]), 'part')} recomputed"] if recompute else []
    words += [f"{slices} slices of {counted(candidate.rows, 'row')}"] if slices > 1 else []
    words += [f"the {shard} in shards"] if shard else []
    return ", ".join(words) or "as it is"
