"""Optimizers that hand gradients to optimizers of their own, on replicas and beside one device."""

import keras
import numpy as np
import pytest
from keras import layers
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation
from keras_paragrad.compat.optimizer import held_optimizers

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Split(keras.optimizers.Optimizer):
    """Updates the first two weights by one optimizer, and the others by another."""

    def __init__(self, first, second):
        super().__init__(learning_rate=0.0)
        self.hold(first, second)

    def hold(self, first, second):
        self.one, self.two = first, second

    def held(self):
        return self.one, self.two

    def build(self, variables):
        if not self.built:
            super().build(variables)
            for each, part in zip(self.held(), (variables[:2], variables[2:]), strict=True):
                each.build(part)

    def apply(self, grads, trainable_variables=None):
        variables, grads = list(trainable_variables or self._trainable_variables), list(grads)
        first, second = self.held()
        first.apply(grads[:2], variables[:2])
        second.apply(grads[2:], variables[2:])
        self.iterations.assign_add(1)


class Holder:
    def __init__(self, held):
        self.by_name = {"first": held[0], "others": [held[1]]}


class Apart(Split):
    def hold(self, first, second):
        self.holder = Holder((first, second))

    def held(self):
        return self.holder.by_name["first"], *self.holder.by_name["others"]


class Hidden(Split):
    def hold(self, first, second):
        self.held = lambda: (first, second)


class Slow(keras.optimizers.Optimizer):
    """Moves weights half of the way that another optimizer takes."""

    def __init__(self, fast):
        super().__init__(learning_rate=0.0)
        self.fast = fast

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.fast.build(variables)

    def apply(self, grads, trainable_variables=None):
        variables = list(trainable_variables or self._trainable_variables)
        before = [variable + 0.0 for variable in variables]
        self.fast.apply(grads, variables)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(0.5 * (variable + value))
        self.iterations.assign_add(1)


class Shrinking(keras.optimizers.SGD):
    """Halves weights at the end of `fit`, and not where averages replace them."""

    def finalize_variable_values(self, var_list):
        super().finalize_variable_values(var_list)
        for variable in var_list:
            variable.assign(0.5 * variable)


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


MADE = {
    "a closure": lambda: Hidden(sgd(), sgd()),
    "attributes": lambda: Split(sgd(clipnorm=0.5), sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1)),
    "none, averaged": lambda: Shrinking(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1),
    "another object": lambda: Apart(sgd(), sgd(global_clipnorm=0.5)),
    "deep, scaled": lambda: keras.optimizers.LossScaleOptimizer(Slow(Split(sgd(), Slow(sgd()))), 8.0),
}


def trained(case, dist=None, *, steps=1, callbacks=()):
    keras.utils.set_random_seed(1)
    with dist.scope() if dist else keras.name_scope("alone"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
        optimizer = MADE[case]()
        if steps > 1:
            optimizer, callbacks = AccumulatingOptimizer(optimizer, steps), [ExactAccumulation(), *callbacks]
        model.compile(optimizer, "mse", jit_compile=False)
    if dist:
        dist.prepare(model)
    model.fit(X, Y, batch_size=8 // steps, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.few(0, "a closure")
@pytest.mark.own_process
@pytest.mark.parametrize("case", MADE)
def test_the_outermost_reduces_once(case):
    expected = trained(case)
    for steps in (1, 2) if case == "another object" else (1,):
        found = trained(case, DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False), steps=steps)
        assert largest_difference(found, expected) < 1e-6, steps


@pytest.mark.own_process
def test_the_outermost_alone_accumulates_on_replicas():
    MADE["accumulating"] = lambda: Split(AccumulatingOptimizer(sgd(), 2), sgd())
    with pytest.raises(ValueError, match=r"^split hands.*to accumulating_optimizer.*AccumulatingOptimizer\(split, st"):
        trained("accumulating", DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False))


def test_they_are_found_whatever_holds_them():
    first, second = sgd(), sgd()
    for held in (Split(first, second), Apart(first, second)):
        assert held_optimizers(held) == [held, first, second]
    outer = AccumulatingOptimizer(Slow(Split(first, second)), 2)
    assert held_optimizers(outer) == [outer, outer.inner_optimizer, outer.inner_optimizer.fast, first, second]
