"""Exact, fast parallel gradients for `model.fit`: plugins for Keras 3 on TensorFlow."""

from typing import TYPE_CHECKING

from keras_paragrad.cli import is_command as _is_command
from keras_paragrad.exports import lazily as _lazily

if TYPE_CHECKING or not _is_command():
    import keras_paragrad.compat  # noqa: F401  (checks the installed Keras and TensorFlow before anything else)

    # Keras can deserialize these classes only once they are imported. Commands don't need them, and importing
    # TensorFlow takes seconds.
    from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer as AccumulatingOptimizer
    from keras_paragrad.per_example.wrapped_model import wrap as wrap
    from keras_paragrad.per_example.wrapper import PerExampleGradients as PerExampleGradients

if TYPE_CHECKING:
    from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation as ExactAccumulation
    from keras_paragrad.accumulation.slices import microbatch as microbatch
    from keras_paragrad.distribution.checkpoint.backup import Backup as Backup
    from keras_paragrad.distribution.fit import DistributedFit as DistributedFit
    from keras_paragrad.distribution.pipeline.pipeline import Pipeline as Pipeline
    from keras_paragrad.inputs.attribution import integrated_gradients as integrated_gradients
    from keras_paragrad.inputs.gradients import hessian_vector_product as hessian_vector_product
    from keras_paragrad.inputs.gradients import input_gradients as input_gradients
    from keras_paragrad.inputs.jacobian import input_jacobian as input_jacobian
    from keras_paragrad.memory.batch_size import find_batch_size as find_batch_size
    from keras_paragrad.memory.estimate import estimate_memory as estimate_memory
    from keras_paragrad.memory.recomputation import recompute as recompute
    from keras_paragrad.per_example.example_gradients import ExampleGradients as ExampleGradients
    from keras_paragrad.per_example.functional import per_example_gradients as per_example_gradients
    from keras_paragrad.per_example.functional import per_example_norms as per_example_norms
    from keras_paragrad.per_example.noise_scale import GradientNoiseScale as GradientNoiseScale
    from keras_paragrad.privacy.adaptive import AdaptiveClip as AdaptiveClip
    from keras_paragrad.privacy.batch_norm import fix_batch_norm as fix_batch_norm
    from keras_paragrad.privacy.private_model import make_private as make_private
    from keras_paragrad.profiling.report import write_report as write_report
    from keras_paragrad.profiling.schedule import ProfileSchedule as ProfileSchedule
    from keras_paragrad.profiling.telemetry import GradientTelemetry as GradientTelemetry
    from keras_paragrad.profiling.throughput import Throughput as Throughput
    from keras_paragrad.profiling.tracer import Profiler as Profiler
    from keras_paragrad.transforms import transform_gradients as transform_gradients

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = _lazily(__name__)
