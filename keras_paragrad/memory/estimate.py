"""`estimate_memory`: the bytes that a training step takes on each device, before anything is trained."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import keras
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.arguments import check_instance, check_integer
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.types import Specs
from keras_paragrad.memory.available import STEP_SHARE
from keras_paragrad.memory.breakdown import MemoryBreakdown, breakdowns_of
from keras_paragrad.memory.traced_step import traced_steps
from keras_paragrad.plain_text import Printable, bytes_in_words, counted
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
    "graph": "Graph and runtime",
    "total": "Peak",
}
_ALWAYS = ("parameters", "gradients", "slots", "activations", "total")
_WORKSPACE = (
    "Not counted: on a GPU, cuDNN's workspace for a convolution, up to 4 GiB, or what TF_CUDNN_WORKSPACE_LIMIT_IN_MB "
    "says."
)


@dataclass(repr=False, eq=False)
class Estimate(Printable):
    """The memory of a training step on each device, for every way to shard the model; for `print` or a rich console.

    `estimate["optimizer"]` is the column of a value of `shard`.

    Attributes:
        model: The model's name.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        rows: Examples of a batch on a device.
        columns: A `MemoryBreakdown` of bytes for each choice.
        device_bytes: The memory of a device, for the verdict; `None` if it is unknown.
        left_out: What a GPU takes besides, in a sentence; empty if nothing is known to be left out.
    """

    model: str
    batch_size: int
    replicas: int
    rows: int
    columns: list[MemoryBreakdown]
    device_bytes: int | None = None
    left_out: str = ""

    def __getitem__(self, shard: str | None) -> MemoryBreakdown:
        for column in self.columns:
            if column.shard == shard:
                return column
        raise KeyError(f"{shard!r}; the estimate has {', '.join(str(column.shard) for column in self.columns)}")

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON types, in bytes."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}

    @property
    def _columns_here(self) -> list[MemoryBreakdown]:
        """The columns that there is a choice of: on one device there is nothing to shard."""
        return self.columns if self.replicas > 1 else self.columns[:1]

    @property
    def verdict(self) -> str | None:
        """Whether a step fits in 80% of a device's memory, and what to write if it doesn't as it is, or what would."""
        if self.device_bytes is None:
            return None
        limit, inside = STEP_SHARE * self.device_bytes, f"{bytes_in_words(self.device_bytes)} per device"
        possible = self._columns_here
        if column := next((column for column in possible if column.total <= limit), None):
            return f"Fits in {inside} " + (
                f'with DistributedFit(shard="{column.shard}").' if column.shard else "as it is."
            )
        least = min(possible, key=lambda column: column.total)
        takes = f"the least is {bytes_in_words(least.total)}, and a step may take {STEP_SHARE:.0%}"
        if least.held <= limit:
            instead = "Write DistributedFit(fit_memory=True), which finds the fastest way that fits, such as slices."
        else:
            devices = counted(math.ceil(self.columns[0].held / limit), "device")
            instead = f'{devices} or more would hold it in shards: DistributedFit(shard="parameters").'
        return f"Doesn't fit in {inside}: {takes}. {instead}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        devices, examples = counted(self.replicas, "device"), counted(self.rows, "example")
        yield Text(f"{self.model}, batches of {self.batch_size} on {devices}, {examples} on each", "bold")
        table = Table()
        table.add_column("Per device\nshard=", no_wrap=True)
        columns = self._columns_here
        for column in columns:
            table.add_column(Text(f"\n{column.shard and f'{column.shard!r}'}"), justify="right", no_wrap=True)
        for name, title in _ROWS.items():
            values = [getattr(column, name) for column in columns]
            if name == "total":
                table.add_section()
            if any(values) or name in _ALWAYS:
                table.add_row(title, *map(bytes_in_words, values), style="bold" if name == "total" else None)
        yield table
        yield Text("Peak: gradients, activations and the update peak at different times.", "dim")
        if self.left_out:
            yield Text(self.left_out, "dim", overflow="fold")
        if self.verdict:
            yield Text(self.verdict, "bold", overflow="fold")


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

    The training step is traced and its operations are followed, but not run; the model is unchanged. `microbatch` and
    `recompute` are in effect.

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
    (step,) = traced_steps(model, [rows], batch_spec, length=length, optimizer=optimizer)
    columns = breakdowns_of(model, step, replicas, least=min_shard_bytes)
    left_out = _WORKSPACE if step.block.has_convolution else ""
    return Estimate(model.name, batch_size, replicas, rows, columns, device_bytes, left_out)
