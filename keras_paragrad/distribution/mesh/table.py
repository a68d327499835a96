"""`LayoutTable`: how each variable is divided over a mesh."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.compat.stand_ins import bytes_of
from keras_paragrad.distribution.mesh.mesh import Mesh
from keras_paragrad.engine.mesh.placing import variables_on_mesh
from keras_paragrad.memory.estimated import bytes_in_words
from keras_paragrad.plain_text import Printable
from keras_paragrad.storage.dtensor import bytes_by_device


class Divided(NamedTuple):
    """A variable on a mesh.

    Attributes:
        path: Its path.
        shape: Its shape, whole.
        axes: What each dimension is divided along.
        device_bytes: The bytes that each device holds, by its name, of the variable and what the optimizer has for it.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    device_bytes: dict[str, int]


class LayoutTable(Printable):
    """How variables are divided as a table, for `print` or a rich console.

    Args:
        model: The model's name.
        mesh: The mesh.
        variables: The model's variables.
        slots: The bytes of the optimizer's variables that each device holds.
        whole: The bytes of all of them on one device.
    """

    def __init__(self, model: str, mesh: Mesh, variables: Iterable[Divided], slots: dict[str, int], whole: int):
        self.model, self.mesh, self.variables = model, mesh, tuple(variables)
        self.slots, self.whole = slots, whole

    @classmethod
    def of(cls, model: Any, mesh: Mesh) -> "LayoutTable":
        """The table of a model that is on a mesh."""
        own = {id(variable) for variable in model.variables}
        rows, slots, whole = [], dict.fromkeys(mesh.devices, 0), 0
        for variable, storage in variables_on_mesh(model):
            held = bytes_by_device(storage)
            whole += bytes_of(variable)
            if id(variable) in own:
                rows.append(Divided(variable.path, tuple(variable.shape), storage.axes, held))
            else:
                slots = {name: slots[name] + held.get(name, 0) for name in slots}
        return cls(model.name, mesh, rows, slots, whole)

    @property
    def held(self) -> dict[str, int]:
        """The bytes of weights and optimizer state that each device holds, by its name."""
        return {
            name: self.slots[name] + sum(each.device_bytes.get(name, 0) for each in self.variables)
            for name in self.mesh.devices
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=Text(f"Layout of {self.model} on a mesh of {self.mesh.words}"))
        for header in ("Variable", "Shape", "Layout", "On each device"):
            table.add_column(header, overflow="fold", justify="right" if header == "On each device" else "left")
        for each in self.variables:
            layout = "whole" if not any(each.axes) else ", ".join(axis or "-" for axis in each.axes)
            shape = " x ".join(map(str, each.shape)) or "scalar"
            table.add_row(Text(each.path), shape, layout, bytes_in_words(max(each.device_bytes.values())))
        table.add_row("optimizer", "", "as its variables", bytes_in_words(max(self.slots.values())))
        table.add_row("all", "", f"one device: {bytes_in_words(self.whole)}", bytes_in_words(max(self.held.values())))
        yield table
