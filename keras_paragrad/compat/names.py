"""Every private name of Keras and TensorFlow that the package uses, by the part of the package that needs it.

A component looks for the names of its parts when it is made: `check.check_internals("models", "steps")`.
"""

from typing import NamedTuple


class Hook(NamedTuple):
    """A private name.

    Attributes:
        module: Its module in Keras or TensorFlow; for attributes of a public class, the public module.
        path: Its dotted path in the module, which starts with a class if it has several parts; empty for the module.
        parameters: The parameters that it is called with.
        assigned: Whether it is an attribute of instances, which a method of the class assigns.
        optional: Whether the package also works with releases without it.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    assigned: bool = False
    optional: bool = False


def _assigned(module: str, path: str) -> Hook:
    return Hook(module, path, assigned=True)


NAMES: dict[str, tuple[Hook, ...]] = {
    # Used by every component: a model, its layers, losses and metrics.
    "models": (
        Hook("keras", "Layer._flatten_layers", ("include_self",)),
        Hook("keras", "Layer._get_own_losses"),
        Hook("keras", "Model._compute_loss", ("x", "y", "y_pred", "sample_weight", "training")),
        Hook("keras", "Variable._direct_assign", ("value",)),
        Hook("keras.src.backend", "compute_output_spec", ("fn",)),
        Hook("keras.src.backend.common.global_state", "GLOBAL_STATE_TRACKER"),
        Hook("keras.src.backend.common.masking", "get_keras_mask", ("x",)),
        Hook("keras.src.backend.common.masking", "set_keras_mask", ("x", "mask")),
        Hook("keras.src.backend.common.stateless_scope", "get_stateless_scope"),
        Hook("keras.src.backend.common.symbolic_scope", "in_symbolic_scope"),
        Hook("keras.src.backend.common.variables", "AutocastScope"),
        Hook("keras.src.backend.common.variables", "get_autocast_scope"),
        Hook("keras.src.layers.layer", "CallContext.get_value", ("arg_name",)),
        Hook("keras.src.losses.loss", "apply_mask", ("sample_weight", "mask", "dtype", "reduction")),
        Hook("keras.src.trainers.compile_utils", "CompileLoss.build", ("y_true", "y_pred")),
        Hook("sys", "_current_frames"),
        Hook("tensorflow", "Graph._get_function", ("name",)),
        Hook("tensorflow.python.eager.record", "could_possibly_record"),
        Hook("tensorflow.python.framework.func_graph", "FuncGraph", ("name",)),
        Hook("tensorflow.python.framework.ops", "gradient_registry._registry"),
        Hook("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext", ("graph",)),
        _assigned("keras", "Layer._losses"),
        _assigned("keras", "Layer._metrics"),
        _assigned("keras", "Layer._non_trainable_variables"),
        # Releases without `keras.RematScope` lack it.
        Hook("keras", "Layer._remat_mode", assigned=True, optional=True),
        _assigned("keras", "Layer._trainable_variables"),
        _assigned("keras", "Model._compile_config"),
        _assigned("keras", "Model._compile_loss"),
        _assigned("keras", "Model._compile_metrics"),
        _assigned("keras", "Model._loss_tracker"),
        _assigned("keras", "Operation._inbound_nodes"),
        _assigned("keras", "Optimizer._trainable_variables"),
        _assigned("keras", "Variable._dtype"),
        _assigned("keras", "Variable._value"),
        _assigned("keras.metrics", "MeanMetricWrapper._fn"),
        _assigned("keras.metrics", "MeanMetricWrapper._fn_kwargs"),
        _assigned("keras.src.losses.losses", "LossFunctionWrapper._fn_kwargs"),
        _assigned("keras.src.trainers.compile_utils", "CompileLoss._flat_losses"),
    ),
    # This package's steps, in place of Keras's.
    "steps": (
        Hook("keras", "Model._autoconvert_optionals", ("step_func",), optional=True),
        Hook("keras", "Model._maybe_symbolic_build", ("iterator", "data_batch")),
        Hook("keras", "Model._symbolic_build", ("data_batch",)),
        Hook("keras", "Optimizer._all_reduce_sum_gradients", ("grads_and_vars",)),
        Hook("keras", "Optimizer._backend_update_step", ("grads", "trainable_variables", "learning_rate")),
        Hook("keras", "Optimizer._clip_gradients", ("grads",)),
        Hook("keras", "Optimizer._update_model_variables_moving_average", ("trainable_variables",)),
        Hook("keras", "Optimizer._var_key", ("variable",)),
        Hook("keras.src.backend.common.symbolic_scope", "SymbolicScope"),
        Hook("keras.src.backend.tensorflow.trainer", "reduce_per_replica", ("values", "strategy", "reduction")),
        Hook("tensorflow.python.distribute.values", "PerReplicaSpec._value_specs"),
        Hook("tensorflow.python.eager.polymorphic_function.attributes", "NO_INLINE"),
        Hook("tensorflow.python.eager.record", "stop_recording"),
        _assigned("keras", "Model._distribute_strategy"),
        _assigned("keras", "Optimizer._learning_rate"),
    ),
    # Optimizers that wrap another one.
    "accumulation": (
        Hook("keras", "Optimizer._check_variables_are_known", ("variables",)),
        Hook("keras.src.saving.keras_saveable", "KerasSaveable._obj_type"),
        Hook("keras.src.utils.tracking", "DotNotTrackScope"),
        Hook("tensorflow.python.trackable.base", "Trackable._update_uid"),
        Hook("keras.optimizers", "MultiOptimizer._inner_optimizers", assigned=True, optional=True),
        _assigned("keras", "Optimizer._distribution_strategy"),
        _assigned("keras", "Optimizer._iterations"),
        _assigned("keras", "Optimizer._trainable_variables_indices"),
        _assigned("keras", "Optimizer._variables"),
    ),
    # Models that train another model's layers.
    "wrapping": (
        Hook("keras", "Model._assert_compile_called", ("method_name",)),
        _assigned("keras", "Layer._losses_override"),
        _assigned("keras", "Model._jit_compile"),
    ),
    # Functional and Sequential models, cut into parts.
    "segments": (
        Hook("keras.src.models.functional", "Functional._run_through_graph", ("inputs", "operation_fn", "call_fn")),
        Hook("keras.src.ops.symbolic_arguments", "SymbolicArguments.fill_in", ("tensor_dict",)),
        _assigned("keras.src.ops.function", "Function._nodes_by_depth"),
        _assigned("keras", "Sequential._functional"),
    ),
    # Variables without memory, to be counted.
    "memory": (
        Hook("keras", "Variable._initialize", ("value",)),
        Hook("keras", "Variable._initialize_with_initializer", ("initializer",)),
        Hook("tensorflow.python.ops.resource_variable_ops", "UninitializedVariable"),
        _assigned("keras.optimizers", "Optimizer._accumulated_gradients"),
        _assigned("keras.optimizers", "Optimizer._model_variables_moving_average"),
    ),
    # The data of `fit`.
    "data": (
        Hook(
            "keras.src.trainers.data_adapters",
            "get_data_adapter",
            ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight"),
        ),
        Hook("keras.src.trainers.data_adapters.array_slicing", "TensorflowSparseWrapper"),
        Hook("keras.src.trainers.data_adapters.array_slicing", "convert_to_sliceable", ("arrays", "target_backend")),
        Hook("keras.src.trainers.data_adapters.array_slicing", "slice_tensorflow_sparse_wrapper"),
        Hook(
            "keras.src.trainers.data_adapters.array_slicing", "train_validation_split", ("arrays", "validation_split")
        ),
        Hook("keras.src.trainers.data_adapters.data_adapter", "DataAdapter"),
        Hook("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter._standardize_batch"),
        Hook("tensorflow.python.data.ops.dataset_ops", "DatasetV2._inputs"),
        _assigned("tensorflow.python.data.ops.batch_op", "_BatchDataset._batch_size"),
        _assigned("tensorflow.python.data.ops.batch_op", "_ParallelBatchDataset._batch_size"),
        _assigned("tensorflow.python.data.ops.rebatch_op", "_RebatchDataset._batch_sizes"),
        _assigned("tensorflow.python.distribute.input_lib", "DistributedDataset._enable_get_next_as_optional"),
        _assigned(
            "tensorflow.python.distribute.input_lib", "DistributedDatasetsFromFunction._enable_get_next_as_optional"
        ),
        _assigned("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._inputs"),
        _assigned("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._shuffle"),
        _assigned("keras.src.trainers.data_adapters.generator_data_adapter", "GeneratorDataAdapter._first_batches"),
    ),
    # `MirroredStrategy` and other replicas.
    "replicas": (
        Hook("keras.layers", "BatchNormalization._moments", ("inputs", "mask")),
        Hook("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter._get_iterator"),
        _assigned("keras.src.backend.tensorflow.trainer", "TFEpochIterator._distributed_dataset"),
        _assigned("keras.src.trainers.epoch_iterator", "EpochIterator._num_batches"),
        _assigned(
            "tensorflow.python.distribute.collective_all_reduce_strategy",
            "CollectiveAllReduceExtended._communication_options",
        ),
        _assigned("tensorflow.python.distribute.mirrored_strategy", "MirroredExtended._communication_options"),
        Hook("tensorflow.python.distribute.values", "PerReplica"),
    ),
    # Several processes.
    "workers": (
        Hook(
            "tensorflow.python.distribute.collective_all_reduce_strategy",
            "CollectiveAllReduceExtended._initialize_local_devices",
            ("cluster_resolver", "worker_device"),
        ),
        Hook(
            "tensorflow.python.distribute.collective_all_reduce_strategy",
            "CollectiveAllReduceStrategy._collective_key_base",
        ),
        Hook("tensorflow.python.eager.context", "Context.coordination_service"),
        Hook("tensorflow.python.eager.context", "Context.wait_at_barrier", ("barrier_id", "timeout_in_ms")),
        Hook("tensorflow.python.eager.context", "context"),
    ),
    # Variables in shards.
    "shards": (
        Hook("keras", "Optimizer._apply_weight_decay", ("variables",)),
        Hook("keras", "Optimizer._backend_apply_gradients", ("grads", "trainable_variables")),
        Hook("keras", "Optimizer._backend_increment_gradient_accumulators", ("grads", "acc_grads")),
        Hook("keras", "Optimizer._clip_by_norm", ("values", "axes")),
        Hook("keras", "Optimizer._distributed_tf_update_step", ("distribution", "grads_and_vars", "learning_rate")),
        Hook("tensorflow.python.distribute.distribute_lib", "get_update_replica_id"),
        Hook("tensorflow.python.distribute.mirrored_strategy", "MirroredExtended._create_variable", ("next_creator",)),
        Hook("tensorflow.python.distribute.values", "DistributedVariable._dense_var_to_tensor"),
        Hook("tensorflow.python.distribute.values", "DistributedVariable._export_to_saved_model_graph"),
        Hook("tensorflow.python.distribute.values", "DistributedVariable._get"),
        Hook(
            "tensorflow.python.distribute.values", "DistributedVariable._update_cross_replica", ("update_fn", "value")
        ),
        Hook("tensorflow.python.distribute.values", "DistributedVariable._update_replica", ("update_fn", "value")),
        Hook("tensorflow.python.distribute.values_util", "get_current_replica_id_as_int"),
        Hook("tensorflow.python.framework.ops", "Operation._update_input", ("index", "tensor")),
        _assigned("tensorflow.python.distribute.values", "DistributedVariable._policy"),
    ),
    # DTensor.
    "meshes": (
        Hook("keras.src.backend.tensorflow", "distribution_lib"),
        Hook("tensorflow.dtensor.python.api", "_dtensor_singleton"),
        Hook("tensorflow.python.ops.resource_variable_ops", "BaseResourceVariable._read_variable_op", ("no_copy",)),
        Hook(
            "tensorflow.python.ops.resource_variable_ops",
            "BaseResourceVariable._restore_from_tensors",
            ("restored_tensors",),
        ),
        Hook("tensorflow.python.ops.resource_variable_ops", "BaseResourceVariable._serialize_to_tensors"),
        Hook("tensorflow.python.ops.resource_variable_ops", "BaseResourceVariable._strided_slice_assign"),
        _assigned("keras.distribution", "ModelParallel._layout_map"),
    ),
    # Stages on separate devices.
    "pipelines": (
        Hook(
            "tensorflow.python.eager.record",
            "record_operation_backprop_only",
            ("op_type", "output_tensors", "input_tensors", "backward_function"),
        ),
    ),
    # The traces of a `tf.function`.
    "traced functions": (
        Hook("tensorflow.python.distribute.input_lib", "DistributedIteratorSpec._element_spec"),
        Hook(
            "tensorflow.python.eager.polymorphic_function.polymorphic_function", "Function._list_all_concrete_functions"
        ),
    ),
    # Where `fit` resumes.
    "backups": (_assigned("keras", "Model._initial_epoch"),),
}
HOOKS = tuple(hook for hooks in NAMES.values() for hook in hooks)
