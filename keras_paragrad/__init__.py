"""Exact, fast parallel gradients for `model.fit`: plugins for Keras 3 on TensorFlow."""

from typing import TYPE_CHECKING

from keras_paragrad.cli import is_command
from keras_paragrad.exports import lazily

if TYPE_CHECKING or not is_command():
    import keras_paragrad.compat  # noqa: F401  (checks the installed Keras and TensorFlow before anything else)

    # Keras can deserialize these classes only once they are imported. Commands don't need them, and importing
    # TensorFlow takes seconds.
    from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer
    from keras_paragrad.per_example.wrapped_model import wrap
    from keras_paragrad.per_example.wrapper import PerExampleGradients

if TYPE_CHECKING:
    from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation
    from keras_paragrad.accumulation.slices import microbatch
    from keras_paragrad.distribution.checkpoint.backup import Backup
    from keras_paragrad.distribution.fit import DistributedFit
    from keras_paragrad.distribution.pipeline.pipeline import Pipeline
    from keras_paragrad.inputs.attribution import integrated_gradients
    from keras_paragrad.inputs.gradients import hessian_vector_product, input_gradients
    from keras_paragrad.inputs.jacobian import input_jacobian
    from keras_paragrad.memory.batch_size import find_batch_size
    from keras_paragrad.memory.estimate import estimate_memory
    from keras_paragrad.memory.recomputation import recompute
    from keras_paragrad.per_example.example_gradients import ExampleGradients
    from keras_paragrad.per_example.functional import per_example_gradients, per_example_norms
    from keras_paragrad.per_example.noise_scale import GradientNoiseScale
    from keras_paragrad.privacy.adaptive import AdaptiveClip
    from keras_paragrad.privacy.batch_norm import fix_batch_norm
    from keras_paragrad.privacy.private_model import make_private
    from keras_paragrad.profiling.report import write_report
    from keras_paragrad.profiling.schedule import ProfileSchedule
    from keras_paragrad.profiling.telemetry import GradientTelemetry
    from keras_paragrad.profiling.throughput import Throughput
    from keras_paragrad.profiling.tracer import Profiler
    from keras_paragrad.transforms import transform_gradients

__all__ = [
    "AccumulatingOptimizer",
    "AdaptiveClip",
    "Backup",
    "DistributedFit",
    "ExactAccumulation",
    "ExampleGradients",
    "GradientNoiseScale",
    "GradientTelemetry",
    "PerExampleGradients",
    "Pipeline",
    "ProfileSchedule",
    "Profiler",
    "Throughput",
    "estimate_memory",
    "find_batch_size",
    "fix_batch_norm",
    "hessian_vector_product",
    "input_gradients",
    "input_jacobian",
    "integrated_gradients",
    "make_private",
    "microbatch",
    "per_example_gradients",
    "per_example_norms",
    "recompute",
    "transform_gradients",
    "wrap",
    "write_report",
]
__version__ = "0.1.0"
__getattr__, __dir__ = lazily(
    __name__,
    {
        "AccumulatingOptimizer": "accumulation",
        "AdaptiveClip": "privacy",
        "Backup": "distribution",
        "DistributedFit": "distribution",
        "ExactAccumulation": "accumulation",
        "ExampleGradients": "per_example",
        "GradientNoiseScale": "per_example",
        "GradientTelemetry": "profiling",
        "PerExampleGradients": "per_example",
        "Pipeline": "distribution",
        "ProfileSchedule": "profiling",
        "Profiler": "profiling",
        "Throughput": "profiling",
        "accumulation": "accumulation",
        "distribution": "distribution",
        "estimate_memory": "memory",
        "find_batch_size": "memory",
        "fix_batch_norm": "privacy",
        "hessian_vector_product": "inputs",
        "input_gradients": "inputs",
        "input_jacobian": "inputs",
        "inputs": "inputs",
        "integrated_gradients": "inputs",
        "make_private": "privacy",
        "memory": "memory",
        "microbatch": "accumulation",
        "per_example": "per_example",
        "per_example_gradients": "per_example",
        "per_example_norms": "per_example",
        "privacy": "privacy",
        "profiling": "profiling",
        "recompute": "memory",
        "transform_gradients": "transforms",
        "wrap": "per_example",
        "write_report": "profiling",
    },
)
