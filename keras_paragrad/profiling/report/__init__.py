"""A run's profile and telemetry as one HTML file, which needs no network: `write_report`."""

from keras_paragrad.profiling.report.write import write_report

__all__ = ["write_report"]
