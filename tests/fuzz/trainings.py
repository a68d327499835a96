"""A case trained by plain Keras on one device, and by the components that it names."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from fuzz.cases import Case
from fuzz.models import columns_of, compile_options, model_of, optimizer_of

import keras_paragrad as kp

DEVICES = ["CPU:0", "CPU:1"]
LEAST_BYTES = 16


class Trained(NamedTuple):
    """What a training shows.

    Attributes:
        start: The weights it began with.
        weights: Where it ended.
        history: Of all its fits, one after another.
        evaluate: What `evaluate` returns.
        predict: The outputs, as one vector.
        updates: The optimizer's count.
    """

    start: list[np.ndarray]
    weights: list[np.ndarray]
    history: dict[str, list[float]]
    evaluate: dict[str, float]
    predict: np.ndarray
    updates: int


class _Batches(keras.utils.PyDataset):
    def __init__(self, batches: list[Any]):
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class _Anneals(keras.callbacks.Callback):
    """Another weight of each loss in each epoch."""

    def __init__(self, variables: list[keras.Variable]):
        super().__init__()
        self.variables = variables

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for variable in self.variables:
            variable.assign(variable * 0.6)


class _Halved:
    """Half of each gradient."""

    def __call__(self, gradients: Any, variables: Any) -> Any:
        return [0.5 * gradient for gradient in gradients]


class _Momentum:
    """A gradient and some of those before it."""

    def init(self, variables: Any) -> Any:
        return [tf.zeros(variable.shape) for variable in variables]

    def update(self, gradients: Any, state: Any, variables: Any) -> Any:
        moved = [gradient + 0.5 * before for gradient, before in zip(gradients, state, strict=True)]
        return moved, moved


class Training:
    """Plain Keras's training of a case.

    Args:
        case: The case.
        compiled: Whether steps are compiled. Without, they are taken eagerly, which is quicker for a few.
        summed: Whether gradients of embeddings are dense.
    """

    def __init__(self, case: Case, compiled: bool = False, summed: bool = False):
        self.case, self.compiled, self.summed = case, compiled, summed
        self.callbacks: list[Any] = []
        self.loss_weights: list[Any] = []
        self._state: Any = None

    @property
    def batch(self) -> int:
        return self.case["batch"]

    def run(self) -> Trained:
        """Trains, saves in between if the case does, and looks at the end."""
        case = self.case
        keras.utils.set_random_seed(1)
        model = self._made()
        start = self.weights_of(model)
        history: dict[str, list[float]] = {}
        self._fit(model, case["epochs"], history)
        if case["fits"] != "one":
            model = self._between(model)
            self._fit(model, 1, history)
        x, y, weights = columns_of(case, 11, seed=2)
        evaluated = model.evaluate(x, y, sample_weight=weights, batch_size=4, verbose=0, return_dict=True)
        predicted = [np.ravel(each) for each in keras.tree.flatten(model.predict(x, batch_size=4, verbose=0))]
        updates = int(model.optimizer.iterations.numpy())
        return Trained(start, self.weights_of(model), history, evaluated, np.concatenate(predicted), updates)

    def _made(self) -> Any:
        with self.scope():
            model = self.changed(model_of(self.case, self.summed))
            self._compile(model)
        self.prepare(model)
        return model

    def _compile(self, model: Any) -> None:
        options = compile_options(self.case)
        self.loss_weights = [each for each in options.get("loss_weights", []) if isinstance(each, keras.Variable)]
        optimizer = self.optimizer()
        if self.case["scale"] == "LossScaleOptimizer":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        model.compile(optimizer, **options, **self.execution())

    def _between(self, model: Any) -> Any:
        """What comes between two fits."""
        kind = self.case["fits"]
        if kind == "compiled again":
            with self.scope():
                self._compile(model)
        with tempfile.TemporaryDirectory() as folder:
            if kind == "from .keras":
                path = Path(folder, "model.keras")
                model.save(path)
                with self.scope():
                    model = keras.models.load_model(path)
                self.loss_weights = []
                self.prepare(model)
            elif kind == "from weights":
                path = Path(folder, "model.weights.h5")
                model.save_weights(path)
                model = self._made()
                if not model.optimizer.built:
                    # Otherwise Keras leaves its state out, which models on a mesh load.
                    with self.scope():
                        model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
        return model

    def _fit(self, model: Any, epochs: int, history: dict[str, list[float]]) -> None:
        case = self.case
        callbacks = [*self.callbacks, *([_Anneals(self.loss_weights)] if self.loss_weights else [])]
        if case["callback"] == "rate":
            callbacks.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7))
        elif case["callback"] == "early stopping":
            callbacks.append(keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True))
        options: dict[str, Any] = {"epochs": epochs, "verbose": 0, "shuffle": False, "callbacks": callbacks}
        if case["weights"] == "by class":
            options["class_weight"] = {0: 0.5, 1: 1.0, 2: 2.5}
        if case["validation"] == "data":
            columns = columns_of(case, 7, seed=1)
            options["validation_data"] = columns if columns[2] is not None else columns[:2]
            options["validation_batch_size"] = 4
        elif case["validation"] == "split":
            # Micro-batches are smaller, and Keras averages losses of batches by rows, also those divided by weights.
            options |= {"validation_split": 0.3, "validation_batch_size": case["batch"]}
        found = self.fit(model, **self._data(), **options).history
        for name, values in found.items():
            history.setdefault(name, []).extend(float(value) for value in values)

    def _data(self) -> dict[str, Any]:
        case = self.case
        x, y, weights = columns = columns_of(case, case["rows"])
        columns = columns if weights is not None else columns[:2]
        if case["data"] == "arrays":
            return {"x": x, "y": y, "sample_weight": weights, "batch_size": self.batch}
        starts = range(0, case["rows"], self.batch)
        batches = [keras.tree.map_structure(lambda c, s=s: c[s : s + self.batch], columns) for s in starts]
        if case["data"] == "PyDataset":
            return {"x": _Batches(batches)}
        if case["data"] == "generator":

            def endless() -> Iterator[Any]:
                while True:
                    yield from batches

            return {"x": endless(), "steps_per_epoch": len(batches)}
        data = tf.data.Dataset.from_tensor_slices(columns).batch(self.batch)
        return {"x": data.filter(lambda *_: True) if case["data"] == "unknown length" else data}

    # What components change.

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def changed(self, model: Any) -> Any:
        return model

    def prepare(self, model: Any) -> None:
        pass

    def fit(self, model: Any, **options: Any) -> Any:
        return model.fit(**options)

    def weights_of(self, model: Any) -> list[np.ndarray]:
        return model.get_weights()

    def execution(self) -> dict[str, Any]:
        return {"run_eagerly": not self.compiled, "jit_compile": False}

    def optimizer(self) -> Any:
        return optimizer_of(self.case, None if self.case["transform"] == "none" else self._transforming)

    def _transforming(self, kind: type) -> type:
        """A class of optimizer that transforms whole gradients."""

        def apply(optimizer: Any, gradients: Any, trainable_variables: Any = None) -> Any:
            scale = optimizer.loss_scale_factor or 1.0
            dense = [tf.convert_to_tensor(gradient) / scale for gradient in gradients]
            if self.case["transform"] == "scaled":
                dense = _Halved()(dense, trainable_variables)
            else:
                state = self._state if self._state is not None else _Momentum().init(trainable_variables)
                dense, self._state = _Momentum().update(dense, state, trainable_variables)
            return super(made, optimizer).apply([gradient * scale for gradient in dense], trainable_variables)

        made = type(kind.__name__, (kind,), {"apply": apply})
        return made


class OurTraining(Training):
    """The same by the components that the case names."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.dist = _distributed(case["devices"])
        if case["steps"] > 1:
            self.callbacks.append(kp.ExactAccumulation())
        watch = case["watch"]
        if watch == "telemetry":
            self.callbacks.append(kp.GradientTelemetry(every=2))
        elif watch == "throughput":
            self.callbacks.append(kp.Throughput(batch_size=self.batch))
        elif watch == "noise scale":
            self.callbacks.append(kp.GradientNoiseScale())

    @property
    def batch(self) -> int:
        return self.case["batch"] // self.case["steps"]

    def scope(self) -> Any:
        return self.dist.scope() if self.dist else contextlib.nullcontext()

    def changed(self, model: Any) -> Any:
        return kp.wrap(model) if self.case["watch"] in ("wrap", "noise scale") else model

    def weights_of(self, model: Any) -> list[np.ndarray]:
        return model.per_example.layer.get_weights() if hasattr(model, "per_example") else model.get_weights()

    def prepare(self, model: Any) -> None:
        case = self.case
        if case["recompute"] == "segments":
            kp.recompute(model, every=1)
        elif case["recompute"] == "a layer":
            kp.recompute(model, ["first"])
        if case["slices"]:
            kp.microbatch(model, case["slices"])
        if case["transform"] != "none":
            kp.transform_gradients(model, _Halved() if case["transform"] == "scaled" else _Momentum())
        if self.dist and case["through"] == "prepare":
            self.dist.prepare(model)

    def fit(self, model: Any, **options: Any) -> Any:
        fit = functools.partial(self.dist.fit, model) if self.dist and self.case["through"] == "dist.fit" else model.fit
        return fit(**options)

    def execution(self) -> dict[str, Any]:
        case = self.case
        return {"run_eagerly": case["eager"], "jit_compile": case["jit"], "steps_per_execution": case["per_call"]}

    def optimizer(self) -> Any:
        inner = optimizer_of(self.case)
        if self.case["steps"] == 1:
            return inner
        # What steps of their own divide by has to be stated.
        stated = {"weighted mean": "sample_weight", "sum": "sum"}.get(self.case["loss"], "examples")
        weighting = "auto" if self.case["step"] in ("Keras's", "compute_loss") else stated
        return kp.AccumulatingOptimizer(inner, self.case["steps"], weighting=weighting)


def _distributed(devices: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "one": lambda: None,
        "replicas": lambda: kp.DistributedFit("mirrored", DEVICES),
        "optimizer in shards": lambda: kp.DistributedFit(
            "mirrored", DEVICES, shard="optimizer", min_shard_bytes=LEAST_BYTES
        ),
        "parameters in shards": lambda: kp.DistributedFit(
            "mirrored", DEVICES, shard="parameters", min_shard_bytes=LEAST_BYTES
        ),
        "mesh of rows": lambda: kp.DistributedFit(mesh={"batch": 2, "model": 1}, layout="auto", devices=DEVICES),
        "mesh of columns": lambda: kp.DistributedFit(mesh={"batch": 1, "model": 2}, layout="auto", devices=DEVICES),
        "pipeline": lambda: kp.DistributedFit(kp.Pipeline(stages=2, microbatches=3), devices=DEVICES),
    }
    return made[devices]()
