"""From the trace of a window to what it shows."""

from keras_paragrad.profiling.analysis.summarize import summarize

__all__ = ["summarize"]
