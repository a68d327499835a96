"""`write_report`: a run's profile and telemetry as one self-contained HTML file."""

import base64
import functools
import hashlib
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import keras_paragrad
from keras_paragrad.arguments import check_path
from keras_paragrad.extras import require
from keras_paragrad.profiling.report import series_view
from keras_paragrad.profiling.report.formatting import UNKNOWN, count, milliseconds, number, share
from keras_paragrad.profiling.report.runs import Run, read_run
from keras_paragrad.profiling.report.step_chart import PART_NAMES, figures_of
from keras_paragrad.profiling.report.window_view import MOST_DETAILED, overview, window_view
from keras_paragrad.profiling.report.workers_view import workers_view
from keras_paragrad.profiling.summary import PARTS, RunInfo, StepTime

__all__ = ["write_report"]

# Where long names and code may break across lines: after a slash or a dot, and between words in CamelCase.
_WORD_END = re.compile(r"(?<=\w)[./](?=\w)|(?<=[a-z])(?=[A-Z])")
# Marks our reports, in their head.
_GENERATOR = b'<meta name="generator" content="keras_paragrad">'


def write_report(log_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Writes a log directory's profiles and records as one HTML file that needs no network.

    Its charts are drawn without scripts; a small one shows values at the pointer, and zooms.

    The file stays under 1 MB for runs of any length: long series are thinned with their extremes kept, long tables are
    truncated, and the report says where.

    Args:
        log_dir: The log directory of `Profiler`, `GradientTelemetry` or `Throughput`; traces of other tools work too.
        output: The file to write; by default `report.html` in `log_dir`. An existing report is replaced.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: The log directory does not exist, or holds nothing to report on.
        FileExistsError: `output` is an existing file that is not a report.
        ValueError: A path isn't one.
        MissingExtraError: Jinja2 is not installed, or pyarrow for Parquet tables.

    Example:

    >>> import json, pathlib, tempfile
    >>> from keras_paragrad import write_report
    >>> from keras_paragrad.profiling.summary import ProfileSummary, StepTime
    >>> log_dir = pathlib.Path(tempfile.mkdtemp())
    >>> summary = ProfileSummary(steps=(StepTime(0, 0, 0.0, 2.5, compute=2.5),))
    >>> _ = (log_dir / "keras_paragrad.json").write_text(json.dumps(summary.to_dict()))
    >>> write_report(log_dir).name
    'report.html'
    """
    folder = check_path("log_dir", log_dir, example="logs")
    path = check_path("output", output, example="report.html", optional=True) or folder / "report.html"
    require("The report", "jinja2")
    content = _report(read_run(folder))
    _refuse_to_replace(path)
    text = _environment().get_template("report.html").render(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed once it is complete, so that a partial report never replaces a complete one.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return path


def _refuse_to_replace(path: Path) -> None:
    """Raises if a file exists that is not one of our reports."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if _GENERATOR not in file.read(1024):
            raise FileExistsError(
                f"{path} is not a report of keras_paragrad, and was not replaced. Write to another file: "
                "write_report(log_dir, output='profile.html')."
            )


# Cached, as compiling the templates takes longer than all else.
@functools.cache
def _environment() -> Any:
    """The Jinja environment of the templates."""
    import jinja2
    import markupsafe

    environment: Any = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: markupsafe.Markup(
        _WORD_END.sub(r"\g<0><wbr>", str(markupsafe.escape(text)))
    )
    script = environment.get_template("charts.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(
        script=markupsafe.Markup(script),
        script_hash=f"sha256-{digest}",
        version=keras_paragrad.__version__,
        part_names=PART_NAMES,
        part_heads=[PART_NAMES[part] for part in PARTS],
    )
    return environment


def _report(run: Run) -> dict[str, Any]:
    """The variables of the report's template."""
    return {
        "title": f"Profile of {run.info.model or run.name}",
        "run": run,
        "started": _date(run.info.started),
        "facts": _facts(run.info),
        "headlines": _headlines(run),
        "overview": overview(run.windows),
        "workers": workers_view(run.workers),
        "windows": [window_view(window) for window in reversed(run.windows[-MOST_DETAILED:])],
        "telemetry_charts": series_view.charts(run.telemetry, series_view.GRADIENT_CHARTS),
        "layers": series_view.layer_views(run.telemetry),
        "throughput_charts": series_view.charts(run.throughput, series_view.THROUGHPUT_CHARTS),
    }


def _facts(info: RunInfo) -> tuple[tuple[str, str], ...]:
    """The rows of the table that describes a run."""
    if info == RunInfo():
        return (("What was run", "not known: neither run.json nor a summary of ours is there"),)
    return (
        ("Model", info.model or UNKNOWN),
        ("Optimizer", info.optimizer or UNKNOWN),
        ("Trainable values", count(info.parameters) if info.parameters else UNKNOWN),
        ("Strategy", info.strategy or "none"),
        ("Replicas", count(info.replicas)),
        ("Workers", count(info.workers)),
        ("Compiled by XLA", "yes" if info.jit else "no"),
        ("Steps per execution", count(info.steps_per_execution)),
        ("Precision", info.precision),
        ("Devices", ", ".join(info.devices) or UNKNOWN),
        ("Versions", ", ".join(f"{name} {version}" for name, version in info.versions.items()) or UNKNOWN),
        ("Started", _date(info.started)),
    )


def _date(written: str) -> str:
    try:
        return f"{datetime.fromisoformat(written):%Y-%m-%d %H:%M:%S %Z}".strip()
    except ValueError:
        return written or UNKNOWN


def _headlines(run: Run) -> tuple[tuple[str, str], ...]:
    """The main figures of a run, by name."""
    figures = figures_of(_newest_steps(run))
    examples, updates = (
        series_view.median_of(run.throughput, f"{counted}_per_second") for counted in ("examples", "updates")
    )
    headlines = [
        ("Step time, median", milliseconds(figures and figures.median)),
        ("Step time, 95th percentile", milliseconds(figures and figures.p95)),
        ("Waiting for input", share(figures and figures.shares["input"])),
        ("Computing", share(figures and figures.shares["compute"])),
        ("Examples per second, median", count(examples)),
        ("Updates per second, median", number(updates)),
        *series_view.last_values(run.throughput),
    ]
    return tuple((name, value) for name, value in headlines if value != UNKNOWN)


def _newest_steps(run: Run) -> tuple[StepTime, ...]:
    """The steps of the last window that has some, of the first worker if there are several."""
    with_steps = [window.summary for window in run.windows if window.summary.steps]
    first = min((summary.run.worker for summary in with_steps), default=0)
    return next((summary.steps for summary in reversed(with_steps) if summary.run.worker == first), ())
