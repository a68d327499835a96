"""Methods of one model, in place of those of its class."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_paragrad._keras.evaluation import predict_function, test_function
from keras_paragrad._keras.stages import Spread
from keras_paragrad._keras.symbolic import build_from
from keras_paragrad._keras.trainer import StepBuilder
from keras_paragrad._keras.whole_batches import predict_on_batch

_METHODS = ("_maybe_symbolic_build", "make_test_function", "make_predict_function", "predict_on_batch")


def spread_over_replicas(model: keras.Model, spread: Spread) -> None:
    """Trains, evaluates and predicts a model on replicas in our way, until `gather_up`."""
    builder = StepBuilder.of(model)
    if builder.spread == spread:
        # What is compiled stays good.
        return
    builder.fill(spread=spread)
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    own = model.__dict__
    own["_maybe_symbolic_build"] = lambda iterator=None, data_batch=None: build_from(model, iterator, data_batch)
    own["make_test_function"] = _maker(model, "test_function", lambda: test_function(model, spread))
    own["predict_on_batch"] = functools.partial(predict_on_batch, model)
    own["make_predict_function"] = _maker(model, "predict_function", lambda: predict_function(model, spread))
    _forget_functions(model)


def gather_up(model: keras.Model) -> None:
    """Gives a model its class's methods back."""
    for method in _METHODS:
        model.__dict__.pop(method, None)
    _forget_functions(model)
    StepBuilder.of(model).fill(spread=None)


def _maker(model: keras.Model, attribute: str, make: Callable[[], Any]) -> Callable[..., None]:
    def make_function(force: bool = False) -> None:
        if force or getattr(model, attribute) is None:
            setattr(model, attribute, make())

    return make_function


def _forget_functions(model: Any) -> None:
    model.test_function = model.predict_function = None
