"""`Estimate`: the bytes per device, as a table."""

import dataclasses
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.memory.breakdown import MemoryBreakdown
from keras_paragrad.plain_text import Printable

_ROWS = {
    "parameters": "Parameters",
    "gathered": "Gathered weights",
    "non_trainable": "Non-trainable",
    "gradients": "Gradients",
    "slots": "Optimizer slots",
    "accumulators": "Accumulators",
    "ema": "Moving averages",
    "activations": "Activations",
    "update": "Update",
    "total": "Peak",
}
_ALWAYS = ("parameters", "gradients", "slots", "activations", "total")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Estimate(Printable):
    """What a training step takes on each device, for every way to shard the model; for `print` or a rich console.

    `estimate["optimizer"]` is the column of a value of `shard`, and `estimate["optimizer", True]` that with
    recomputation.

    Attributes:
        model: The model's name.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        rows: Examples of it on a device.
        columns: A `MemoryBreakdown` of bytes for each choice.
        recomputed: What the columns with recomputation recompute, as `recompute(model)` does; of models that it can't
            cut, repeated blocks.
    """

    def __init__(
        self,
        model: str,
        batch_size: int,
        replicas: int,
        rows: int,
        columns: list[MemoryBreakdown],
        recomputed: list[str],
    ):
        self.model, self.batch_size, self.replicas, self.rows = model, batch_size, replicas, rows
        self.columns, self.recomputed = columns, recomputed

    def __getitem__(self, choice: Any) -> MemoryBreakdown:
        shard, recompute = choice if isinstance(choice, tuple) else (choice, False)
        for column in self.columns:
            if (column.shard, column.recompute) == (shard, recompute):
                return column
        known = ", ".join(str(each.shard) for each in self.columns if each.recompute == recompute)
        raise KeyError(f"{choice!r}; the estimate has {known or 'no column with recomputation'}")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON's types, in bytes."""
        columns = [dataclasses.asdict(column) for column in self.columns]
        return {
            **{"model": self.model, "batch_size": self.batch_size, "replicas": self.replicas, "rows": self.rows},
            **{"recomputed": self.recomputed, "columns": columns},
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        devices = f"{self.replicas} device{'s' if self.replicas > 1 else ''}"
        yield Text(f"{self.model}, batches of {self.batch_size} on {devices}, {self.rows} examples on each", "bold")
        table = Table()
        table.add_column("Per device\nshard=", no_wrap=True)
        # On one device there is nothing to shard.
        columns = [column for column in self.columns if self.replicas > 1 or column.shard is None]
        for column in columns:
            head = "recompute\n" if column.recompute else "\n"
            table.add_column(Text(f"{head}{column.shard and f'{column.shard!r}'}"), justify="right", no_wrap=True)
        for name, title in _ROWS.items():
            values = [getattr(column, name) for column in columns]
            if name == "total":
                table.add_section()
            if any(values) or name in _ALWAYS:
                table.add_row(title, *map(bytes_in_words, values), style="bold" if name == "total" else None)
        yield table
        yield Text("Peak: gradients, activations and the update are not at their largest at the same time.", "dim")

        if self.recomputed:
            names = self.recomputed
            listed = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
            yield Text(f"recompute: {listed}", "dim", overflow="fold")
        else:
            yield Text("recompute: nothing in the model is worth it, or can run again.", "dim")


def bytes_in_words(size: int) -> str:
    """A number of bytes with a unit.

    Example:

    >>> from keras_paragrad.memory.estimated import bytes_in_words
    >>> bytes_in_words(512), bytes_in_words(3 * 2**20 // 2)
    ('512 B', '1.5 MiB')
    """
    power = next((each for each in range(len(_UNITS) - 1) if size < 1000 * 1024**each), len(_UNITS) - 1)
    return f"{size:,} B" if power == 0 else f"{size / 1024**power:.3g} {_UNITS[power]}"
