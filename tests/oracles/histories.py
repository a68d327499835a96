"""Models whose losses are divided in every way that Keras knows, and the history that one device has of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

ROWS, BATCHES = 15, (7, 7, 1)
# Those in windows of three, as accumulation cuts them up.
MICRO_BATCHES = (4, 2, 1, 3, 1, 3, 1)
TOLERANCE = 1e-6
_generator = np.random.default_rng(0)


class Case(NamedTuple):
    """A model and its data.

    Attributes:
        build: From a dictionary for `compile` to a compiled model.
        columns: Inputs, targets and perhaps sample weights.
        weighting: What the components have to be told.
        trains: Whether it can be trained in parts. It can be evaluated in any case.
    """

    build: Callable[..., keras.Model]
    columns: tuple
    weighting: str = "auto"
    trains: bool = True

    def model(self, optimizer: Any = None, **compiled: Any) -> keras.Model:
        keras.utils.set_random_seed(1)
        options = {"optimizer": optimizer or keras.optimizers.SGD(0.05), "jit_compile": False, **compiled}
        return self.build(options)

    def expected(self, epochs: int = 2, **compiled: Any) -> dict[str, list[float]]:
        """What plain Keras on one device shows of some epochs, or of an evaluation if the case can't be trained."""
        return shown_by(self, self.model(**compiled), MicroBatches(self.columns, BATCHES), epochs=epochs)


def shown_by(
    case: Case, model: keras.Model, data: Any, checked: Any = None, epochs: int = 2, **fit: Any
) -> dict[str, list[float]]:
    """The history of some epochs, or what `evaluate` finds if the case can't be trained in parts."""
    checked = MicroBatches(case.columns, BATCHES) if checked is None else checked
    if case.trains:
        return model.fit(data, epochs=epochs, verbose=0, shuffle=False, validation_data=checked, **fit).history
    found = model.evaluate(checked, verbose=0, return_dict=True)
    return {name: [value] for name, value in found.items()}


class MicroBatches(keras.utils.PyDataset):
    """The rows of a case in batches of the given sizes."""

    def __init__(self, columns: tuple, sizes: tuple[int, ...] = MICRO_BATCHES):
        super().__init__()
        self.columns, self.ends = columns, np.cumsum(sizes)

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        rows = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return keras.tree.map_structure(lambda column: column[rows], self.columns)


def defined(logs: dict[str, Any]) -> dict[str, Any]:
    """The logs whose values do not depend on how a step is traced.

    In the loss of one of several outputs, Keras 3.16.dev counts a batch by its rows until its step is traced for any
    number of them, and as one from then on.
    """
    if keras.version().split(".")[:2] < ["3", "16"]:
        return logs
    return {name: each for name, each in logs.items() if name in ("loss", "val_loss") or not name.endswith("_loss")}


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert set(found) == set(expected)
    for name, values in defined(expected).items():
        np.testing.assert_allclose(found[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def _normal(*shape: int) -> np.ndarray:
    return _generator.normal(size=(ROWS, *shape)).astype("float32")


def _positive(*shape: int) -> np.ndarray:
    return _generator.uniform(0.1, 3, (ROWS, *shape)).astype("float32")


def _tokens() -> np.ndarray:
    tokens = _generator.integers(1, 9, (ROWS, 5))
    for row in tokens:
        row[_generator.integers(1, 6) :] = 0
    return tokens


def _of_sequences(loss: Any, outputs: int = 2, regularizer: str | None = None) -> Callable[..., keras.Model]:
    def build(compiled):
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(9, 3, mask_zero=True),
                keras.layers.Dense(outputs, kernel_regularizer=regularizer),
            ]
        )
        model.compile(**{"loss": loss, **compiled})
        return model

    return build


def _dense(loss: Any, outputs: int = 2, model_class: type = keras.Sequential) -> Callable[..., keras.Model]:
    def build(compiled):
        model = model_class([keras.Input((4,)), keras.layers.Dense(outputs)])
        model.compile(**{"loss": loss, **compiled})
        return model

    return build


