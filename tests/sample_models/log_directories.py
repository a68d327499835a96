"""Log directories as the callbacks leave them, made by hand: what a report must show is known."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keras_paragrad.profiling.summary import (
    Advice,
    Communication,
    KindTime,
    LayerTime,
    MemoryUse,
    OperationTime,
    PipelineTime,
    ProfileSummary,
    RunInfo,
    StepTime,
)

WINDOW = "plugins/profile/2026_01_02_03_04_05"
TELEMETRY = ("step", "epoch", "layer", "variable", "quantity", "value")
THROUGHPUT = ("step", "epoch", "quantity", "value")
RETRACES = ("step", "function", "signature")
RUN = RunInfo(
    model="digits",
    optimizer="AccumulatingOptimizer(Adam)",
    parameters=1_234_567,
    strategy="MirroredStrategy",
    replicas=2,
    workers=2,
    jit=True,
    precision="mixed_float16",
    devices=("CPU:0", "CPU:1"),
    versions={"keras": "3.15.1"},
    started="2026-01-02T03:04:05+00:00",
)
# Code is long, and can't be broken where words are.
ADVICE = "Write dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)."
OPERATIONS = (
    OperationTime("digits/dense/MatMul", "MatMul", "dense", 40, 30.0, 0.6),
    OperationTime("<b>loss</b> & more", "Sum", "", 20, 2.5, 0.05),
)
LAYERS = (
    LayerTime("block_with_a_long_name/multi_head_attention_1", 10.0, 16.0, 4.0),
    LayerTime("dense", 4.0, 6.0),
    LayerTime("optimizer", other=5.0, is_layer=False),
    *(LayerTime(f"norm_{number}", 0.5, 0.25) for number in range(17)),
)
KINDS = tuple(KindTime(f"Kind{number}", 40, 30.0 - number, 0.1 - 0.005 * number) for number in range(14))
# Two stages with two devices each, and four micro-batches, each of which takes 1 ms forward and 2 ms backward.
PIPELINE = PipelineTime(stages=2, microbatches=4, bubble=0.4, ideal=1 / 3)


def step(number: int, scale: float = 1.0) -> StepTime:
    """A step of 10 ms times `scale`, half of it input."""
    parts = {"input": 5.0, "host": 0.75, "compile": 0.25, "compute": 2.5, "collective": 1.0, "idle": 0.5}
    scaled = {part: took * scale for part, took in parts.items()}
    return StepTime(number, number // 4, 10.0 * number, 10.0 * scale, **scaled)


def summary(steps: int = 20, scale: float = 1.0, operations: Sequence[OperationTime] = OPERATIONS) -> ProfileSummary:
    """A window of steps, every tenth of them 3 times as long."""
    return ProfileSummary(
        RUN,
        tuple(step(number, scale * (3 if number % 10 == 9 else 1)) for number in range(100, 100 + steps)),
        tuple(operations),
        {"host": 3 * 2**30, "CPU:0": None},
        Advice(
            "input",
            "Write dataset.map(f, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE).",
            "50% of the step waits for input",
        ),
        WINDOW,
        ("Layer names are those of the graph.",),
        PIPELINE,
        LAYERS,
        KINDS,
        Communication(40.0, 10.0),
        (MemoryUse("GPU_0_bfc", *zip(*[(100 + n / 8, 2.0**20 * (1 + n % 8)) for n in range(8 * steps)], strict=True)),),
    )


def write_window(log_dir: Path, found: ProfileSummary, folder: str = WINDOW) -> Path:
    """Leaves a summary where the profiler does."""
    path = log_dir / folder / "keras_paragrad.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found.to_dict()), encoding="utf-8")
    return path


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a file of comma-separated values."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def telemetry_rows(steps: int, layers: int) -> Iterable[tuple[Any, ...]]:
    """Every quantity of every layer; the first layer's gradient vanishes, that of the last is infinite once."""
    for number in range(steps):
        epoch = number // 100
        yield number, epoch, "", "", "gradient_norm", 2.0 + number
        yield number, epoch, "", "", "clipped_gradient_norm", 1.0
        yield number, epoch, "", "", "learning_rate", 0.001 / (1 + number)
        yield number, epoch, "", "", "loss_scale", 32768.0
        for layer in range(layers):
            norm = float("inf") if layer == layers - 1 and number == 7 else 10.0 ** (layer % 9 - 5)
            yield number, epoch, f"dense_{layer}", "kernel", "gradient_norm", norm
            yield number, epoch, f"dense_{layer}", "kernel", "weight_norm", 3.0
            yield number, epoch, f"dense_{layer}", "kernel", "update_ratio", 0.001
            yield number, epoch, f"dense_{layer}", "kernel", "nonfinite", float(norm > 1e9)


def throughput_rows(steps: int) -> Iterable[tuple[Any, ...]]:
    """Every quantity of `Throughput`."""
    yield 0, 0, "time_to_first_step_s", 1.5
    yield 0, 0, "compile_s", 1.25
    yield steps // 2, 0, "compile_s", 0.75
    yield steps - 1, 0, "profiler_s", 8.0
    for number in range(steps):
        for quantity, value in {
            "examples_per_second": 12000.0 + number % 7,
            "step_time_p50_ms": 2.5,
            "step_time_p95_ms": 4.0,
            "retraces": 1.0,
            "host_memory_bytes": 2.0**30,
            "flops_per_step": 3e9,
            "mfu": 0.34,
            "updates_per_second": 400.0 + number % 3,
        }.items():
            yield number, number // 100, quantity, value


def make_run(log_dir: Path, steps: int = 30, layers: int = 3, scale: float = 1.0) -> Path:
    """A log directory with everything in it."""
    write_window(log_dir, summary(scale=scale))
    (log_dir / "run.json").write_text(json.dumps(asdict(RUN)), encoding="utf-8")
    write_rows(log_dir / "telemetry.csv", TELEMETRY, telemetry_rows(steps, layers))
    write_rows(log_dir / "throughput.csv", THROUGHPUT, throughput_rows(steps))
    write_rows(log_dir / "retraces.csv", RETRACES, [(63, "one_step_on_data", "float32[17, 784]")])
    return log_dir
