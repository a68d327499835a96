"""Print versions, the detected hardware and the plan for it, and test a collective."""

import argparse

from keras_paragrad.cli.parser import add_examples, announcer, finite_number
from keras_paragrad.pages import command_of

_PAGE = "guides/distribution"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `doctor`."""
    add_examples(parser, "doctor\ndoctor --seconds 30", _PAGE)
    seconds = finite_number(above=0, most=24 * 3600)
    parser.add_argument(
        "--seconds", type=seconds, default=120.0, metavar="S", help="time limit of the collective (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 0, or 1 if no plan can be made for this environment, or the collective failed."""
    say = announcer("doctor")
    from keras_paragrad.distribution import diagnosis

    status = diagnosis.diagnose(arguments.seconds, say)
    print(f"The plan is explained by: {command_of(_PAGE)}")
    return status
