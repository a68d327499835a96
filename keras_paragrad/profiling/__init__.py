"""Profiling: where training time goes, and statistics of gradients."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.profiling.analysis import summarize
    from keras_paragrad.profiling.report import write_report
    from keras_paragrad.profiling.schedule import ProfileSchedule
    from keras_paragrad.profiling.telemetry import GradientTelemetry
    from keras_paragrad.profiling.throughput import Throughput
    from keras_paragrad.profiling.tracer import Profiler

__all__ = [
    "GradientTelemetry",
    "ProfileSchedule",
    "Profiler",
    "Throughput",
    "summarize",
    "write_report",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "GradientTelemetry": "telemetry",
        "ProfileSchedule": "schedule",
        "Profiler": "tracer",
        "Throughput": "throughput",
        "summarize": "analysis",
        "write_report": "report",
    },
)
