"""Print versions, the detected hardware and the plan for it, and test a collective."""

import argparse

from keras_paragrad.command_line import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `doctor`."""
    seconds = number(above=0, most=24 * 3600)
    parser.add_argument(
        "--seconds", type=seconds, default=120.0, metavar="S", help="time limit of the collective (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings.

    Args:
        arguments: What `add_arguments` declares.

    Returns:
        0 if all is well; 1 if the environment is malformed, no plan can be made for it, or the collective failed.
    """
    from keras_paragrad.distribution.diagnosis import diagnose

    return diagnose(arguments.seconds)
