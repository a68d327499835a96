"""Models on replicas that were built or compiled as they can't be trained exactly."""

import inspect
import warnings
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import accumulating, nested
from keras_paragrad.compat.running import fit_frame
from keras_paragrad.compat.state import state_of

_MIRRORED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
)


def check_compiled_in_scope(model: Any) -> None:
    """Refuses a model that has variables on all replicas, and an optimizer or metrics that were made elsewhere.

    Raises:
        ValueError: The message says what to write.
    """
    if not isinstance(model.distribute_strategy, _MIRRORED):
        return
    # Keras's accumulation computes its count.
    counters = [each.iterations for each in nested(model.optimizer) if isinstance(each.iterations, keras.Variable)]
    variables = [*counters, *model.metrics_variables]
    if not all(isinstance(variable.value, tf.distribute.DistributedValues) for variable in variables):
        raise ValueError(
            f"{model.name!r} was built within a scope and compiled outside of it, so that its optimizer or metrics are "
            "on one device. Write `with dist.scope(): model.compile(...)`, and create the optimizer and metrics there "
            "as well, also in a callback."
        )


def warn_of_unprepared(strategy: Any) -> None:
    """Has a strategy warn once if a model is trained on its replicas in Keras's way, without having been prepared."""
    if strategy.num_replicas_in_sync == 1 or state_of(strategy).warns:
        return
    distribute = strategy.experimental_distribute_dataset

    def distribute_dataset(dataset: Any, options: Any = None) -> Any:
        frame = fit_frame(inspect.currentframe())
        model = frame and frame.f_locals["self"]
        # Any component that prepares a model builds its train function; an accumulating optimizer is exact without.
        if model and "make_train_function" not in vars(model) and accumulating(model.optimizer) is None:
            del vars(strategy)["experimental_distribute_dataset"]
            warnings.warn(
                f"{model.name!r} was built within `with dist.scope():` and not prepared, so its fit is Keras's own: "
                "each replica's gradient counts the same and is clipped by itself, which differs from one device. "
                "Write dist.fit(model, ...) or, before model.fit(...), dist.prepare(model).",
                stacklevel=2,
            )
        return distribute(dataset, options)

    state_of(strategy).warns = True
    vars(strategy)["experimental_distribute_dataset"] = distribute_dataset
