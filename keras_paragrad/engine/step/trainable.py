"""Which layers and weights a compiled model trains."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.capabilities import updating
from keras_paragrad.compat.method_patch import MethodPatch, patch_of, patched
from keras_paragrad.compat.model import all_layers


class Trainable(NamedTuple):
    """The `trainable` of a model's layers, outermost first, and of its weights.

    Keras goes by those of the moment in which a step is traced: `compile` or a forced trace makes others count.
    """

    layers: list[tuple[keras.layers.Layer, bool]]
    weights: list[tuple[keras.Variable, bool]]

    @classmethod
    def of(cls, model: keras.Model) -> "Trainable":
        """Those of now."""
        layers = [model, *all_layers(model)]
        return cls(
            [(layer, bool(layer.trainable)) for layer in layers],
            [(weight, bool(weight.trainable)) for weight in model.weights],
        )

    @classmethod
    def by_optimizer(cls, model: Any) -> "Trainable":
        """Those of when the optimizer was built for the model, which a step of Keras's was traced with."""
        now, built_for = cls.of(model), {id(weight) for weight in updating(model.optimizer)._trainable_variables}
        if built_for == {id(weight) for weight in model.trainable_weights}:
            return now
        layers = [(layer, _trains(layer, built_for, flag)) for layer, flag in now.layers]
        return cls(layers, [(weight, id(weight) in built_for) for weight, _ in now.weights])

    def assign(self) -> None:
        """Sets them; a layer's reaches what is in it, which is set after it."""
        for owner, flag in (*self.layers, *self.weights):
            owner.trainable = flag

    @property
    def changed(self) -> bool:
        """Whether they have been changed since."""
        return any(owner.trainable != flag for owner, flag in (*self.layers, *self.weights))


def _trains(layer: keras.layers.Layer, built_for: set[int], flag: bool) -> bool:
    found = [weight for each in layer._flatten_layers() for weight in each._trainable_variables]
    return any(id(weight) in built_for for weight in found) if found else flag


class _TrainableAsTraced(MethodPatch):
    def __init__(self, model: keras.Model, before: Trainable):
        super().__init__()
        self.before, self.now = before, Trainable.of(model)

    def patch_all(self) -> None:
        self.before.assign()

    def put_back(self) -> None:
        super().put_back()
        self.now.assign()


@contextlib.contextmanager
def traced_as(model: keras.Model, trainable: Trainable | None) -> Iterator[None]:
    """While a step is traced in it, trains what an earlier trace trained; entered on every replica."""
    if model.run_eagerly or trainable is None or not (patch_of(model, _TrainableAsTraced) or trainable.changed):
        yield
        return
    with patched(model, lambda: _TrainableAsTraced(model, trainable)):
        yield