def _two_outputs(first: Any, second: Any, **more: Any) -> Callable[..., keras.Model]:
    def build(compiled):
        inputs = keras.Input((4,))
        outputs = [keras.layers.Dense(2, name="a")(inputs), keras.layers.Dense(3, name="b")(inputs)]
        model = keras.Model(inputs, outputs)
        model.compile(**{"loss": [first, second], "loss_weights": [0.3, 2.0], **more, **compiled})
        return model

    return build


def _squared(**options: Any) -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(**options)


def _classes(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def _one_number(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


class ReducesItself(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return _one_number(y_true, y_pred)


class ComputesLoss(keras.Sequential):
    """Adds a term that Keras does not divide by the replicas to one that it does."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))


class SumsLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.sum(keras.ops.square(y - y_pred)) + sum(map(keras.ops.sum, self.losses))


class AddsLoss(keras.layers.Layer):
    """Adds what a function makes of the squares of its inputs."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.function(keras.ops.square(inputs)))
        return inputs


def _adds_values(squares: Any) -> Any:
    return keras.ops.sum(squares, -1)


def _adding(function: Callable[[Any], Any], loss: Any, model_class: type = keras.Sequential) -> Callable[..., Any]:
    def build(compiled):
        model = model_class([keras.Input((4,)), keras.layers.Dense(2), AddsLoss(function)])
        model.compile(**{"loss": loss, **compiled})
        return model

    return build


def _cases() -> dict[str, Case]:
    tokens, labels = _tokens(), _generator.integers(0, 3, (ROWS, 5))
    # Most of the first rows of each batch are left out, so that its parts count for different numbers of elements.
    labels[_generator.integers(0, 7, ROWS) < 4, :4] = -1
    sequences, weights = (tokens, _normal(5, 2)), _positive(5)
    x, y, two = _normal(4), 3 * _normal(2), (_normal(2), 5 * _normal(3))
    wide = (_positive(), _positive())
    weighted = "mean_with_sample_weight"
    return {
        "mask": Case(_of_sequences(_squared(), regularizer="l2"), sequences),
        "mask and weights": Case(_of_sequences(_squared()), (*sequences, weights)),
        "mean of weighted mask": Case(_of_sequences(_squared(reduction=weighted)), (*sequences, weights)),
        "ignore_class": Case(_of_sequences(_classes(ignore_class=-1), 3), (tokens, labels)),
        "weights": Case(_dense(_squared(reduction=weighted)), (x, y, _positive())),
        "sum": Case(_dense(_squared(reduction="sum")), (x, y)),
        "sum of masked": Case(_of_sequences(_squared(reduction="sum")), (*sequences, weights)),
        "not reduced": Case(_dense(_squared(reduction=None)), (x, y)),
        "not reduced sequences": Case(_of_sequences(_squared(reduction="none")), sequences),
        "two outputs": Case(_two_outputs("mse", "mae"), (x, two)),
        "two weighted": Case(
            _two_outputs(_squared(reduction=weighted), _squared(reduction=weighted)), (x, two, wide), trains=False
        ),
        "two sums": Case(_two_outputs(_squared(reduction="sum"), _squared(reduction="sum")), (x, two)),
        "two not reduced": Case(_two_outputs(_squared(reduction=None), _squared(reduction=None)), (x, two)),
        "two of different kinds": Case(
            _two_outputs(_squared(reduction=weighted), _squared(reduction="sum")), (x, two, wide), trains=False
        ),
        "two ignored classes": Case(
            _two_outputs(_classes(ignore_class=0), _classes(ignore_class=1)),
            (x, tuple(_generator.integers(0, width, ROWS) for width in (2, 3))),
            trains=False,
        ),
        "one number": Case(_dense(_one_number), (x, y), "examples"),
        "loss with __call__": Case(_dense(ReducesItself()), (x, y), "examples"),
        "added values": Case(_adding(_adds_values, _squared(reduction="sum")), (x, y)),
        "added values alone": Case(_adding(_adds_values, None), (x, y)),
        "added sum": Case(_adding(keras.ops.sum, _squared(reduction="sum")), (x, y), "sum"),
        "added mean": Case(_adding(keras.ops.mean, "mse"), (x, y), "examples"),
        "compute_loss of sums": Case(_adding(_adds_values, None, SumsLoss), (x, y), "sum"),
        "compute_loss": Case(_dense("mse", model_class=ComputesLoss), (x, y), "examples"),
    }


CASES = _cases()
