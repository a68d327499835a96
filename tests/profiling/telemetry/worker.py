"""One of two workers, started by `test_workers.py`: trains, and writes what its callbacks found."""

import json
import sys
from pathlib import Path

import keras
from telemetry_loops import X, Y, inner

from keras_paragrad import DistributedFit
from keras_paragrad.profiling.telemetry.callback import GradientTelemetry
from keras_paragrad.profiling.throughput.callback import Throughput

log_dir, answer = Path(sys.argv[1]), Path(sys.argv[2])
dist = DistributedFit()
with dist.scope():
    model = inner()
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.3), "mse")
telemetry, throughput = GradientTelemetry(log_dir, every=2), Throughput(log_dir)
dist.fit(model, X, Y, batch_size=16, shuffle=False, epochs=2, verbose=0, callbacks=[telemetry, throughput])
assert telemetry.last is not None
found = {
    "steps": telemetry.last.steps.tolist(),
    "norms": telemetry.last.weights.gradient_norm.tolist(),
    "clipped": telemetry.last.weights.clipped_gradient_norm.tolist(),
    "examples_per_update": throughput.figures["examples_per_second"] / throughput.figures["updates_per_second"],
    "log_dir": sorted(path.name for path in log_dir.iterdir()) if log_dir.exists() else [],
}
answer.write_text(json.dumps(found))
