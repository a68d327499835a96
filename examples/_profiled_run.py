"""The digits demo on two replicas once more, for a few epochs, with everything there is to see it by."""

import argparse
from pathlib import Path

import keras
from _training_run import compiled, digits, distributed

from keras_paragrad import GradientTelemetry, Profiler, ProfileSchedule, Throughput

EPOCHS = 4


def main():
    """Trains, and leaves traces, tables and the report in the folder; the profiler prints what it saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    dist = distributed(2)
    model = compiled(dist, steps=4)
    training, _ = digits()
    # The first epoch compiles.
    schedule = ProfileSchedule(skip_first=24, warmup=4, active=16)
    callbacks = [
        keras.callbacks.TensorBoard(folder),
        GradientTelemetry(folder, every=1),
        Throughput(folder),
        Profiler(folder, schedule),
    ]
    dist.fit(model, *training, batch_size=64, epochs=EPOCHS, shuffle=False, callbacks=callbacks, verbose=0)


if __name__ == "__main__":
    main()
