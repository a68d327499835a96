"""Every private name of Keras and TensorFlow that the seam uses, with the modules that use it."""

from typing import NamedTuple


class Hook(NamedTuple):
    """A private name.

    Attributes:
        module: The module of Keras or TensorFlow that has it, a public one for the attributes of a public class.
        path: Its dotted path there, of which the first part is a class if there are several; empty for the module.
        users: The modules of the seam that use it.
        parameters: The parameters that it is called with.
    """

    module: str
    path: str
    users: tuple[str, ...]
    parameters: tuple[str, ...] = ()


# Names in modules, classes and `__slots__`.
HOOKS = (
    Hook("keras", "Layer._flatten_layers", ("layers", "model", "symbolic"), ("include_self",)),
    Hook("keras", "Layer._get_own_losses", ("model",)),
    Hook("keras", "Layer.losses", ("loss_sums", "own_methods")),
    Hook("keras", "Layer.metrics", ("own_logs", "own_methods")),
    Hook("keras", "Model._autoconvert_optionals", ("evaluation", "execution", "served"), ("step_func",)),
    Hook(
        "keras",
        "Model._compute_loss",
        ("evaluation", "forward", "loss_probe", "own_methods", "state_probe", "symbolic"),
        ("x", "y", "y_pred", "sample_weight", "training"),
    ),
    Hook("keras", "Model._maybe_symbolic_build", ("prepared", "served"), ("iterator", "data_batch")),
    Hook("keras", "Model._symbolic_build", ("symbolic",), ("data_batch",)),
    Hook(
        "keras",
        "Model.distribute_strategy",
        (
            "checkpoint_state",
            "evaluation",
            "execution",
            "prepared",
            "served_steps",
            "symbolic",
            "trainer",
            "uncut",
            "whole_batches",
        ),
    ),
    Hook("keras", "Model.make_predict_function", ("own_methods", "prepared", "served", "whole_batches"), ("force",)),
    Hook("keras", "Model.make_test_function", ("own_methods", "prepared", "served"), ("force",)),
    Hook("keras", "Model.make_train_function", ("checkpoint_state", "own_methods", "served", "trainer"), ("force",)),
    Hook("keras", "Optimizer._all_reduce_sum_gradients", ("apply", "observe", "telemetry_watch"), ("grads_and_vars",)),
    Hook(
        "keras",
        "Optimizer._backend_update_step",
        ("telemetry_watch",),
        ("grads", "trainable_variables", "learning_rate"),
    ),
    Hook("keras", "Optimizer._check_variables_are_known", ("optimizer",), ("variables",)),
    Hook("keras", "Optimizer._clip_gradients", ("telemetry_watch",), ("grads",)),
    Hook("keras", "Optimizer._get_variable_index", ("optimizer",), ("variable",)),
    Hook("keras", "Optimizer._overwrite_model_variables_with_average_value", ("apply",), ("trainable_variables",)),
    Hook("keras", "Optimizer._overwrite_variable_with_gradient", ("optimizer", "transform"), ("variable",)),
    Hook("keras", "Optimizer._var_key", ("optimizer",), ("variable",)),
    Hook("keras", "Variable._direct_assign", ("layers", "metric_states"), ("value",)),
    Hook("keras.src.backend", "compute_output_spec", ("symbolic",), ("fn",)),
    Hook("keras.src.backend.common.global_state", "get_global_attribute", ("data", "layers"), ("name",)),
    Hook("keras.src.backend.common.masking", "get_keras_mask", ("layers", "losses"), ("x",)),
    Hook("keras.src.backend.common.masking", "set_keras_mask", ("layers",), ("x", "mask")),
    Hook("keras.src.backend.common.symbolic_scope", "in_symbolic_scope", ("layers", "own_methods")),
    Hook("keras.src.backend.common.variables", "AutocastScope", ("layers",)),
    Hook(
        "keras.src.backend.tensorflow.trainer",
        "reduce_per_replica",
        ("execution",),
        ("values", "strategy", "reduction"),
    ),
    Hook("keras.src.layers.layer", "CallContext.get_value", ("layers",), ("arg_name",)),
    Hook("keras.src.losses.loss", "apply_mask", ("losses",), ("sample_weight", "mask", "dtype", "reduction")),
    Hook(
        "keras.src.losses.loss",
        "reduce_weighted_values",
        ("losses",),
        ("values", "sample_weight", "reduction", "dtype"),
    ),
    Hook("keras.src.losses.loss", "scale_loss_for_distribution", ("loss_scale",), ("value",)),
    Hook("keras.src.losses.loss", "squeeze_or_expand_to_same_rank", ("losses",), ("x1", "x2")),
    Hook("keras.src.losses.loss", "unscale_loss_for_distribution", ("step",), ("value",)),
    Hook("keras.src.models.functional", "", ("built_in",)),
    Hook("keras.src.models.sequential", "", ("built_in",)),
    Hook("keras.src.ops.numpy", "Add", ("built_in",)),
    Hook("keras.src.ops.numpy", "Divide", ("built_in",)),
    Hook("keras.src.ops.numpy", "Multiply", ("built_in",)),
    Hook("keras.src.ops.numpy", "Subtract", ("built_in",)),
    Hook("keras.src.saving.keras_saveable", "KerasSaveable._obj_type", ("saved",)),
    Hook("keras.src.trainers.compile_utils", "CompileLoss.Loss", ("losses",)),
    Hook("keras.src.trainers.compile_utils", "CompileLoss.build", ("losses",), ("y_true", "y_pred")),
    Hook(
        "keras.src.trainers.data_adapters",
        "get_data_adapter",
        ("data",),
        ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight"),
    ),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter", ("data",)),
    Hook("keras.src.trainers.data_adapters.array_slicing", "TensorflowSparseWrapper", ("data",)),
    Hook(
        "keras.src.trainers.data_adapters.array_slicing",
        "convert_to_sliceable",
        ("data",),
        ("arrays", "target_backend"),
    ),
    Hook("keras.src.trainers.data_adapters.array_slicing", "slice_tensorflow_sparse_wrapper", ("data",)),
    Hook(
        "keras.src.trainers.data_adapters.array_slicing",
        "train_validation_split",
        ("validation",),
        ("arrays", "validation_split"),
    ),
    Hook("keras.src.trainers.data_adapters.data_adapter", "DataAdapter.on_epoch_begin", ("data",)),
    Hook("keras.src.trainers.data_adapters.generator_data_adapter", "GeneratorDataAdapter", ("data",)),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "OrderedEnqueuer",
        ("parallel_reading",),
        ("py_dataset", "workers", "use_multiprocessing", "max_queue_size", "shuffle"),
    ),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter._finite_generator",
        ("parallel_reading",),
    ),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter._infinite_generator",
        ("parallel_reading",),
    ),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter._standardize_batch",
        ("data", "parallel_reading"),
    ),
    Hook("keras.src.utils.python_utils", "is_default", ("symbolic",), ("method",)),
    Hook("keras.src.utils.tracking", "DotNotTrackScope", ("optimizer",)),
    Hook("keras.src.utils.tracking", "no_automatic_dependency_tracking", ("optimizer",)),
    Hook("tensorflow", "__internal__.tracking.AutoTrackable", ("saved",)),
    Hook("tensorflow.core.function.polymorphism.function_cache", "FunctionCache._primary", ("telemetry_counts",)),
    Hook("tensorflow.python.data.ops.dataset_ops", "DatasetV2._inputs", ("data",)),
    Hook(
        "tensorflow.python.distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._initialize_local_devices",
        ("workers",),
        ("cluster_resolver", "worker_device"),
    ),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV1.call_for_each_replica",
        ("replicas",),
        ("fn", "args"),
    ),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV2.colocate_vars_with",
        ("saved",),
        ("colocate_with_variable",),
    ),
    Hook("tensorflow.python.distribute.distribute_lib", "StrategyExtendedV2.worker_devices", ("replicas",)),
    Hook("tensorflow.python.distribute.input_lib", "DistributedIteratorSpec._element_spec", ("telemetry_counts",)),
    Hook("tensorflow.python.distribute.input_ops", "auto_shard_dataset", ("data",)),
    Hook("tensorflow.python.distribute.values", "PerReplicaSpec._value_specs", ("telemetry_counts",)),
    Hook("tensorflow.python.eager.context", "Context.coordination_service", ("workers",)),
    Hook("tensorflow.python.eager.context", "context", ("workers",)),
    Hook("tensorflow.python.eager.polymorphic_function.attributes", "NO_INLINE", ("execution",)),
    Hook(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function._list_all_concrete_functions",
        ("telemetry_counts",),
    ),
    Hook("tensorflow.python.eager.record", "could_possibly_record", ("layers",)),
    Hook("tensorflow.python.framework.func_graph", "FuncGraph", ("uncut",), ("name",)),
    Hook("tensorflow.python.framework.ops", "gradient_registry._registry", ("gradient_functions",)),
    Hook("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext", ("layers",), ("graph",)),
)
# Attributes that the methods of a class assign. No instance is made to look for them: it would take devices, files,
# collectives or time.
ASSIGNED = (
    Hook("keras.layers", "MultiHeadAttention._attention_axes", ("built_in",)),
    Hook("keras.optimizers", "MultiOptimizer._inner_optimizers", ("optimizer",)),
    Hook("keras.src.backend.tensorflow.trainer", "TFEpochIterator._distributed_dataset", ("prepared",)),
    Hook("keras.src.trainers.epoch_iterator", "EpochIterator._num_batches", ("prepared",)),
    Hook("tensorflow.python.data.ops.readers", "FixedLengthRecordDatasetV2._filenames", ("data",)),
    Hook("tensorflow.python.data.ops.readers", "TFRecordDatasetV2._filenames", ("data",)),
    Hook("tensorflow.python.data.ops.readers", "TextLineDatasetV2._filenames", ("data",)),
    Hook(
        "tensorflow.python.distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._communication_options",
        ("replicas", "workers"),
    ),
    Hook("tensorflow.python.distribute.input_lib", "DistributedDataset._enable_get_next_as_optional", ("data",)),
    Hook(
        "tensorflow.python.distribute.input_lib",
        "DistributedDatasetsFromFunction._enable_get_next_as_optional",
        ("data",),
    ),
    Hook("tensorflow.python.distribute.mirrored_strategy", "MirroredExtended._communication_options", ("replicas",)),
)
# Attributes of instances, looked for on a small compiled and built model and what goes with it.
OF_OBJECTS = (
    Hook("keras", "Layer._call_has_training_arg", ("evaluation", "forward", "trial")),
    Hook("keras", "Layer._losses_override", ("own_methods",)),
    Hook("keras", "Layer._metrics", ("model",)),
    Hook("keras", "Layer._non_trainable_variables", ("state_probe",)),
    Hook("keras", "Model._compile_config", ("independence", "model", "own_methods", "trainer", "uncut")),
    Hook(
        "keras", "Model._compile_loss", ("loss_sums", "loss_tracking", "losses", "own_logs", "own_methods", "symbolic")
    ),
    Hook("keras", "Model._compile_metrics", ("own_methods", "symbolic")),
    Hook("keras", "Model._distribute_strategy", ("prepared",)),
    Hook("keras", "Model._initial_epoch", ("checkpoint_state",)),
    Hook("keras", "Model._jit_compile", ("own_methods",)),
    Hook("keras", "Model._loss_tracker", ("loss_sums", "loss_tracking", "own_methods", "step", "telemetry_counts")),
    Hook("keras", "Operation._inbound_nodes", ("built_in",)),
    Hook("keras", "Optimizer._distribution_strategy", ("optimizer",)),
    Hook("keras", "Optimizer._iterations", ("optimizer",)),
    Hook("keras", "Optimizer._learning_rate", ("optimizer",)),
    Hook("keras", "Optimizer._trainable_variables", ("apply", "optimizer", "telemetry_watch", "transform")),
    Hook("keras", "Optimizer._trainable_variables_indices", ("optimizer",)),
    Hook("keras", "Optimizer._variables", ("optimizer",)),
    Hook("keras", "Variable._value", ("metric_states",)),
    Hook("keras.metrics", "MeanMetricWrapper._fn", ("built_in",)),
    Hook("keras.metrics", "MeanMetricWrapper._fn_kwargs", ("losses",)),
    Hook("keras.src.losses.losses", "LossFunctionWrapper._fn_kwargs", ("losses",)),
    Hook("keras.src.trainers.compile_utils", "CompileLoss._flat_losses", ("loss_sums", "losses")),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._inputs", ("data",)),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._num_samples", ("data",)),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._shuffle", ("data",)),
    Hook("keras.src.trainers.data_adapters.generator_data_adapter", "GeneratorDataAdapter._first_batches", ("data",)),
    Hook(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function._function_cache",
        ("telemetry_counts",),
    ),
)
