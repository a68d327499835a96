"""Which callbacks can shape the computation, and so have to be the same on all workers.

A callback that only displays, writes or measures may be on one worker only, or differ. The rule:

- Keras's `History`, `ProgbarLogger`, `CSVLogger` and `RemoteMonitor` can't; `TensorBoard` can if it reads weights
  (`histogram_freq`, `embeddings_freq`), which takes all workers. Keras's other callbacks can, `LambdaCallback`
  depending on its functions.
- This package's can, except `Throughput` and `Profiler`.
- A custom one can if its code, or that of a function passed to it, sets an attribute of anything but itself
  (`self.model.stop_training = True`), or calls one of `CHANGES`. Other functions that it calls are not inspected; their
  effect is detected at the end of an epoch.

For those that can, workers compare the class, its code and the public attributes of plain types. Paths, `verbose`, and
attributes whose names begin with an underscore may differ.
"""

from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import keras

from keras_paragrad.distribution.alike.code import attributes_set_on_others, codes_of_class, is_of_a_library, names_in
from keras_paragrad.distribution.alike.values import Entries, attributes_of, entries_of, kind_of

# These change weights or the order of data, or take all workers.
CHANGES = frozenset(
    {
        *("assign", "assign_add", "assign_sub", "scatter_update", "set_weights", "load_weights", "set_value"),
        *("setattr", "__setattr__", "apply_gradients", "train_on_batch", "evaluate", "predict", "test_on_batch"),
    }
)
_ONLY_SHOW = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
_OURS_THAT_ONLY_SHOW = ("Throughput", "Profiler", "ScratchDirectory", "FollowEpochs", "AgreeEachEpoch")
_BATCH_HOOKS = {
    "stop_training": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "stop_evaluating": ("on_test_batch_begin", "on_test_batch_end"),
}


def can_shape(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback can change what is computed; see this module's rule."""
    kind = type(callback)
    if isinstance(callback, _ONLY_SHOW) or kind.__name__ in _OURS_THAT_ONLY_SHOW:
        return False
    if isinstance(callback, keras.callbacks.TensorBoard):
        reads_weights = bool(getattr(callback, "histogram_freq", 0) or getattr(callback, "embeddings_freq", 0))
        return reads_weights or any(map(_changes, codes_of_class(kind)))
    base = next(base for base in kind.__mro__ if is_of_a_library(base))
    if base not in (keras.callbacks.Callback, keras.callbacks.LambdaCallback):
        return True
    return any(map(_changes, _codes(callback)))


def callback_entries(callbacks: Iterable[keras.callbacks.Callback]) -> Entries:
    """The callbacks that can shape the computation, in their order."""
    shaping = [callback for callback in callbacks if can_shape(callback)]
    yield "callbacks that can change the training", ", ".join(map(kind_of, shaping)) or "none"
    seen: dict[str, int] = {}
    for callback in shaping:
        name = type(callback).__name__
        seen[name] = seen.get(name, 0) + 1
        path = name if seen[name] == 1 else f"{name} {seen[name]}"
        yield from entries_of(path, attributes_of(callback))


def stops_within(callbacks: Sequence[keras.callbacks.Callback], flag: str) -> bool:
    """Whether a callback's batch hooks mention `stop_training` or `stop_evaluating`, and so may stop between batches.

    `TerminateOnNaN` doesn't count: it goes by the loss, which is the same on all workers.
    """
    return any(flag in names_in(code) for callback in callbacks for code in _batch_codes(callback, _BATCH_HOOKS[flag]))


def _batch_codes(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> list[CodeType]:
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return _codes(callback)
    overridden = any(
        not is_of_a_library(base) and any(hook in vars(base) for hook in hooks) for base in type(callback).__mro__
    )
    # A hook may call another of the callback's methods, which stops.
    return _codes(callback) if overridden else []


def _codes(callback: keras.callbacks.Callback) -> list[CodeType]:
    """The code of a custom callback and of the functions passed to it."""
    own = [function for value in vars(callback).values() for function in _functions(value)]
    return [*codes_of_class(type(callback)), *(function.__code__ for function in own)]


def _functions(value: Any) -> list[FunctionType]:
    function = value.__func__ if isinstance(value, MethodType) else value
    return [function] if isinstance(function, FunctionType) and not is_of_a_library(function) else []


def _changes(code: CodeType) -> bool:
    return bool(attributes_set_on_others(code) or names_in(code) & CHANGES)
