"""Installs methods on one model that train, evaluate and predict on replicas."""

import collections
import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.data import Adapter, EpochIterator, check_is_batched
from keras_paragrad.compat.model import fit_frame
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.private import PyDatasetAdapter
from keras_paragrad.compat.state import Slot, replace_methods, restore_methods, warn
from keras_paragrad.compat.types import Batch, Dataset, Structure
from keras_paragrad.engine.batches.replica_batch import divide_batch
from keras_paragrad.engine.replicas.evaluation import build_predict_function, build_test_function
from keras_paragrad.engine.step.building import build_from_data
from keras_paragrad.engine.step.stages import Take
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage.gathering import gather_at_calls, gather_on_read

_LOSSES = "_losses"
# Whether a strategy warns of an unprepared `fit`.
_WARNS = Slot[bool]("warns", False)


class _ListPerThread(collections.UserList[Any]):
    """A list with other contents in each thread, and so for each replica. `replaced` is Keras's list."""

    def __init__(self, replaced: list[tf.Tensor]):
        self.replaced = replaced
        self._threads = threading.local()

    @property
    def data(self) -> list[tf.Tensor]:  # pyright: ignore
        """The contents in this thread."""
        return vars(self._threads).setdefault("data", [])

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copied or pickled model gets a plain list, as a new model has.
        return list, ()


def separate_added_losses(model: keras.Model) -> None:
    """Keeps the losses that layers add on each replica apart, until `join_added_losses`."""
    for layer in model._flatten_layers():
        # Bypass Keras's tracking: losses are not state.
        if not isinstance(vars(layer)[_LOSSES], _ListPerThread):
            vars(layer)[_LOSSES] = _ListPerThread(vars(layer)[_LOSSES])


def join_added_losses(model: keras.Model) -> None:
    """Restores Keras's lists."""
    for layer in model._flatten_layers():
        if isinstance(losses := vars(layer)[_LOSSES], _ListPerThread):
            vars(layer)[_LOSSES] = losses.replaced


# Maps Keras's data adapter and an epoch's number of steps to another adapter, or to `None` to keep Keras's.
Distribute = Callable[[Adapter, int | None], Adapter | None]

_METHODS = ("_maybe_symbolic_build", "make_test_function", "make_predict_function", "predict_on_batch")


def install_on_replicas(model: keras.Model, take: Take, distribute: Distribute | None = None) -> None:
    """Makes a model's `fit`, `evaluate` and `predict` exact on replicas, until `uninstall_from_replicas`.

    `take` fills the *take* stage, which divides batches among replicas and combines their logs. `distribute` divides
    the data of `fit` and `evaluate` among workers; `None` leaves that to Keras.
    """
    builder = StepBuilder.of(model)
    if builder.stages.take == take:
        # Compiled functions stay valid.
        return
    builder.fill(take=take)
    if model.distribute_strategy.num_replicas_in_sync == 1 and not take.ordered:
        return
    separate_added_losses(model)
    gather_at_calls(model)

    def build(iterator: EpochIterator | None = None, data_batch: Batch = None) -> None:
        # Keras calls this before it reads the data.
        if distribute and iterator is not None:
            _distribute_data(iterator, distribute)
        elif iterator is not None:
            use_enqueuer_per_iterator(iterator.data_adapter)
        build_from_data(model, iterator, data_batch)
        builder.read_from(iterator)

    replace_methods(
        model,
        _maybe_symbolic_build=build,
        make_test_function=make_on_demand(model, "test_function", lambda: build_test_function(model, take)),
        predict_on_batch=functools.partial(_predict_on_batch, model),
        make_predict_function=make_on_demand(model, "predict_function", lambda: build_predict_function(model, take)),
    )
    drop_functions(model)


def _predict_on_batch(model: keras.Model, x: Structure) -> Structure:
    model.make_predict_function()
    outputs = model.predict_function([divide_batch(model.distribute_strategy, (x,))])
    return keras.tree.map_structure(
        lambda output: output if isinstance(output, (tf.SparseTensor, tf.RaggedTensor)) else output.numpy(), outputs
    )


