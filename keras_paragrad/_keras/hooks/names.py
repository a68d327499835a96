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
    Hook(
        "keras",
        "Layer._flatten_layers",
        ("objects.layers", "objects.model", "step.symbolic", "storage.gathering"),
        ("include_self",),
    ),
    Hook("keras", "Layer._get_own_losses", ("objects.model",)),
    Hook("keras", "Layer.losses", ("losses.sums", "objects.own_methods")),
    Hook("keras", "Layer.metrics", ("losses.own_logs", "objects.own_methods")),
    Hook(
        "keras",
        "Model._autoconvert_optionals",
        ("parameter_servers.model", "replicas.evaluation", "step.execution"),
        ("step_func",),
    ),
    Hook(
        "keras",
        "Model._compute_loss",
        (
            "mesh.comparing",
            "objects.own_methods",
            "probes.losses",
            "probes.states",
            "replicas.evaluation",
            "step.forward",
            "step.symbolic",
        ),
        ("x", "y", "y_pred", "sample_weight", "training"),
    ),
    Hook(
        "keras",
        "Model._maybe_symbolic_build",
        ("parameter_servers.model", "replicas.prepared"),
        ("iterator", "data_batch"),
    ),
    Hook("keras", "Model._symbolic_build", ("step.symbolic",), ("data_batch",)),
    Hook(
        "keras",
        "Model.distribute_strategy",
        (
            "objects.checkpoint_state",
            "parameter_servers.steps",
            "replicas.evaluation",
            "replicas.prepared",
            "step.builder",
            "step.execution",
            "step.symbolic",
            "step.uncut",
            "step.whole_batches",
        ),
    ),
    Hook(
        "keras",
        "Model.make_predict_function",
        ("mesh.running", "objects.own_methods", "parameter_servers.model", "replicas.prepared", "step.whole_batches"),
        ("force",),
    ),
    Hook(
        "keras",
        "Model.make_test_function",
        ("mesh.running", "objects.own_methods", "parameter_servers.model", "replicas.prepared"),
        ("force",),
    ),
    Hook(
        "keras",
        "Model.make_train_function",
        ("objects.checkpoint_state", "objects.own_methods", "parameter_servers.model", "step.builder"),
        ("force",),
    ),
    Hook(
        "keras",
        "Optimizer._all_reduce_sum_gradients",
        ("step.apply", "telemetry.observe", "telemetry.watch"),
        ("grads_and_vars",),
    ),
    Hook(
        "keras",
        "Optimizer._backend_update_step",
        ("storage.updating", "telemetry.watch"),
        ("grads", "trainable_variables", "learning_rate"),
    ),
    Hook("keras", "Optimizer._check_variables_are_known", ("objects.optimizer",), ("variables",)),
    Hook("keras", "Optimizer._clip_gradients", ("storage.updating", "telemetry.watch"), ("grads",)),
    Hook("keras", "Optimizer._get_variable_index", ("objects.optimizer",), ("variable",)),
    Hook("keras", "Optimizer._overwrite_model_variables_with_average_value", ("step.apply",), ("trainable_variables",)),
    Hook(
        "keras", "Optimizer._overwrite_variable_with_gradient", ("objects.optimizer", "step.transform"), ("variable",)
    ),
    Hook(
        "keras",
        "Optimizer._update_model_variables_moving_average",
        ("storage.updating",),
        ("trainable_variables",),
    ),
    Hook(
        "keras",
        "Optimizer._var_key",
        ("mesh.placing", "objects.optimizer", "pipeline.placement", "storage.resharding", "storage.updating"),
        ("variable",),
    ),
    Hook("keras", "Variable._direct_assign", ("objects.layers", "parameter_servers.metric_states"), ("value",)),
    Hook(
        "keras",
        "Variable._initialize",
        ("mesh.placing", "objects.unallocated", "pipeline.placement", "storage.resharding"),
        ("value",),
    ),
    Hook("keras", "Variable._initialize_with_initializer", ("objects.unallocated",), ("initializer",)),
    Hook("keras.src.backend", "compute_output_spec", ("step.symbolic",), ("fn",)),
    Hook(
        "keras.src.backend.common.global_state", "get_global_attribute", ("objects.data", "objects.layers"), ("name",)
    ),
    Hook("keras.src.backend.common.masking", "get_keras_mask", ("losses.terms", "objects.layers"), ("x",)),
    Hook("keras.src.backend.common.masking", "set_keras_mask", ("objects.layers",), ("x", "mask")),
    Hook("keras.src.backend.common.global_state", "set_global_attribute", ("objects.layers",), ("name", "value")),
    Hook("keras.src.backend.common.stateless_scope", "in_stateless_scope", ("step.recompute", "storage.gathering")),
    Hook(
        "keras.src.backend.common.symbolic_scope",
        "in_symbolic_scope",
        (
            "mesh.dtensor",
            "mesh.pinning",
            "objects.layers",
            "objects.own_methods",
            "storage.gathering",
            "storage.sharded",
        ),
    ),
    Hook("keras.src.backend.common.variables", "AutocastScope", ("objects.layers",)),
    Hook("keras.src.backend.common.variables", "get_autocast_scope", ("objects.layers", "storage.sharded")),
    Hook(
        "keras.src.backend.tensorflow.trainer",
        "reduce_per_replica",
        ("step.execution",),
        ("values", "strategy", "reduction"),
    ),
    Hook("keras.src.backend.tensorflow", "distribution_lib", ("mesh.tracing",)),
    Hook("keras.src.layers.layer", "CallContext.get_value", ("objects.layers",), ("arg_name",)),
    Hook("keras.src.losses.loss", "apply_mask", ("losses.terms",), ("sample_weight", "mask", "dtype", "reduction")),
    Hook(
        "keras.src.losses.loss",
        "reduce_weighted_values",
        ("losses.terms",),
        ("values", "sample_weight", "reduction", "dtype"),
    ),
    Hook("keras.src.losses.loss", "scale_loss_for_distribution", ("losses.undivided",), ("value",)),
    Hook("keras.src.losses.loss", "squeeze_or_expand_to_same_rank", ("losses.terms",), ("x1", "x2")),
    Hook("keras.src.losses.loss", "unscale_loss_for_distribution", ("step.gradient",), ("value",)),
    Hook("keras.src.models.functional", "", ("probes.built_in",)),
    Hook(
        "keras.src.models.functional",
        "Functional._run_through_graph",
        ("step.segments",),
        ("inputs", "operation_fn", "call_fn"),
    ),
    Hook("keras.src.models.sequential", "", ("probes.built_in",)),
    Hook("keras.src.ops.numpy", "Add", ("probes.built_in",)),
    Hook("keras.src.ops.numpy", "Divide", ("probes.built_in",)),
    Hook("keras.src.ops.numpy", "Multiply", ("probes.built_in",)),
    Hook("keras.src.ops.numpy", "Subtract", ("probes.built_in",)),
    Hook("keras.src.ops.symbolic_arguments", "SymbolicArguments.fill_in", ("step.segments",), ("tensor_dict",)),
    Hook("keras.src.saving.keras_saveable", "KerasSaveable._obj_type", ("objects.saved",)),
    Hook("keras.src.trainers.compile_utils", "CompileLoss.Loss", ("losses.terms",)),
    Hook("keras.src.trainers.compile_utils", "CompileLoss.build", ("losses.terms",), ("y_true", "y_pred")),
    Hook(
        "keras.src.trainers.data_adapters",
        "get_data_adapter",
        ("objects.data",),
        ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight"),
    ),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter", ("objects.data",)),
    Hook("keras.src.trainers.data_adapters.array_slicing", "TensorflowSparseWrapper", ("objects.data",)),
    Hook(
        "keras.src.trainers.data_adapters.array_slicing",
        "convert_to_sliceable",
        ("objects.data",),
        ("arrays", "target_backend"),
    ),
    Hook("keras.src.trainers.data_adapters.array_slicing", "slice_tensorflow_sparse_wrapper", ("objects.data",)),
    Hook(
        "keras.src.trainers.data_adapters.array_slicing",
        "train_validation_split",
        ("objects.data",),
        ("arrays", "validation_split"),
    ),
    Hook("keras.src.trainers.data_adapters.data_adapter", "DataAdapter.on_epoch_begin", ("objects.data",)),
    Hook("keras.src.trainers.data_adapters.generator_data_adapter", "GeneratorDataAdapter", ("objects.data",)),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "OrderedEnqueuer",
        ("replicas.parallel_reading",),
        ("py_dataset", "workers", "use_multiprocessing", "max_queue_size", "shuffle"),
    ),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter._finite_generator",
        ("replicas.parallel_reading",),
    ),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter._infinite_generator",
        ("replicas.parallel_reading",),
    ),
    Hook(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter._standardize_batch",
        ("objects.data", "replicas.parallel_reading"),
    ),
    Hook("keras.src.utils.python_utils", "is_default", ("step.symbolic",), ("method",)),
    Hook("keras.src.utils.tracking", "DotNotTrackScope", ("objects.optimizer",)),
    Hook("keras.src.utils.tracking", "no_automatic_dependency_tracking", ("objects.optimizer",)),
    Hook("tensorflow", "__internal__.tracking.AutoTrackable", ("objects.saved",)),
    Hook("tensorflow.core.function.polymorphism.function_cache", "FunctionCache._primary", ("telemetry.counts",)),
    Hook("tensorflow.python.data.ops.dataset_ops", "DatasetV2._inputs", ("objects.data",)),
    Hook(
        "tensorflow.python.distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._initialize_local_devices",
        ("replicas.workers",),
        ("cluster_resolver", "worker_device"),
    ),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV1.call_for_each_replica",
        ("replicas.collectives",),
        ("fn", "args"),
    ),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV2.colocate_vars_with",
        ("objects.saved",),
        ("colocate_with_variable",),
    ),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV2.worker_devices",
        ("replicas.collectives", "storage.exchange"),
    ),
    Hook(
        "tensorflow.python.distribute.distribute_lib",
        "StrategyExtendedV2.update",
        ("storage.updating",),
        ("var", "fn", "args", "group"),
    ),
    Hook("tensorflow.python.distribute.distribute_lib", "get_update_replica_id", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.input_lib", "DistributedIteratorSpec._element_spec", ("telemetry.counts",)),
    Hook("tensorflow.python.distribute.input_ops", "auto_shard_dataset", ("objects.data",)),
    Hook(
        "tensorflow.python.distribute.mirrored_strategy",
        "MirroredExtended._create_variable",
        ("storage.creation",),
        ("next_creator",),
    ),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._dense_var_to_tensor", ("storage.sharded",)),
    Hook(
        "tensorflow.python.distribute.values",
        "DistributedVariable._export_to_saved_model_graph",
        ("storage.sharded",),
    ),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._get", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._get_cross_replica", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._primary", ("storage.sharded",)),
    Hook(
        "tensorflow.python.distribute.values",
        "DistributedVariable._update_cross_replica",
        ("storage.sharded",),
        ("update_fn", "value"),
    ),
    Hook(
        "tensorflow.python.distribute.values",
        "DistributedVariable._update_replica",
        ("storage.sharded",),
        ("update_fn", "value"),
    ),
    Hook("tensorflow.python.distribute.values", "DistributedVariable", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "PerReplica", ("storage.exchange",)),
    Hook("tensorflow.python.distribute.values_util", "get_current_replica_id_as_int", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "PerReplicaSpec._value_specs", ("telemetry.counts",)),
    Hook("tensorflow.python.eager.context", "Context.coordination_service", ("replicas.workers",)),
    Hook(
        "tensorflow.python.eager.context",
        "Context.wait_at_barrier",
        ("replicas.workers",),
        ("barrier_id", "timeout_in_ms"),
    ),
    Hook("tensorflow.python.eager.context", "context", ("replicas.workers",)),
    Hook("tensorflow.python.eager.polymorphic_function.attributes", "NO_INLINE", ("step.execution",)),
    Hook(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function._list_all_concrete_functions",
        ("telemetry.counts",),
    ),
    Hook("tensorflow.python.eager.record", "could_possibly_record", ("objects.layers",)),
    Hook("tensorflow.experimental", "dtensor", ("mesh.dtensor",)),
    Hook("tensorflow", "Graph._get_function", ("step.operations", "step.stateful_ops"), ("name",)),
    Hook("tensorflow.python.framework.func_graph", "FuncGraph", ("objects.unallocated", "step.uncut"), ("name",)),
    Hook("tensorflow.python.framework.ops", "Operation._update_input", ("storage.regathering",), ("index", "tensor")),
    Hook("tensorflow.python.framework.ops", "gradient_registry._registry", ("step.gradient_functions",)),
    Hook(
        "tensorflow.python.ops.resource_variable_ops",
        "ResourceVariable._read_variable_op",
        ("mesh.dtensor",),
        ("no_copy",),
    ),
    Hook("tensorflow.python.ops.resource_variable_ops", "UninitializedVariable", ("objects.unallocated",)),
    Hook("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext", ("objects.layers",), ("graph",)),
)
# Attributes that the methods of a class assign. No instance is made to look for them: it would take devices, files,
# collectives or time.
ASSIGNED = (
    Hook("keras.distribution", "ModelParallel._layout_map", ("mesh.tracing",)),
    Hook("keras.layers", "MultiHeadAttention._attention_axes", ("probes.built_in",)),
    Hook("keras.optimizers", "MultiOptimizer._inner_optimizers", ("objects.optimizer",)),
    Hook("keras.optimizers", "Optimizer._accumulated_gradients", ("objects.unallocated",)),
    Hook(
        "keras.optimizers",
        "Optimizer._model_variables_moving_average",
        ("objects.unallocated", "storage.updating"),
    ),
    Hook("keras.src.backend.tensorflow.trainer", "TFEpochIterator._distributed_dataset", ("replicas.prepared",)),
    Hook("keras.src.models.functional", "Functional._inputs_struct", ("step.example",)),
    Hook("keras.src.ops.function", "Function._nodes_by_depth", ("step.segments",)),
    Hook("keras.src.ops.function", "Function._outputs_struct", ("step.segments",)),
    Hook("keras.src.trainers.epoch_iterator", "EpochIterator._num_batches", ("replicas.prepared",)),
    Hook("tensorflow.python.data.ops.readers", "FixedLengthRecordDatasetV2._filenames", ("objects.data",)),
    Hook("tensorflow.python.data.ops.readers", "TFRecordDatasetV2._filenames", ("objects.data",)),
    Hook("tensorflow.python.data.ops.readers", "TextLineDatasetV2._filenames", ("objects.data",)),
    Hook(
        "tensorflow.python.distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended._communication_options",
        ("replicas.collectives", "replicas.workers"),
    ),
    Hook(
        "tensorflow.python.distribute.input_lib", "DistributedDataset._enable_get_next_as_optional", ("objects.data",)
    ),
    Hook(
        "tensorflow.python.distribute.input_lib",
        "DistributedDatasetsFromFunction._enable_get_next_as_optional",
        ("objects.data",),
    ),
    Hook(
        "tensorflow.python.distribute.mirrored_strategy",
        "MirroredExtended._communication_options",
        ("replicas.collectives",),
    ),
    Hook("tensorflow.python.distribute.values", "DistributedValues._values", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._distribute_strategy", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._packed_var", ("storage.sharded",)),
    Hook("tensorflow.python.distribute.values", "DistributedVariable._policy", ("storage.creation",)),
)
# Attributes of instances, looked for on a small compiled and built model and what goes with it.
OF_OBJECTS = (
    Hook(
        "keras",
        "Layer._call_has_training_arg",
        ("mesh.comparing", "probes.trial", "replicas.evaluation", "step.forward"),
    ),
    Hook("keras", "Layer._losses_override", ("objects.own_methods",)),
    Hook("keras", "Layer._metrics", ("objects.model",)),
    Hook("keras", "Layer._non_trainable_variables", ("probes.states",)),
    Hook(
        "keras",
        "Model._compile_config",
        ("objects.model", "objects.own_methods", "probes.independence", "step.builder", "step.uncut"),
    ),
    Hook(
        "keras",
        "Model._compile_loss",
        (
            *("losses.own_logs", "losses.sums", "losses.terms", "losses.tracking", "objects.own_methods"),
            *("step.symbolic", "step.tracing"),
        ),
    ),
    Hook("keras", "Model._compile_metrics", ("objects.own_methods", "step.symbolic", "step.tracing")),
    Hook("keras", "Model._distribute_strategy", ("replicas.prepared",)),
    Hook("keras", "Model._initial_epoch", ("objects.checkpoint_state",)),
    Hook("keras", "Model._jit_compile", ("objects.own_methods",)),
    Hook(
        "keras",
        "Model._loss_tracker",
        ("losses.sums", "losses.tracking", "objects.own_methods", "step.gradient", "telemetry.counts"),
    ),
    Hook("keras", "Layer._trainable_variables", ("storage.gathering",)),
    Hook("keras", "Operation._inbound_nodes", ("probes.built_in",)),
    Hook("keras", "Optimizer._distribution_strategy", ("objects.optimizer", "storage.updating")),
    Hook("keras", "Optimizer._iterations", ("objects.optimizer",)),
    Hook("keras", "Optimizer._learning_rate", ("objects.optimizer", "objects.unallocated")),
    Hook(
        "keras",
        "Optimizer._trainable_variables",
        ("objects.optimizer", "step.apply", "step.transform", "storage.updating", "telemetry.watch"),
    ),
    Hook("keras", "Optimizer._trainable_variables_indices", ("objects.optimizer",)),
    Hook("keras", "Optimizer._variables", ("objects.optimizer",)),
    Hook("keras", "Sequential._functional", ("step.example", "step.segments")),
    Hook("keras", "Variable._autocast", ("storage.gathering",)),
    Hook("keras", "Variable._dtype", ("objects.unallocated", "step.tracing")),
    Hook("keras", "Variable._shape", ("objects.unallocated",)),
    Hook(
        "keras",
        "Variable._value",
        ("mesh.placing", "objects.unallocated", "parameter_servers.metric_states", "step.tracing", "storage.sharded"),
    ),
    Hook("keras.metrics", "MeanMetricWrapper._fn", ("probes.built_in",)),
    Hook("keras.metrics", "MeanMetricWrapper._fn_kwargs", ("losses.terms",)),
    Hook("keras.src.losses.losses", "LossFunctionWrapper._fn_kwargs", ("losses.terms",)),
    Hook("keras.src.trainers.compile_utils", "CompileLoss._flat_losses", ("losses.sums", "losses.terms")),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._inputs", ("objects.data",)),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._num_samples", ("objects.data",)),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._shuffle", ("objects.data",)),
    Hook(
        "keras.src.trainers.data_adapters.generator_data_adapter",
        "GeneratorDataAdapter._first_batches",
        ("objects.data",),
    ),
    Hook(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function._function_cache",
        ("telemetry.counts",),
    ),
)
