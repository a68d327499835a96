"""Queries about a model: its layers, metrics and `trainable` flags, what it overrides, whether its `fit` is running."""

import contextlib
import decimal
import re
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.layers import outermost_layer
from keras_paragrad.compat.optimizer import held_optimizers, innermost_optimizer, updating_optimizers
from keras_paragrad.compat.state import MethodPatch, patch_of, patched, warn
from keras_paragrad.compat.types import Batch, StepLogs

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
# Models that have added losses of several values and none of one value.
_ADDS_VALUES: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


# The name that `keras.random.SeedGenerator` gives its state.
SEED_STATE = "seed_generator_state"


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == SEED_STATE


def all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The model's layers at every depth."""
    return model._flatten_layers(include_self=False)


def check_no_row_states(model: keras.Model, parts: str, instead: str) -> None:
    """Refuses layers with a state for each row of a batch, such as `LSTM(stateful=True)`.

    For the message, `parts` is what passes parts of a batch, with its verb, and `instead` is what to write.
    """
    stateful = next((layer for layer in all_layers(model) if getattr(layer, "stateful", False)), None)
    if stateful is not None:
        raise ValueError(
            f"{type(stateful).__name__}(stateful=True), {stateful.name!r}, keeps a state for each row of a batch, and "
            f"{parts} parts of it. Write stateful=False, or {instead}."
        )


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of the model and all layers; `metrics` may be overridden to omit some."""
    return [metric for layer in model._flatten_layers() for metric in layer._metrics]


def other_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers not passed to Keras's `compile`: attributes of the model and its layers, also in lists."""
    known = {id(inner) for inner in held_optimizers(model.optimizer)}
    values = [
        value
        for layer in (model, *all_layers(model))
        for name, value in vars(layer).items()
        if not name.startswith("_") and isinstance(value, (keras.optimizers.Optimizer, list, tuple, dict))
    ]
    optimizers = {
        id(value): value for value in keras.tree.flatten(values) if isinstance(value, keras.optimizers.Optimizer)
    }
    return [inner for key, inner in optimizers.items() if key not in known]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """A model's optimizers: the compiled one, and the ones that its own `train_step` calls."""
    return [*([] if model.optimizer is None else [model.optimizer]), *other_optimizers(model)]


def count_after(tensors: Sequence[tf.Tensor]) -> None:
    """Makes the running model's optimizers count an update only after these tensors are computed.

    TensorFlow inlines Keras's step, whose counter would advance for a batch that turns out not to exist. It orders the
    counter's read here before its assignment.
    """
    model: Any = outermost_layer()
    if not isinstance(model, keras.Model) or not model.compiled:
        return
    if tf.executing_eagerly() or "make_train_function" in vars(model):
        # This package's steps are never inlined.
        return
    with tf.control_dependencies([tensor for tensor in tensors if tf.is_tensor(tensor)]):
        for outer in optimizers_of(model):
            for optimizer in updating_optimizers(outer):
                # Under Keras's own accumulation, the property reads the counter, and isn't a variable.
                tf.convert_to_tensor(optimizer.iterations)


