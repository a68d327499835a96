"""`write_report`: a run's profile and telemetry as one self-contained HTML file."""

from keras_paragrad.profiling.report.write import write_report

__all__ = ["write_report"]
