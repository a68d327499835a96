"""Profiling: where training time goes, and statistics of gradients."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.profiling.analysis import summarize as summarize
    from keras_paragrad.profiling.report import write_report as write_report
    from keras_paragrad.profiling.schedule import ProfileSchedule as ProfileSchedule
    from keras_paragrad.profiling.telemetry import GradientTelemetry as GradientTelemetry
    from keras_paragrad.profiling.throughput import Throughput as Throughput
    from keras_paragrad.profiling.tracer import Profiler as Profiler

__getattr__, __dir__, __all__ = lazily(__name__)
