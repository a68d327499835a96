"""`StageTable`: what each device of a pipeline holds."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.memory.estimated import bytes_in_words
from keras_paragrad.plain_text import Printable


class Stage(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        devices: The devices that it runs on, of which the first holds its weights and optimizer state.
        layers: The names of its layers, in order.
        parameters: The number of its weights' elements.
        weight_bytes: The bytes of its variables.
        slot_bytes: The bytes of what the optimizer has for them.
    """

    devices: tuple[str, ...]
    layers: tuple[str, ...]
    parameters: int
    weight_bytes: int
    slot_bytes: int


class StageTable(Printable):
    """The stages of a pipeline as a table, for `print` or a rich console.

    Args:
        model: The model's name.
        stages: Its stages, in order.
    """

    def __init__(self, model: str, stages: Iterable[Stage]):
        self.model = model
        self.stages = tuple(stages)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=Text(f"Stages of {self.model}"), show_lines=True)
        for header in ("Stage", "Device", "Layers", "Parameters", "Weights", "Optimizer"):
            table.add_column(header, overflow="fold", justify="left" if header in ("Device", "Layers") else "right")
        for index, stage in enumerate(self.stages):
            names = stage.layers if len(stage.layers) <= 3 else (stage.layers[0], "...", stage.layers[-1])
            size, slots = bytes_in_words(stage.weight_bytes), bytes_in_words(stage.slot_bytes)
            table.add_row(
                str(index), " ".join(stage.devices), Text(" ".join(names)), f"{stage.parameters:,}", size, slots
            )
        yield table
