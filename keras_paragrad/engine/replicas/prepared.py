"""Installs methods on one model in place of those of its class."""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.method_patch import replace_methods, restore_methods
from keras_paragrad.engine.replicas.evaluation import predict_function, test_function
from keras_paragrad.engine.replicas.parallel_reading import read_by_own_workers
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.stages import Take
from keras_paragrad.engine.step.symbolic import build_from
from keras_paragrad.engine.step.whole_batches import predict_on_batch
from keras_paragrad.storage.gathering import gather_at_calls, gather_on_read

_LOSSES = "_losses"


class _OfReplicas(collections.UserList):
    """A list with other contents in each thread, which a replica has for itself.

    Args:
        replaced: Keras's own list.
    """

    def __init__(self, replaced: list[Any]):
        self.replaced = replaced
        self._threads = threading.local()

    @property
    def data(self) -> list[Any]:  # pyright: ignore
        """Those of this thread."""
        return vars(self._threads).setdefault("own", [])

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __reduce__(self) -> Any:
        # As Keras's own, where a model is copied or pickled.
        return list, ()


def keep_apart(model: keras.Model) -> None:
    """Has each replica find the losses that it added, until `keep_together`."""
    for layer in model._flatten_layers():
        # Bypass Keras's tracking: losses are not state.
        if not isinstance(vars(layer)[_LOSSES], _OfReplicas):
            vars(layer)[_LOSSES] = _OfReplicas(vars(layer)[_LOSSES])


def keep_together(model: keras.Model) -> None:
    """Restores Keras's own lists."""
    for layer in model._flatten_layers():
        if isinstance(own := vars(layer)[_LOSSES], _OfReplicas):
            vars(layer)[_LOSSES] = own.replaced


Cut = Callable[[Any, int | None], Any]

_METHODS = ("_maybe_symbolic_build", "make_test_function", "make_predict_function", "predict_on_batch")


def spread_over_replicas(model: keras.Model, take: Take, cut: Cut | None = None) -> None:
    """Trains, evaluates and predicts a model on replicas in our way, until `uninstall`.

    Args:
        model: The model.
        take: How batches are spread over them.
        cut: What `fit` and `evaluate` have data cut up by, from Keras's adapter and the steps of an epoch to another
            adapter or `None`; Keras's way, if there is none.
    """
    builder = StepBuilder.of(model)
    if builder.stages.take == take:
        # What is compiled stays good.
        return
    builder.fill(take=take)
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    keep_apart(model)
    gather_at_calls(model)

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        # The first that Keras does with data that it is about to train or evaluate on.
        if cut and iterator is not None:
            _cut_up(iterator, cut)
        elif iterator is not None:
            read_by_own_workers(iterator.data_adapter)
        build_from(model, iterator, data_batch)
        builder.read_from(iterator)

    replace_methods(
        model,
        _maybe_symbolic_build=build,
        make_test_function=maker(model, "test_function", lambda: test_function(model, take)),
        predict_on_batch=functools.partial(predict_on_batch, model),
        make_predict_function=maker(model, "predict_function", lambda: predict_function(model, take)),
    )
    forget_functions(model)


def uninstall(model: keras.Model) -> None:
    """Uninstalls them: restores the methods of the model's class."""
    restore_methods(model, *_METHODS)
    forget_functions(model)
    gather_on_read(model)
    keep_together(model)
    StepBuilder.of(model).fill(take=None)


@contextlib.contextmanager
def distributing_by(model: Any, cut: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which data made by the model's own methods is distributed by `cut`, from a dataset to an adapter."""
    own = model.__dict__
    before = own["_distribute_strategy"]
    own["_distribute_strategy"] = _Distributes(model.distribute_strategy, cut)
    try:
        yield
    finally:
        own["_distribute_strategy"] = before


class _Distributes:
    """A strategy, with another way to distribute a dataset."""

    def __init__(self, strategy: tf.distribute.Strategy, cut: Callable[[Any], Any]):
        self._strategy = strategy
        self._cut = cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The dataset for Keras's trainer."""
        return self._cut(dataset).get_tf_dataset()


def _cut_up(iterator: Any, cut: Cut) -> None:
    adapter = cut(iterator.data_adapter, iterator.steps_per_epoch)
    if adapter is not None:
        iterator.data_adapter, iterator._num_batches = adapter, adapter.num_batches
        iterator._distributed_dataset = adapter.get_tf_dataset()


def maker(model: keras.Model, attribute: str, make: Callable[[], Any]) -> Callable[..., None]:
    def make_function(force: bool = False) -> None:
        if force or getattr(model, attribute) is None:
            setattr(model, attribute, make())

    return make_function


def forget_functions(model: Any) -> None:
    model.test_function = model.predict_function = None
