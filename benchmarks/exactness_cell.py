"""One cell of the exactness matrix: how far training on replicas ends from training one device on whole batches.

A cell has one setting of each of `AXES`. `python benchmarks/exactness_cell.py '{"replicas": "mirrored x2"}'` prints a
line of JSON; axes that are left out take their first setting. Workers are processes that this one starts.
"""

import json
import os
import socket
import subprocess
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# The sizes of the axes that divide batches and weights; `None` for `keras.distribution.DataParallel`.
MESHES = {"mesh (4, 1)": (4, 1), "mesh (2, 2)": (2, 2), "mesh (1, 4)": (1, 4), "DataParallel x4": None}
# The devices of each stage. With skips, one tensor is used in all of them.
PIPELINES = {
    "pipeline x2": [["CPU:0"], ["CPU:1"]],
    "pipeline x4": [["CPU:0"], ["CPU:1"], ["CPU:2"], ["CPU:3"]],
    "pipeline x4, skips": [["CPU:0"], ["CPU:1"], ["CPU:2"], ["CPU:3"]],
    "pipeline 2 x 2, skips": [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]],
}
AXES = {
    "replicas": [
        "mirrored x2",
        "mirrored x3",
        "mirrored x4",
        "2 workers",
        "2 workers x 2 devices",
        *MESHES,
        *PIPELINES,
    ],
    "optimizer": ["SGD", "Adam", "AdamW", "Lion", "Lamb", "Muon"],
    "clip": ["none", "clipnorm", "global_clipnorm", "clipvalue"],
    "batches": ["even", "uneven first", "uneven last"],
    "weights": ["none", "sample", "class"],
    "jit": ["off", "on"],
    "steps_per_execution": [1, 4],
    "precision": ["float32", "mixed_float16"],
    "accumulation": ["off", "on"],
    "shard": ["none", "optimizer", "parameters"],
}
DEVICES = {"mirrored x2": 2, "mirrored x3": 3, "mirrored x4": 4, "2 workers": 1, "2 workers x 2 devices": 2}
DEVICES |= dict.fromkeys(MESHES, 4)
DEVICES |= {name: sum(map(len, stages)) for name, stages in PIPELINES.items()}
RATES = {"SGD": 0.1, "Adam": 1e-2, "AdamW": 1e-2, "Lion": 1e-3, "Lamb": 1e-2, "Muon": 2e-3}
MICRO_BATCHES = 4
# With the usual 1e-7, the last digits of a gradient near zero decide between a step and its opposite.
EPSILONS = {"Adam": {"epsilon": 1e-3}, "AdamW": {"epsilon": 1e-3}}
CLIPS = {"none": {}, "clipnorm": {"clipnorm": 0.05}, "global_clipnorm": {"global_clipnorm": 0.1}}
CLIPS["clipvalue"] = {"clipvalue": 0.005}
# Rows of each batch. Four replicas can't share 3 rows without one going empty, nor 19 evenly.
SIZES = {"even": [24] * 6, "uneven first": [3, 24, 24, 24, 24, 24], "uneven last": [24, 24, 24, 24, 24, 19]}
FEATURES, CLASSES, EPOCHS, STEPS = 8, 3, 2, 2
# Of the model's variables, kernels are cut into shards, and biases stay whole.
MIN_SHARD_BYTES = 128
CLASS_WEIGHT = {0: 0.5, 1: 1.0, 2: 2.5}
TIME_LIMIT = 240
# By precision, a field of the result and its largest allowed value. Float16 rounds each replica's gradient.
ALLOWED = {"float32": ("difference", 1e-6), "mixed_float16": ("relative", 2e-3)}
# Lion takes the gradient's sign, which rounding turns where replicas all but cancel. Muon makes its singular values
# alike, and the smallest are mostly rounding: one device's gradients, rounded to float16, move its weights by 7e-3.
ALLOWED_IN_FLOAT16 = {"Lion": ("relative", 0.1), "Muon": ("relative", 0.02)}


def completed(cell):
    """Fills in the settings that a cell leaves out."""
    unknown = {name: value for name, value in cell.items() if value not in AXES.get(name, ())}
    if unknown:
        raise SystemExit(f"Not in the matrix: {unknown}. Its axes: {AXES}")
    return {name: cell.get(name, values[0]) for name, values in AXES.items()}


