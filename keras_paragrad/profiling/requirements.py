"""Checks what profiling needs besides TensorFlow, once before training begins."""

import logging
import shutil
from pathlib import Path

from keras_paragrad.extras import explain_missing, is_installed

_log = logging.getLogger("keras_paragrad")

LEAST_FREE = 100 * 2**20
_FOR = {"xprof": "read a trace", "tensorboard": "look at one in TensorBoard", "jinja2": "write the report"}


def say_what_is_missing(log_dir: Path, *, report: bool) -> None:
    """Logs missing packages and a full disk, in one line each.

    Args:
        log_dir: Where traces will be written.
        report: Whether a report is requested.
    """
    missing = [name for name in _FOR if not is_installed(name) and (report or name != "jinja2")]
    if missing:
        _log.warning("%s", explain_missing("Profiler", [f"{name} (to {_FOR[name]})" for name in missing]))
    there = next(path for path in (log_dir.absolute(), *log_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE:
        _log.warning(
            "The disk of %s has %.0f MiB left, and a trace may not fit. Make room, or give Profiler another log_dir.",
            there,
            free / 2**20,
        )
