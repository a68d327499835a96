"""Write an HTML report of a log directory."""

import argparse
import sys

from keras_paragrad.arguments import quote
from keras_paragrad.cli.parser import add_examples, announcer, print_error
from keras_paragrad.extras import MissingExtraError
from keras_paragrad.pages import command_of

_PAGE = "guides/profiling"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `report`."""
    add_examples(parser, "report logs\nreport logs --output report.html", _PAGE)
    parser.add_argument("log_dir", metavar="LOGDIR", help="the log_dir of Profiler, or a folder with a trace")
    parser.add_argument("--output", metavar="FILE", help="the file to write (default: report.html in LOGDIR)")


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and prints its path; returns 0, or 1 if there is nothing to report on, or nowhere to write."""
    announcer("report", needs_tensorflow=False)(f"reading {quote(arguments.log_dir)}")
    from keras_paragrad.profiling.report import write_report

    try:
        path = write_report(arguments.log_dir, arguments.output)
    except (OSError, ValueError, MissingExtraError) as error:
        return print_error("report", error, 1)
    print(path)
    # Beside the path, which a script may read.
    print(f"The report is explained by: {command_of(_PAGE)}", file=sys.stderr)
    return 0
