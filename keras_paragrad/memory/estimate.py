"""`estimate_memory`: the bytes that a training step takes on each device, before anything is trained."""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import keras
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.arguments import check_instance, check_integer
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.layers import children
from keras_paragrad.compat.types import Specs
from keras_paragrad.engine.calls.recomputed import recompute_layer
from keras_paragrad.engine.step.segments import recompute_parts
from keras_paragrad.memory.available import STEP_SHARE
from keras_paragrad.memory.breakdown import MemoryBreakdown, breakdowns_of
from keras_paragrad.memory.recomputation import check_layer
from keras_paragrad.memory.recomputed_segments import cut_for_least_memory
from keras_paragrad.memory.traced_step import traced_step
from keras_paragrad.plain_text import Printable, counted
from keras_paragrad.storage.sharding import MIN_SHARD_BYTES

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
_WORKSPACE = (
    "Not counted: on a GPU, cuDNN's workspace for a convolution, up to 4 GiB, or what TF_CUDNN_WORKSPACE_LIMIT_IN_MB "
    "says."
)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Estimate(Printable):
    """The memory of a training step on each device, for every way to shard the model; for `print` or a rich console.

    `estimate["optimizer"]` is the column of a value of `shard`, and `estimate["optimizer", True]` the same with
    recomputation.

    Attributes:
        model: The model's name.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        rows: Examples of a batch on a device.
        columns: A `MemoryBreakdown` of bytes for each choice.
        recomputed: The parts that the columns with recomputation recompute, as `recompute(model)` does; repeated blocks
            if it can't cut the model.
        device_bytes: The memory of a device, for the verdict; `None` if it is unknown.
        left_out: What a GPU takes besides, in a sentence; empty if nothing is known to be left out.
    """

    def __init__(
        self,
        model: str,
        batch_size: int,
        replicas: int,
        rows: int,
        columns: list[MemoryBreakdown],
        recomputed: list[str],
        device_bytes: int | None = None,
        left_out: str = "",
    ):
        self.device_bytes, self.left_out = device_bytes, left_out
        self.model, self.batch_size, self.replicas, self.rows = model, batch_size, replicas, rows
        self.columns, self.recomputed = columns, recomputed

    def __getitem__(self, choice: str | tuple[str | None, bool] | None) -> MemoryBreakdown:
        shard, recompute = choice if isinstance(choice, tuple) else (choice, False)
        for column in self.columns:
            if (column.shard, column.recompute) == (shard, recompute):
                return column
        known = ", ".join(str(column.shard) for column in self.columns if column.recompute == recompute)
        raise KeyError(f"{choice!r}; the estimate has {known or 'no column with recomputation'}")

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON types, in bytes."""
        columns = [dataclasses.asdict(column) for column in self.columns]
        return {
            **{"model": self.model, "batch_size": self.batch_size, "replicas": self.replicas, "rows": self.rows},
            **{"recomputed": self.recomputed, "columns": columns},
            **{"device_bytes": self.device_bytes, "verdict": self.verdict, "left_out": self.left_out},
        }

    @property
    def verdict(self) -> str | None:
        """Whether a step fits in 80% of a device's memory, and what to write if it doesn't as it is, or what would."""
        if self.device_bytes is None:
            return None
        limit, inside = STEP_SHARE * self.device_bytes, f"{bytes_in_words(self.device_bytes)} per device"
        possible = [column for column in self.columns if self.replicas > 1 or column.shard is None]
        # Shards cost less time than recomputation.
        column = next((column for column in possible if column.total <= limit), None)
        if column is not None:
            write = [f'DistributedFit(shard="{column.shard}")'] if column.shard else []
            write += ["recompute(model)"] if column.recompute else []
            return f"Fits in {inside} " + (f"with {' and '.join(write)}." if write else "as it is.")
        least = min(possible, key=lambda column: column.total)
        takes = f"the least is {bytes_in_words(least.total)}, and a step may take {STEP_SHARE:.0%}"
        if least.held <= limit:
            instead = "Write DistributedFit(fit_memory=True), which cuts batches into slices too."
        else:
            devices = counted(math.ceil(self.columns[0].held / limit), "device")
            instead = f'{devices} or more would hold it in shards: DistributedFit(shard="parameters").'
        return f"Doesn't fit in {inside}: {takes}. {instead}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        devices, examples = counted(self.replicas, "device"), counted(self.rows, "example")
        yield Text(f"{self.model}, batches of {self.batch_size} on {devices}, {examples} on each", "bold")
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
        yield Text("Peak: gradients, activations and the update peak at different times.", "dim")

        if self.recomputed:
            names = self.recomputed
            listed = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
            yield Text(f"recompute: {listed}", "dim", overflow="fold")
        else:
            yield Text("recompute: no part of the model can be recomputed, or is worth it.", "dim")
        if self.left_out:
            yield Text(self.left_out, "dim", overflow="fold")
        if self.verdict:
            yield Text(self.verdict, "bold", overflow="fold")


def bytes_in_words(size: int) -> str:
    """A number of bytes with a unit.

    Example:

    >>> from keras_paragrad.memory.estimate import bytes_in_words
    >>> bytes_in_words(512), bytes_in_words(3 * 2**20 // 2)
    ('512 B', '1.5 MiB')
    """
    power = next((power for power in range(len(_UNITS) - 1) if size < 999.5 * 1024**power), len(_UNITS) - 1)
    return f"{size:,} B" if power == 0 else f"{size / 1024**power:.3g} {_UNITS[power]}"


class Recomputation(NamedTuple):
    """Parts of a model that can be recomputed in the backward pass.

    Attributes:
        layers: The argument of `recompute` that recomputes them.
        names: Their names.
        begin: Installs their recomputation, and returns a function that removes it.
    """

    layers: str | list[keras.layers.Layer]
    names: list[str]
    begin: Callable[[], Callable[[], None]]

    @contextlib.contextmanager
    def in_effect(self) -> Generator[None]:
        """Context in which traced functions recompute the parts."""
        end = self.begin()
        try:
            yield
        finally:
            end()


def recomputation_of(model: keras.Model, layers: str = "auto") -> Recomputation:
    """The parts that `recompute(model, layers)` recomputes, or the repeated blocks of a model that it can't cut."""
    try:
        cut = cut_for_least_memory(model, where_it_pays=layers == "auto")
    except ValueError:
        blocks = repeated_blocks(model)
        return Recomputation(blocks, [block.name for block in blocks], lambda: _recompute_layers(blocks))
    names = [part.name for part, recomputed in cut.segments if recomputed]
    return Recomputation(layers, names, lambda: recompute_parts(model, cut.functional, cut.segments))


def repeated_blocks(model: keras.Model) -> list[keras.layers.Layer]:
    """The outermost layers with sublayers that repeat: siblings with the same weights' shapes."""
    return [block for block in _blocks_within(model) if _can_be_recomputed(model, block)]


def _recompute_layers(blocks: list[keras.layers.Layer]) -> Callable[[], None]:
    """Makes layers run again in the backward pass, and returns a function that undoes it."""
    undo = [recompute_layer(block) for block in blocks]

    def end() -> None:
        for restore in undo:
            restore()

    return end


def _blocks_within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The sublayers that repeat, of the same class and shapes, at the outermost depth where some do."""
    groups: dict[object, list[keras.layers.Layer]] = defaultdict(list)
    for child in children(layer):
        shapes = tuple(tuple(variable.shape) for variable in child.trainable_variables)
        # A layer without weights or sublayers is in a group of its own.
        groups[(type(child), shapes) if shapes and children(child) else id(child)].append(child)
    return [block for group in groups.values() for block in (group if len(group) > 1 else _blocks_within(group[0]))]


def _can_be_recomputed(model: keras.Model, layer: keras.layers.Layer) -> bool:
    try:
        check_layer(model, layer)
    except ValueError:
        return False
    return True


def estimate_memory(
    model: keras.Model,
    batch_size: int,
    replicas: int = 1,
    *,
    length: int | None = None,
    optimizer: keras.optimizers.Optimizer | str | None = None,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    batch_spec: Specs = None,
    device_bytes: int | None = None,
) -> Estimate:
    """Estimates the memory of each device in `fit`, for every way to shard the model.

    The training step is traced and its operations are followed, but not run; the model is unchanged.

    Args:
        model: A compiled and built model.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        length: The size of the inputs' axes of unknown size, such as the number of tokens.
        optimizer: The optimizer, if not the model's.
        min_shard_bytes: The size of a trainable variable, in bytes, from which it is sharded.
        batch_spec: The nested `tf.TypeSpec` of batches of data; by default it is derived from the model and its loss.
        device_bytes: The memory of a device, in bytes, for a verdict on what fits.

    Returns:
        An `Estimate`, for `print`.

    Raises:
        ValueError: An argument is invalid, or the step can't be traced. The message says what to write.

    Example:

    >>> import keras
    >>> from keras_paragrad.memory import estimate_memory
    >>> model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(1)])
    >>> model.compile("adam", loss="mse")
    >>> column = estimate_memory(model, batch_size=64, replicas=4)["optimizer"]
    >>> column.parameters, column.slots < 2 * column.parameters / 3
    (1056772, True)
    """
    check_internals("models", "steps", "segments", "memory")
    check_instance("model", model, keras.Model, "a compiled keras.Model")
    batch_size = check_integer("batch_size", batch_size, example=64)
    replicas = check_integer("replicas", replicas, example=8)
    min_shard_bytes = check_integer("min_shard_bytes", min_shard_bytes)
    length = check_integer("length", length, example=128, optional=True)
    device_bytes = check_integer("device_bytes", device_bytes, example=16 * 2**30, optional=True)
    if optimizer is None and (not model.compiled or model.optimizer is None):
        raise ValueError(f"{model.name!r} has no optimizer. Call model.compile(optimizer, loss) first.")
    rows = -(-batch_size // replicas)
    step = traced_step(model, rows, length, optimizer, batch_spec)
    columns = breakdowns_of(model, step, replicas, least=min_shard_bytes)
    left_out = _WORKSPACE if step.block.has_convolution else ""
    recomputation = recomputation_of(model)
    if recomputation.names:
        with recomputation.in_effect():
            step = traced_step(model, rows, length, optimizer, batch_spec)
        columns += breakdowns_of(model, step, replicas, recompute=True, least=min_shard_bytes)
    return Estimate(model.name, batch_size, replicas, rows, columns, recomputation.names, device_bytes, left_out)
