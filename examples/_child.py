"""A child process that prints its progress as lines of JSON."""

import json
import os
import subprocess
from collections import deque

from _example import ENVIRONMENT

LINES_SHOWN = 20


class ChildError(Exception):
    """A child process ended with an error."""


def messages(command, errors):
    """Runs a command, and yields each JSON object it prints, as it prints it.

    Args:
        command: The program and its arguments.
        errors: The file that gets what the process writes to its standard error.

    Raises:
        ChildError: Its exit status is not 0. The message holds the last lines it wrote to its standard error.
    """
    # Standard error goes to a file, as a pipe that is read only at the end would fill up and stop the child.
    with (
        errors.open("w") as log,
        subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        ) as child,
    ):
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    _check(child.returncode, errors)


def run(command, errors):
    """Runs a command that prints for the user.

    Args:
        command: The program and its arguments.
        errors: The file that gets what the process writes to its standard error.

    Raises:
        ChildError: As with `messages`.
    """
    with errors.open("w") as log:
        finished = subprocess.run(
            [str(part) for part in command], stderr=log, env={**os.environ, **ENVIRONMENT}, check=False
        )
    _check(finished.returncode, errors)


def _check(status, errors):
    if status != 0:
        raise ChildError(f"A training ended with status {status}. The end of {errors}:\n{last_lines(errors)}")


def last_lines(path):
    """The end of a text file."""
    with path.open(errors="replace") as file:
        return "".join(deque(file, LINES_SHOWN)).rstrip()
