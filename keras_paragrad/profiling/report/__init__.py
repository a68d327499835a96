"""`write_report`: a run's profile and telemetry as one self-contained HTML file."""

import base64
import hashlib
import html
import json
import os
import string
from pathlib import Path

import keras_paragrad
from keras_paragrad.arguments import check_path
from keras_paragrad.profiling.report.page import page_of
from keras_paragrad.profiling.report.runs import read_run

__all__ = ["write_report"]

_TEMPLATES = Path(__file__).with_name("templates")
# Marks our reports, in their head.
_GENERATOR = b'<meta name="generator" content="keras_paragrad">'


def write_report(log_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Writes a log directory's profiles and records as one HTML file that needs no network.

    The file has the figures, and a script that draws them: charts show values at the pointer, and zoom.

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
    page = page_of(read_run(folder))
    _refuse_to_replace(path)
    template, style, script = ((_TEMPLATES / f"report.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    text = string.Template(template).substitute(
        title=html.escape(page["title"]),
        style=style,
        script=script,
        hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        version=keras_paragrad.__version__,
        # Nothing in it may look like the end of its element.
        data=json.dumps(page, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )
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
