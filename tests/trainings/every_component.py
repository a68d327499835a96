"""A tiny training with each component in each form, beside one device on whole batches: made first, then run.

`python tests/trainings/every_component.py` prints a line of JSON: the largest difference of each, or the sentence that
refuses.
"""

import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf

import keras_paragrad as paragrad

ROWS, FEATURES, CLASSES, BATCH = 20, 6, 3, 8
_generator = np.random.default_rng(0)
X = _generator.normal(size=(ROWS, FEATURES)).astype("float32")
Y = _generator.integers(0, CLASSES, ROWS)
WEIGHTS = _generator.uniform(0.5, 2, ROWS).astype("float32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Case(NamedTuple):
    """A component in one form.

    Attributes:
        make: Makes the component. A release that lacks what it needs is refused here.
        run: Trains with what was made, and returns the largest difference from the oracle.
        called: Whether the component is a function, which `run` calls.
    """

    make: Callable[[], Any]
    run: Callable[[Any], float]
    called: bool = False


def network(optimizer: Any = "sgd", kind: type[keras.Model] = keras.Model, **compiled: Any) -> keras.Model:
    """A model with the same weights each time."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    hidden = keras.layers.Dense(8, activation="tanh")(hidden)
    model = kind(inputs, keras.layers.Dense(CLASSES)(hidden))
    model.compile(optimizer, LOSS, jit_compile=False, **compiled)
    return model


def train(model: keras.Model, *callbacks: Any, fit: Any = keras.Model.fit, batch: int = BATCH, **options: Any):
    fit(
        model,
        X,
        Y,
        sample_weight=WEIGHTS,
        batch_size=batch,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
        **options,
    )
    return model


@functools.cache
def whole() -> tuple[np.ndarray, ...]:
    """The weights that Keras ends with on one device."""
    return tuple(train(network()).get_weights())


def difference(found: Any, expected: Any) -> float:
    """The largest difference of nested arrays."""
    pairs = zip(keras.tree.flatten(list(found)), keras.tree.flatten(list(expected)), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def from_whole(model: keras.Model) -> float:
    return difference(model.get_weights(), whole())


class OwnStep(keras.Model):
    """A model whose `train_step` is its own, and a mean over examples."""

    def train_step(self, data):
        x, y, sample_weight = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), sample_weight)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def gradients_of_rows() -> list[np.ndarray]:
    """Each row's gradients, by a tape of its own."""
    model, rows = network(), []
    for row in range(ROWS):
        with tf.GradientTape() as tape:
            loss = LOSS(Y[row : row + 1], model(X[row : row + 1]))
        rows.append([each.numpy() for each in tape.gradient(loss, model.trainable_variables)])
    return [np.stack(each) for each in zip(*rows, strict=True)]


def gradients_of_inputs() -> np.ndarray:
    """Of each row, the Jacobian of the outputs."""
    model, inputs = network(), tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = model(inputs)
    return tape.batch_jacobian(outputs, inputs).numpy()


def product_with_hessian(vector: np.ndarray) -> np.ndarray:
    model, inputs = network(), tf.constant(X)
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            output = tf.reduce_sum(model(inputs)[:, 0])
        product = tf.reduce_sum(inner.gradient(output, inputs) * vector)
    return outer.gradient(product, inputs).numpy()


def _accumulate(optimizer: Any) -> float:
    return from_whole(train(network(optimizer), paragrad.ExactAccumulation(), batch=BATCH // 2))


def _accumulate_by_optimizer(optimizer: Any) -> float:
    model = network(optimizer)
    model.fit(X[:16], Y[:16], batch_size=BATCH // 2, shuffle=False, verbose=0)
    plain = network()
    plain.fit(X[:16], Y[:16], batch_size=BATCH, shuffle=False, verbose=0)
    return difference(model.get_weights(), plain.get_weights())


def _changed(change: Callable[[keras.Model], Any], kind: type[keras.Model] = keras.Model) -> Case:
    """A function that changes how a model is trained."""

    def make() -> keras.Model:
        model = network(kind=kind)
        change(model)
        return model

    return Case(make, lambda model: from_whole(train(model)))


def _in_slices(kind: type[keras.Model] = keras.Model) -> Case:
    return _changed(lambda model: paragrad.microbatch(model, 3), kind)


def _wrapped(model: keras.Model) -> float:
    model.compile("sgd", LOSS, jit_compile=False)
    return from_whole(train(model))


def _distributed(kind: type[keras.Model] = keras.Model, **options: Any) -> Case:
    def run(dist: paragrad.DistributedFit) -> float:
        with dist.scope():
            model = network(kind=kind)
        return from_whole(train(model, fit=lambda *arguments, **keywords: dist.fit(*arguments, **keywords)))

    def make() -> paragrad.DistributedFit:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        return paragrad.DistributedFit(jit=False, **made)

    return Case(make, run)


def _private(models: tuple[keras.Model, Any]) -> float:
    model, private = models
    private.compile("sgd", LOSS, jit_compile=False)
    private.fit(X, Y, epochs=1, verbose=0)
    plain = network()
    plain.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    return difference(model.get_weights(), plain.get_weights())


def _make_private() -> tuple[keras.Model, Any]:
    # All rows at each step, and next to no noise.
    model = network()
    options = {"expected_batch_size": ROWS, "examples": ROWS, "delta": 1e-5, "noise_multiplier": 1e-9, "seed": 1}
    return model, paragrad.make_private(model, clip_norm=10.0, **options)


def _watched(make: Callable[[], Any], *, check: Callable[[Any], Any] = lambda callback: True, optimizer: Any = "sgd"):
    """A callback, which changes nothing."""

    def run(callback: Any) -> float:
        result = from_whole(train(network(optimizer), callback))
        assert check(callback)
        return result

    return Case(make, run)


def _noise_scale(made: tuple[Any, Any]) -> float:
    optimizer, callback = made
    model = network(optimizer)
    return from_whole(train(model, paragrad.ExactAccumulation(), callback, batch=BATCH // 2))


def _examples(made: tuple[Any, Any]) -> float:
    model, callback = made
    model.compile("sgd", LOSS, jit_compile=False)
    return from_whole(train(model, callback))


def _transformed(model: keras.Model) -> float:
    plain = network(keras.optimizers.SGD(0.005))
    return difference(train(model).get_weights(), train(plain).get_weights())


def _halving() -> keras.Model:
    model = network()
    paragrad.transform_gradients(model, lambda gradients, variables: [each / 2 for each in gradients])
    return model


def _estimated(model: keras.Model) -> float:
    """In bytes."""
    return abs(paragrad.estimate_memory(model, BATCH)["optimizer"].parameters - 4 * model.count_params())


def _backed_up(callback: Any) -> float:
    return from_whole(train(network(), callback))


def _trace(folder: Path) -> Any:
    schedule = paragrad.ProfileSchedule(skip_first=0, warmup=1, active=1)
    return paragrad.Profiler(folder, schedule, report=None, summary=False)


def _temporary() -> Path:
    return Path(tempfile.mkdtemp())


TWO = ["CPU:0", "CPU:1"]
VECTOR = np.ones((ROWS, FEATURES), "float32")
CASES: dict[str, Case] = {
    "AccumulatingOptimizer": Case(lambda: paragrad.AccumulatingOptimizer("sgd", steps=2), _accumulate_by_optimizer),
    "ExactAccumulation": Case(lambda: paragrad.AccumulatingOptimizer("sgd", steps=2), _accumulate),
    "microbatch": _in_slices(),
    "microbatch, own train_step": _in_slices(OwnStep),
    "recompute": _changed(lambda model: paragrad.recompute(model, [model.layers[1].name])),
    "transform_gradients": Case(_halving, _transformed),
    "wrap": Case(lambda: paragrad.wrap(network()), _wrapped),
    "per_example_gradients": Case(
        network,
        lambda model: difference(
            paragrad.per_example_gradients(model, X, Y, LOSS, batch_size=BATCH), gradients_of_rows()
        ),
        called=True,
    ),
    "ExampleGradients": Case(lambda: (paragrad.wrap(network()), paragrad.ExampleGradients()), _examples),
    "GradientNoiseScale": Case(
        lambda: (paragrad.AccumulatingOptimizer("sgd", steps=2), paragrad.GradientNoiseScale()), _noise_scale
    ),
    "make_private": Case(_make_private, _private),
    "input_gradients": Case(
        network,
        lambda model: difference(
            [paragrad.input_gradients(model, X, output=0, batch_size=BATCH)], [gradients_of_inputs()[:, 0]]
        ),
        called=True,
    ),
    "input_jacobian": Case(
        network,
        lambda model: difference([paragrad.input_jacobian(model, X, batch_size=BATCH)], [gradients_of_inputs()]),
        called=True,
    ),
    "hessian_vector_product": Case(
        network,
        lambda model: difference(
            [paragrad.hessian_vector_product(model, X, VECTOR, output=0, batch_size=BATCH)],
            [product_with_hessian(VECTOR)],
        ),
        called=True,
    ),
    "GradientTelemetry": _watched(lambda: paragrad.GradientTelemetry(every=1)),
    "Throughput": _watched(paragrad.Throughput),
    "Profiler": _watched(lambda: _trace(_temporary())),
    "Backup": Case(lambda: paragrad.Backup(_temporary()), _backed_up),
    "estimate_memory": Case(network, _estimated, called=True),
    "find_batch_size": Case(
        network,
        lambda model: float(
            paragrad.find_batch_size(model, X, Y, device_bytes=2**30, max_batch_size=8, steps=0, verbose=0) != 8
        ),
        called=True,
    ),
    "DistributedFit, replicas": _distributed(strategy="mirrored", devices=TWO),
    "DistributedFit, own train_step": _distributed(OwnStep, strategy="mirrored", devices=TWO),
    "DistributedFit, optimizer in shards": _distributed(
        strategy="mirrored", devices=TWO, shard="optimizer", min_shard_bytes=16
    ),
    "DistributedFit, parameters in shards": _distributed(
        strategy="mirrored", devices=TWO, shard="parameters", min_shard_bytes=16
    ),
    "DistributedFit, Pipeline": _distributed(
        strategy=lambda: paragrad.Pipeline(stages=2, microbatches=2), devices=[["CPU:0"], ["CPU:1"]]
    ),
    # Before the mesh, which adds to older releases of Keras what a `keras.distribution` needs.
    "DistributedFit, DataParallel": _distributed(
        strategy=lambda: keras.distribution.DataParallel(devices=[each.lower() for each in TWO])
    ),
    "DistributedFit, mesh": _distributed(mesh={"batch": 1, "model": 2}, layout="auto", devices=TWO),
}


def measured(name: str) -> dict[str, Any]:
    """The result of a case."""
    case = CASES[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"difference": case.run(case.make())}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    names = sys.argv[1:] or [*CASES]
    for name in names:
        print(json.dumps({"case": name, **measured(name)}), flush=True)


if __name__ == "__main__":
    main()