def refused(cell):
    """Whether `DistributedFit` refuses a cell.

    Pipelines and meshes have no shards. On a mesh, only the last batch may be one that devices can't share evenly.
    """
    if cell["replicas"] in PIPELINES:
        return cell["shard"] != "none"
    if cell["replicas"] in MESHES:
        return cell["shard"] != "none" or cell["batches"] == "uneven first"
    return False


class Training:
    """Trainings of one cell, in a process whose devices are set up for it; each returns the model's weights."""

    def __init__(self, cell):
        import keras
        import numpy as np
        import tensorflow as tf

        devices = [tf.config.LogicalDeviceConfiguration()] * DEVICES[cell["replicas"]]
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        self.keras, self.np, self.tf, self.cell = keras, np, tf, cell
        generator = np.random.default_rng(0)
        self.batches = [self.batch(generator, rows) for rows in SIZES[cell["batches"]]]

    def batch(self, generator, rows):
        """Draws inputs and labels of some rows, and weights if the cell weights examples."""
        x = generator.normal(size=(rows, FEATURES)).astype("float32")
        y = generator.integers(0, CLASSES, rows)
        if self.cell["weights"] == "none":
            return x, y
        weights = generator.uniform(0.1, 3, rows).astype("float32")
        return (x, y, weights) if self.cell["weights"] == "sample" else (x, y)

    def dataset(self, batches):
        signature = self.tf.nest.map_structure(lambda a: self.tf.TensorSpec((None, *a.shape[1:]), a.dtype), batches[0])
        dataset = self.tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
        return dataset.apply(self.tf.data.experimental.assert_cardinality(len(batches)))

    @property
    def whole(self):
        """The batches that one device takes: with accumulation, the batches of each window put together."""
        if self.cell["accumulation"] == "off":
            return self.batches
        windows = [self.batches[start : start + STEPS] for start in range(0, len(self.batches), STEPS)]
        return [tuple(self.np.concatenate(parts) for parts in zip(*window, strict=True)) for window in windows]

    def model(self, wrap=lambda optimizer: optimizer, jit=False, per_call=1, **more):
        """The compiled model; `wrap` gets its optimizer, which is made with the options in `more`."""
        keras, cell = self.keras, self.cell
        keras.utils.set_random_seed(1)
        inputs = keras.Input((FEATURES,))
        first = hidden = keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
        # A stage for each of up to four devices.
        for _ in range(2 if cell["replicas"] in PIPELINES else 0):
            hidden = keras.layers.Dense(16, activation="tanh")(hidden)
            # A sum's gradients would overflow float16 on one device, and the ones of micro-batches wouldn't.
            hidden = keras.layers.Average()([hidden, first]) if "skips" in cell["replicas"] else hidden
        model = keras.Model(inputs, keras.layers.Dense(CLASSES, dtype="float32")(hidden))
        self.initial = model.get_weights()
        options = {**EPSILONS.get(cell["optimizer"], {}), **CLIPS[cell["clip"]], **more}
        inner = getattr(keras.optimizers, cell["optimizer"])(RATES[cell["optimizer"]], **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(wrap(inner), loss, metrics=["accuracy"], jit_compile=jit, steps_per_execution=per_call)
        return model

    @property
    def arguments(self):
        weights = {"class_weight": CLASS_WEIGHT} if self.cell["weights"] == "class" else {}
        return {"epochs": EPOCHS, "verbose": 0, "shuffle": False, **weights}

    def one_device(self):
        model = self.model()
        # Tracing takes longer than these steps.
        model.run_eagerly = True
        model.fit(self.dataset(self.whole), **self.arguments)
        return model.get_weights()

    def ours(self, dist):
        """Trains the cell with a `DistributedFit`."""
        from keras_paragrad import AccumulatingOptimizer

        accumulates = self.cell["accumulation"] == "on"
        wrap = (lambda inner: AccumulatingOptimizer(inner, STEPS)) if accumulates else (lambda inner: inner)
        with dist.scope():
            model = self.model(wrap, self.cell["jit"] == "on", self.cell["steps_per_execution"])
        dist.fit(model, self.dataset(self.batches), **self.arguments)
        return model.get_weights()

    def stock(self, strategy):
        """Trains the cell with Keras alone."""
        more = {"gradient_accumulation_steps": STEPS} if self.cell["accumulation"] == "on" else {}
        with strategy.scope():
            model = self.model(jit=self.cell["jit"] == "on", per_call=self.cell["steps_per_execution"], **more)
        model.fit(self.dataset(self.batches), **self.arguments)
        return model.get_weights()

    def flat(self, weights):
        return self.np.concatenate([weight.ravel() for weight in weights])


def train(cell):
    """How far the weights end from one device's, in the cell's `"way"` of training; runs in each of its processes."""
    warnings.simplefilter("ignore")
    training = Training(cell)
    from keras_paragrad import DistributedFit

    if cell["precision"] != "float32":
        training.keras.config.set_dtype_policy(cell["precision"])
    # Several workers meet before anything else runs.
    devices = [f"CPU:{index}" for index in range(DEVICES[cell["replicas"]])]
    shard = None if cell["shard"] == "none" or cell["way"] == "stock" else cell["shard"]
    if cell["replicas"] in MESHES:
        dist = on_mesh(training.keras, MESHES[cell["replicas"]], devices)
    elif cell["replicas"] in PIPELINES:
        from keras_paragrad.distribution import Pipeline

        stages = PIPELINES[cell["replicas"]]
        dist = DistributedFit(Pipeline(stages=len(stages), microbatches=MICRO_BATCHES), stages)
    else:
        strategy = "mirrored" if "mirrored" in cell["replicas"] else "multi_worker"
        dist = DistributedFit(strategy, devices, shard=shard, min_shard_bytes=MIN_SHARD_BYTES)
        replicas = len(devices) * (2 if "workers" in cell["replicas"] else 1)
        assert dist.strategy.num_replicas_in_sync == replicas, "the cell is not what it says"
    expected = training.flat(training.one_device())
    found = training.flat(training.stock(dist.strategy) if cell["way"] == "stock" else training.ours(dist))
    norm, difference = training.np.linalg.norm, expected - found
    moved = norm(expected - training.flat(training.initial))
    return {"difference": float(abs(difference).max()), "relative": float(norm(difference) / moved)}


def on_mesh(keras, shape, devices):
    """A `DistributedFit` on a mesh; `shape` is one of `MESHES`."""
    from keras_paragrad import DistributedFit

    if shape is None:
        return DistributedFit(keras.distribution.DataParallel(devices=[name.lower() for name in devices]))
    return DistributedFit(mesh=dict(zip(("batch", "model"), shape, strict=True)), layout="auto", devices=devices)


def holds(cell, result):
    """Whether a cell's result is as near to one device's as its precision and optimizer allow."""
    cell = completed(cell)
    measure, allowed = ALLOWED[cell["precision"]]
    if cell["precision"] != "float32":
        measure, allowed = ALLOWED_IN_FLOAT16.get(cell["optimizer"], (measure, allowed))
    return result.get(measure, float("inf")) <= allowed


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def environments(cell):
    """The environment variables of each process that a cell takes."""
    if "workers" not in cell["replicas"]:
        return [os.environ]
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    return [{**os.environ, "TF_CONFIG": json.dumps(task)} for task in tasks]


def run(cell, way="ours"):
    """Runs a cell in separate processes; returns its result, or the `error` that ended it.

    `difference` is the largest difference of a weight. `relative` is the norm of all differences, as a fraction of the
    norm of how far the weights have moved.
    """
    if way == "stock" and completed(cell)["shard"] != "none":
        return {"error": "no shards"}
    if way == "stock" and completed(cell)["replicas"] in MESHES:
        return {"error": "no meshes"}
    if way == "stock" and completed(cell)["replicas"] in PIPELINES:
        return {"error": "no pipelines"}
    command = [sys.executable, __file__, json.dumps({**completed(cell), "way": way})]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for environment in environments(completed(cell))]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {TIME_LIMIT} s"}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [errors for process, (_, errors) in zip(processes, outputs, strict=True) if process.returncode]
    if failed:
        lines = [line for line in failed[0].splitlines() if "Error" in line] or failed[0].splitlines()[-1:]
        return {"error": lines[-1][:300] if lines else "no message"}
    return worst(json.loads(printed.splitlines()[-1]) for printed, _ in outputs)


def worst(results):
    """The result with the largest difference, among the results of a cell's processes."""
    return max(results, key=lambda result: result["difference"])


def main():
    cell = json.loads(sys.argv[1])
    if "way" in cell:
        print(json.dumps(train(cell)))
    else:
        print(json.dumps({way: run(cell, way) for way in ("ours", "stock")}))


if __name__ == "__main__":
    main()
