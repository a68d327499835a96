"""The private hooks the package stands on, and the releases that are known to have them."""

import importlib
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

KNOWN_TO_WORK = "keras 3.15 with tensorflow 2.21"


class Hook(NamedTuple):
    """A private name: the module it lives in, its dotted path there, and the parameters it is called with."""

    module: str
    path: str
    parameters: tuple[str, ...] = ()


HOOKS = (
    Hook("keras.src.optimizers.optimizer", "Optimizer._all_reduce_sum_gradients", ("grads_and_vars",)),
    Hook("keras.src.optimizers.optimizer", "Optimizer._clip_gradients", ("grads",)),
    Hook(
        "keras.src.optimizers.optimizer",
        "Optimizer._backend_update_step",
        ("grads", "trainable_variables", "learning_rate"),
    ),
    Hook("keras.src.optimizers.optimizer", "Optimizer._var_key", ("variable",)),
    Hook("keras.src.optimizers.optimizer", "Optimizer._get_variable_index", ("variable",)),
    Hook("keras.src.optimizers.optimizer", "Optimizer._check_variables_are_known", ("variables",)),
    Hook("keras.src.optimizers.optimizer", "Optimizer._overwrite_variable_with_gradient", ("variable",)),
    Hook("keras.src.saving.keras_saveable", "KerasSaveable._obj_type"),
    Hook("keras.src.utils.tracking", "DotNotTrackScope"),
    Hook("keras.src.utils.tracking", "no_automatic_dependency_tracking"),
    Hook("keras.src.losses.loss", "scale_loss_for_distribution", ("value",)),
    Hook("keras.src.losses.loss", "unscale_loss_for_distribution", ("value",)),
    Hook("keras.src.backend.common.masking", "get_keras_mask", ("x",)),
    Hook("keras.src.backend.common.masking", "set_keras_mask", ("x", "mask")),
    Hook("keras.src.backend.common.global_state", "get_global_attribute", ("name",)),
    Hook("keras.src.ops.numpy", "Add"),
    Hook("keras.src.backend.common.symbolic_scope", "in_symbolic_scope"),
    Hook("keras.src.backend.common.variables", "AutocastScope"),
    Hook("keras.src.backend.tensorflow.core", "Variable._direct_assign", ("value",)),
    Hook("keras.src.layers.layer", "CallContext.get_value", ("arg_name",)),
    Hook("tensorflow.python.eager.record", "could_possibly_record"),
    Hook("tensorflow.python.framework.func_graph", "FuncGraph", ("name",)),
    Hook("tensorflow.python.framework.ops", "gradient_registry._registry"),
    Hook("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext", ("graph",)),
    Hook("keras.src.losses.loss", "apply_mask", ("sample_weight", "mask", "dtype", "reduction")),
    Hook("keras.src.losses.loss", "reduce_weighted_values", ("values", "sample_weight", "reduction", "dtype")),
    Hook("keras.src.losses.loss", "squeeze_or_expand_to_same_rank", ("x1", "x2")),
    Hook("keras.src.trainers.compile_utils", "CompileLoss.Loss"),
    Hook("keras.src.trainers.compile_utils", "CompileLoss.build", ("y_true", "y_pred")),
    Hook("keras.src.trainers.trainer", "Trainer._compute_loss", ("x", "y", "y_pred", "sample_weight", "training")),
    Hook("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer.make_train_function", ("force",)),
    Hook("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer._autoconvert_optionals", ("step_func",)),
    Hook("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer.distribute_strategy"),
    Hook("keras.src.backend.tensorflow.trainer", "reduce_per_replica", ("values", "strategy", "reduction")),
    Hook("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer._maybe_symbolic_build", ("iterator", "data_batch")),
    Hook("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer.make_test_function", ("force",)),
    Hook("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer.make_predict_function", ("force",)),
    Hook("keras.src.trainers.trainer", "Trainer._symbolic_build", ("data_batch",)),
    Hook("keras.src.backend.tensorflow.trainer", "TFEpochIterator"),
    Hook("keras.src.backend", "compute_output_spec", ("fn",)),
    Hook("keras.src.utils.python_utils", "is_default", ("method",)),
    Hook(
        "keras.src.trainers.data_adapters",
        "get_data_adapter",
        ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight"),
    ),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter"),
    Hook("keras.src.trainers.data_adapters.array_slicing", "TensorflowSparseWrapper"),
    Hook("keras.src.trainers.data_adapters.array_slicing", "convert_to_sliceable", ("arrays", "target_backend")),
    Hook("keras.src.trainers.data_adapters.array_slicing", "slice_tensorflow_sparse_wrapper"),
    Hook("keras.src.trainers.data_adapters.array_slicing", "train_validation_split", ("arrays", "validation_split")),
    Hook("keras.src.trainers.data_adapters.data_adapter", "DataAdapter.on_epoch_begin"),
    Hook("keras.src.trainers.data_adapters.generator_data_adapter", "GeneratorDataAdapter"),
    Hook("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter._standardize_batch"),
    Hook("keras.src.layers.layer", "Layer._get_own_losses"),
    Hook("keras.src.layers.layer", "Layer.losses"),
    Hook("keras.src.layers.layer", "Layer.metrics"),
    Hook("keras.src.layers.layer", "Layer._flatten_layers", ("include_self",)),
    Hook("tensorflow.python.distribute.distribute_lib", "StrategyExtendedV1.call_for_each_replica", ("fn", "args")),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV2.colocate_vars_with",
        ("colocate_with_variable",),
    ),
    Hook(
        "tensorflow.python.distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._initialize_local_devices",
        ("cluster_resolver", "worker_device"),
    ),
    Hook("tensorflow.python.distribute.input_ops", "auto_shard_dataset"),
    Hook(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function._list_all_concrete_functions",
    ),
    Hook("tensorflow", "__internal__.tracking.AutoTrackable"),
)


def check_hooks(hooks: Iterable[Hook] = HOOKS) -> None:
    """Raises one `ImportError` naming every hook that the installed Keras and TensorFlow lack.

    Args:
        hooks: The hooks to look for; all that the package uses, unless told.

    Raises:
        ImportError: A hook is missing or takes other parameters, or Keras runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"keras_paragrad works on Keras's TensorFlow backend, and this Keras runs on {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=tensorflow in the environment before the first `import keras`."
        )
    missing = [problem for hook in hooks if (problem := _problem(hook))]
    if missing:
        raise ImportError(
            f"keras_paragrad cannot work with the installed keras {keras.__version__} and tensorflow "
            f"{tf.__version__}: {'; '.join(missing)}. Known to work: {KNOWN_TO_WORK}. "
            "Install those, or a keras_paragrad that knows these versions."
        )


def _problem(hook: Hook) -> str | None:
    try:
        found: Any = importlib.import_module(hook.module)
        for name in hook.path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return f"{hook.module}:{hook.path} is missing"
    if not hook.parameters:
        return None
    parameters = inspect.signature(found).parameters
    absent = [name for name in hook.parameters if name not in parameters]
    return f"{hook.module}:{hook.path} no longer takes {', '.join(absent)}" if absent else None