def step_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that a custom step may update, including metrics that an overridden `metrics` property omits."""
    metrics = [*model.metrics, *keras.Model.metrics.fget(model), *all_metrics(model)]  # pyright: ignore
    return list({id(metric): metric for metric in metrics}.values())


def all_variables(model: keras.layers.Layer) -> list[keras.Variable]:
    """The variables that a call of a model or layer, its loss and its metrics may assign to."""
    metrics = [*all_metrics(model), *getattr(model, "metrics", ())]
    variables = [*model.variables, *(variable for metric in metrics for variable in metric.variables)]
    return list({id(variable): variable for variable in variables}.values())


def added_losses(model: keras.Model) -> list[tf.Tensor]:
    """The losses that layers added in this step, unreduced and without weight regularizers."""
    return added_losses_of([model])


def added_losses_of(layers: Iterable[keras.layers.Layer]) -> list[tf.Tensor]:
    """The losses that some layers and their sublayers added in this step."""
    return [loss for layer in layers for inner in layer._flatten_layers() for loss in inner._get_own_losses()]


def summed_by_keras(model: keras.Model) -> list[bool]:
    """For each added loss, whether it has several values, such as one per example, which Keras sums.

    In a batch of one example, the losses of earlier steps tell a value per example from a mean.
    """
    losses = added_losses(model)
    several = [loss.shape.num_elements() != 1 for loss in losses]
    if losses and all(several):
        _ADDS_VALUES.add(model)
    return several if model not in _ADDS_VALUES else [loss.shape.rank > 0 for loss in losses]


def overrides_compute_loss(model: keras.Model) -> bool:
    """Whether the model overrides `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss or "compute_loss" in model.__dict__


def may_choose_xla(model: keras.Model) -> bool:
    """Whether a model was compiled with `jit_compile="auto"`, and XLA can compile its layers."""
    check_internals("models")
    jit_compile = model._compile_config.config.get("jit_compile", "auto")
    return jit_compile == "auto" and layer_without_xla(model) is None


def layer_without_xla(model: keras.Model) -> keras.layers.Layer | None:
    """A layer that XLA can't compile, if there is one: an LSTM that cuDNN runs, for example."""
    return next((layer for layer in model._flatten_layers() if not layer.supports_jit), None)


def compile_if_supported(model: keras.Model, jit_compile: bool) -> bool:
    """`jit_compile`, or False with a warning if XLA can't compile the model, as `Model.compile` does."""
    layer = layer_without_xla(model) if jit_compile else None
    if layer is not None:
        warn(f"XLA can't compile {type(layer).__name__} {layer.name!r}, so jit_compile=True is ignored. Remove it.")
    return jit_compile and layer is None


def percent(error: float) -> str:
    """A relative error in percent, with two digits: 3.1%, 120%, 0.00026%."""
    return f"{decimal.Decimal(f'{100 * error:.1e}'):f}%"


def overrides_fit(model: keras.Model) -> bool:
    """Whether the model's class overrides `fit`, and so may preprocess the data."""
    return type(model).fit is not keras.Model.fit


def overrides_predict(model: keras.Model) -> bool:
    """Whether the model's class overrides `predict`, and so may preprocess the data."""
    return type(model).predict is not keras.Model.predict


def overrides_train_step(model: keras.Model) -> bool:
    """Whether the model has a custom training step."""
    return type(model).train_step is not keras.Model.train_step or "train_step" in model.__dict__


def train_step_of(model: keras.Model) -> Callable[[Batch], StepLogs]:
    """A model's `train_step`, without the `tf.function` that it may be decorated with."""
    decorated = type(model).__dict__.get("train_step")
    function = getattr(decorated, "python_function", None)
    if function is None or "train_step" in vars(model):
        return model.train_step
    return types.MethodType(tf.autograph.to_graph(function), model)


def overrides_test_step(model: keras.Model) -> bool:
    """Whether the model has a custom evaluation step."""
    return type(model).test_step is not keras.Model.test_step or "test_step" in model.__dict__


def overrides_predict_step(model: keras.Model) -> bool:
    """Whether the model has a custom prediction step."""
    return type(model).predict_step is not keras.Model.predict_step or "predict_step" in model.__dict__


def words_of(error: BaseException) -> str:
    """An error's message, without the terminal styles that Keras adds."""
    return _STYLES.sub("", str(error))


def compile_config(model: keras.Model) -> object:
    """An object that each `compile` replaces, to recognize a new one."""
    check_internals("models")
    return model._compile_config


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of `compile`, by name."""
    check_internals("models")
    return dict(model._compile_config.config)


def fit_frame(frame: types.FrameType | None, model: keras.Model | None = None) -> types.FrameType | None:
    """The innermost call of `fit` among a frame and its callers, of the given model or of any; `None` without one."""
    while frame is not None:
        if frame.f_code.co_name == "fit":
            owner = frame.f_locals.get("self")
            if owner is model if model is not None else isinstance(owner, keras.Model):
                return frame
        frame = frame.f_back
    return None


def begins_epoch(frame: types.FrameType | None, model: keras.Model) -> bool:
    """Whether Keras's `fit` or `evaluate` of the model, among a frame and its callers, is at an epoch's first step."""
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name in ("fit", "evaluate") and names.get("self") is model and "begin_step" in names:
            return names["begin_step"] == 0
        frame = frame.f_back
    return False


def has_evaluated(model: keras.Model) -> bool:
    """Whether Keras's own `test_step` has seen a row since the metrics were reset; true for another `test_step`."""
    return overrides_test_step(model) or float(model._loss_tracker.count) > 0


class Trainable(NamedTuple):
    """The `trainable` flags of a model's layers, outermost first, and of its weights.

    Keras reads them while a step is traced: later changes take effect with `compile` or a forced trace.
    """

    layers: list[tuple[keras.layers.Layer, bool]]
    weights: list[tuple[keras.Variable, bool]]

    @classmethod
    def of(cls, model: keras.Model) -> "Trainable":
        """The current flags."""
        layers = [model, *all_layers(model)]
        return cls(
            [(layer, bool(layer.trainable)) for layer in layers],
            [(weight, bool(weight.trainable)) for weight in model.weights],
        )

    @classmethod
    def by_optimizer(cls, model: keras.Model) -> "Trainable":
        """The flags from when the optimizer was built, with which Keras's step was traced."""
        now = cls.of(model)
        built_for = {id(weight) for weight in innermost_optimizer(model.optimizer)._trainable_variables}
        if built_for == {id(weight) for weight in model.trainable_weights}:
            return now
        layers = [(layer, _trains(layer, built_for, flag)) for layer, flag in now.layers]
        return cls(layers, [(weight, id(weight) in built_for) for weight, _ in now.weights])

    def assign(self) -> None:
        """Sets the flags. Setting a layer's flag also sets its sublayers', which come after it."""
        for owner, flag in (*self.layers, *self.weights):
            owner.trainable = flag

    @property
    def changed(self) -> bool:
        """Whether the flags have changed since."""
        return any(owner.trainable != flag for owner, flag in (*self.layers, *self.weights))


def _trains(layer: keras.layers.Layer, built_for: set[int], flag: bool) -> bool:
    """Whether the optimizer was built for a weight of a layer; `flag` for a layer without weights."""
    weights = [weight for inner in layer._flatten_layers() for weight in inner._trainable_variables]
    return any(id(weight) in built_for for weight in weights) if weights else flag


class _TrainableAsTraced(MethodPatch):
    """Sets the flags of an earlier trace until the last replica leaves, and the current ones again."""

    def __init__(self, model: keras.Model, before: Trainable):
        super().__init__()
        self.before, self.now = before, Trainable.of(model)

    def patch_all(self) -> None:
        self.before.assign()

    def restore(self) -> None:
        super().restore()
        self.now.assign()


@contextlib.contextmanager
def traced_as(model: keras.Model, trainable: Trainable | None) -> Generator[None]:
    """Context in which a step is traced with the flags of an earlier trace; entered on every replica."""
    # If another replica has set the flags already, they look unchanged.
    if model.run_eagerly or trainable is None or not (patch_of(model, _TrainableAsTraced) or trainable.changed):
        yield
        return
    with patched(model, lambda: _TrainableAsTraced(model, trainable)):
        yield
