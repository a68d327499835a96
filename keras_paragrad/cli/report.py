"""Write an HTML report of a log directory, or a comparison of several."""

import argparse
import sys

from keras_paragrad.arguments import quote
from keras_paragrad.cli.parser import add_examples, complete_paths, print_error
from keras_paragrad.cli.waiting import Say, while_waiting
from keras_paragrad.extras import MissingExtraError
from keras_paragrad.pages import command_of

_PAGE = "guides/profiling"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `report`."""
    examples = "report logs\nreport --compare before after --output report.html\nreport --compare one two three"
    add_examples(parser, examples, _PAGE)
    runs = parser.add_mutually_exclusive_group(required=True)
    complete_paths(
        runs.add_argument(
            "log_dir", nargs="?", metavar="LOGDIR", help="the log_dir of Profiler, or a folder with a trace"
        ),
        runs.add_argument("--compare", nargs="+", metavar=("A", "B"), help="two or more such folders to compare"),
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="the file to write (default: report.html in LOGDIR, or comparison.html in A)",
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and prints its path; returns 0, or 1 if there is nothing to report on, or nowhere to write."""
    log_dirs = arguments.compare or [arguments.log_dir]
    if arguments.compare and not log_dirs[1:]:
        return print_error("report", "--compare takes two folders or more: report --compare before after", 2)
    return while_waiting("report", lambda say: _write(log_dirs, arguments.output, say), needs_tensorflow=False)


def _write(log_dirs: list[str], output: str | None, say: Say) -> int:
    """Writes the report, or with several folders the comparison; returns the exit status."""
    log_dir, *others = log_dirs
    say(f"reading {quote(log_dir)}" if not others else f"reading {len(log_dirs)} folders")
    from keras_paragrad.profiling.report import write_report

    try:
        path = write_report(log_dir, output, others or None)
    except (OSError, ValueError, MissingExtraError) as error:
        return print_error("report", error, 1)
    print(path)
    # Beside the path, which a script may read.
    print(f"The report is explained by: {command_of(_PAGE)}", file=sys.stderr)
    return 0