def uninstall_from_replicas(model: keras.Model) -> None:
    """Restores the methods of the model's class."""
    restore_methods(model, *_METHODS)
    drop_functions(model)
    gather_on_read(model)
    join_added_losses(model)
    StepBuilder.of(model).fill(take=None)


@contextlib.contextmanager
def distributing_datasets_with(model: keras.Model, distribute: Callable[[Dataset], Adapter]) -> Generator[None]:
    """Context in which the model's methods distribute datasets by `distribute`, which maps them to adapters."""
    before = model.__dict__["_distribute_strategy"]
    model.__dict__["_distribute_strategy"] = _StrategyWithDatasets(model.distribute_strategy, distribute)
    try:
        yield
    finally:
        model.__dict__["_distribute_strategy"] = before


class _StrategyWithDatasets:
    """A strategy with a custom `experimental_distribute_dataset`."""

    def __init__(self, strategy: tf.distribute.Strategy, distribute: Callable[[Dataset], Adapter]):
        self._strategy, self._distribute = strategy, distribute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Dataset:
        return self._distribute(dataset).get_tf_dataset()


def _distribute_data(iterator: Any, distribute: Distribute) -> None:
    """Makes an iterator of Keras's read from the adapter that `distribute` returns, if any."""
    adapter = distribute(iterator.data_adapter, iterator.steps_per_epoch)
    if adapter is not None:
        iterator.data_adapter, iterator._num_batches = adapter, adapter.num_batches
        iterator._distributed_dataset = adapter.get_tf_dataset()


def make_on_demand(model: keras.Model, attribute: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., None]:
    """A method that sets a function of a model unless it is set, as Keras's `make_test_function` does."""

    def make_function(force: bool = False) -> None:
        if force or getattr(model, attribute) is None:
            setattr(model, attribute, make())

    return make_function


def drop_functions(model: keras.Model) -> None:
    """Makes the model build its test and predict functions again."""
    model.test_function = model.predict_function = None


def use_enqueuer_per_iterator(adapter: Adapter) -> None:
    """Gives each iterator over a `PyDataset` with several workers an enqueuer of its own.

    Keras shares one enqueuer among all iterators, and stops it at the end of an epoch. With `steps_per_epoch`, an
    iterator goes on in the next epoch. A dataset on replicas prefetches, and may find the enqueuer stopped: "Iterator
    called after `on_epoch_end`", and batches change their order.
    """
    if not isinstance(adapter, PyDatasetAdapter) or adapter.enqueuer is None:
        return
    dataset, shuffle, enqueuer_class = adapter.py_dataset, adapter.shuffle, type(adapter.enqueuer)

    def batches() -> Generator[Batch]:
        # A copy keeps the adapter's epoch number, by which Keras 3.16 shuffles.
        reader = copy.copy(adapter)
        reader.enqueuer = enqueuer_class(
            dataset, dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size, shuffle
        )
        try:
            yield from type(adapter)._get_iterator(reader)
        finally:
            reader.enqueuer.stop()

    adapter.enqueuer = None
    adapter._get_iterator = batches


def warn_if_unprepared(strategy: tf.distribute.Strategy) -> None:
    """Makes a strategy warn once, if an unprepared model is trained on its replicas."""
    if strategy.num_replicas_in_sync == 1 or _WARNS.of(strategy):
        return
    distribute = strategy.experimental_distribute_dataset

    def distribute_dataset(dataset: Dataset, options: tf.distribute.InputOptions | None = None) -> Any:
        frame = fit_frame(inspect.currentframe())
        model = frame and frame.f_locals["self"]
        # All components that prepare a model install this method; an accumulating optimizer is exact without it.
        if model and "make_train_function" not in vars(model) and find_accumulator(model.optimizer) is None:
            del vars(strategy)["experimental_distribute_dataset"]
            warn(
                f"{model.name!r} was built within `with dist.scope():` and not prepared, so its fit is Keras's own: "
                "each replica's gradient counts the same and is clipped separately, which differs from one device. "
                "Write dist.fit(model, ...) or, before model.fit(...), dist.prepare(model).",
            )
        if model:
            check_is_batched(model, dataset.element_spec)
        return distribute(dataset, options)

    _WARNS.attach(strategy, True)
    vars(strategy)["experimental_distribute_dataset"] = distribute_dataset
