"""The process in which a batch or a way to train is tried: makes the model again, trains some steps, and measures.

`python -m keras_paragrad.memory.trial_process DIRECTORY` reads `request.pickle` there, and writes `base.json` before it
makes the model and `result.json` at the end. It is killed for memory before any other process is.
"""

import contextlib
import functools
import importlib
import json
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_paragrad  # noqa: F401  (registers the classes that a model may have)
from keras_paragrad.compat.model import all_layers, words_of
from keras_paragrad.memory.available import resident_bytes

# Phrases by which TensorFlow, XLA, cuDNN and Python report that memory ran out.
_OUT_OF_MEMORY = ("out of memory", "resource_exhausted", "oom when allocating", "failed to allocate", "bad_alloc")


def main(directory: Path) -> None:
    """Answers the request in a directory: with the bytes at the peak and the seconds of a step, or a problem."""
    # Makes the kernel kill this process before others when memory runs out.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    request = pickle.loads((directory / "request.pickle").read_bytes())
    on_gpu = _set_up(request)
    # TensorFlow's runtime doesn't count as memory of the training.
    tf.reduce_sum(tf.ones((8, 8))).numpy()
    base = 0 if on_gpu else resident_bytes() or 0
    (directory / "base.json").write_text(json.dumps(base))
    try:
        seconds = _train(request, directory)
        # The peak on the fullest GPU, or on a logical CPU device, without what the process took before.
        if on_gpu:
            names = [f"GPU:{index}" for index in range(_devices(request))]
            peak = max(tf.config.experimental.get_memory_info(name)["peak"] for name in names)
        else:
            peak = max(0, (resident_bytes(peak=True) or 0) - base) // _devices(request)
        result = {"bytes": peak, "seconds": seconds}
    except Exception as error:
        words = f"{type(error).__name__}: {words_of(error)}"
        exhausted = isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError))
        exhausted = exhausted or any(phrase in words.lower() for phrase in _OUT_OF_MEMORY)
        traceback.print_exc()
        result = {"bytes": None} if exhausted else {"problem": " ".join(words.split())[:600]}
    (directory / "result.json").write_text(json.dumps(result))


def _devices(request: dict[str, Any]) -> int:
    return request["runner"]["devices"] if request["runner"] else 1


def _set_up(request: dict[str, Any]) -> bool:
    """Configures Keras and TensorFlow as in the parent process; returns whether training runs on a GPU."""
    keras.config.set_floatx(request["floatx"])
    keras.config.set_image_data_format(request["image_data_format"])
    keras.config.set_dtype_policy(request["dtype_policy"])
    count = _devices(request)
    gpus = [gpu for gpu in tf.config.list_physical_devices("GPU") if gpu.name in request["gpus"]][:count]
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        size = request["device_bytes"] // 2**20
        tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=size)])
    if not gpus and count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    return bool(gpus)


def _train(request: dict[str, Any], directory: Path) -> float:
    """Makes the model and its data, and trains; returns the seconds of a step."""
    runner = None
    if request["runner"]:
        make = getattr(importlib.import_module(request["runner"]["module"]), request["runner"]["make"])
        runner = make(**request["runner"]["arguments"])
    with runner.scope() if runner else contextlib.nullcontext():
        # Unpickling is safe: the code comes from the parent process.
        model = keras.saving.deserialize_keras_object(request["model"], request["custom_objects"], safe_mode=False)
    for index, layer in enumerate(all_layers(model)):
        if (directory / f"assets_{index}").exists():
            layer.load_assets(str(directory / f"assets_{index}"))
    if not model.compiled:
        raise ValueError("it overrides compile(), which can't be called again from what Keras saves")
    for call in request["preparations"]:
        getattr(importlib.import_module(call.module), call.function)(model, **call.arguments)
    rows = request["rows"]

    def repeated(leaf: Any) -> Any:
        return None if leaf is None else np.resize(leaf, (rows, *leaf.shape[1:]))

    x, y, sample_weight = (keras.tree.map_structure(repeated, structure) for structure in request["data"])
    clock = _Clock()
    fit = functools.partial(runner.fit, model) if runner else model.fit
    arguments = {"sample_weight": sample_weight, "batch_size": rows, "epochs": request["steps"], "shuffle": False}
    fit(x, y, callbacks=[clock], verbose=0, **arguments)
    return clock.seconds


class _Clock(keras.callbacks.Callback):
    """Measures the fastest epoch, which is a single step; not the first, which also traces the step."""

    seconds = float("inf")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.seconds = min(self.seconds, time.perf_counter() - self._start)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
