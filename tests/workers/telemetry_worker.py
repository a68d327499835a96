"""One of two workers that report what their callbacks found."""

from pathlib import Path
from typing import Any

import keras
from oracles.telemetry_loops import X, Y, inner

from keras_paragrad import DistributedFit
from keras_paragrad.profiling.telemetry import GradientTelemetry
from keras_paragrad.profiling.throughput import Throughput


def reported_by_worker(folder: Path) -> dict[str, Any]:
    """Trains with the other worker, and returns what the callbacks found; called in a process of its own."""
    dist = DistributedFit()
    with dist.scope():
        model = inner()
        # Tracing takes longer than twelve small steps.
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.3), "mse", run_eagerly=True)
    log_dir = folder / f"log{dist.strategy.cluster_resolver.task_id}"
    telemetry, throughput = GradientTelemetry(log_dir, every=2), Throughput(log_dir)
    dist.fit(model, X, Y, batch_size=16, shuffle=False, epochs=2, verbose=0, callbacks=[telemetry, throughput])
    assert telemetry.last is not None
    return {
        "steps": telemetry.last.steps.tolist(),
        "norms": telemetry.last.weights.gradient_norm,
        "clipped": telemetry.last.weights.clipped_gradient_norm,
        "examples_per_update": throughput.figures["examples_per_second"] / throughput.figures["updates_per_second"],
        "log_dir": sorted(path.name for path in log_dir.iterdir()) if log_dir.exists() else [],
    }
