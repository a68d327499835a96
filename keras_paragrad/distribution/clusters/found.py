"""What a reader of the environment hands on, and the numbers in it."""

from collections.abc import Mapping
from typing import NamedTuple

DEFAULT_PORT = 2222


class Found(NamedTuple):
    """The addresses of every job's tasks, and which of them this process is."""

    jobs: dict[str, tuple[str, ...]]
    job: str
    task: int


def whole_number(environment: Mapping[str, str], name: str, least: int = 0) -> int:
    """The number in an environment variable.

    Raises:
        ValueError: It is not set, is no number, or is less than `least`.
    """
    text = environment.get(name, "").strip()
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        said = f"is {text!r}" if name in environment else "is not set"
        raise ValueError(f"{name} {said}. Expected a whole number that is {least} or more.")
    return int(text)


def port_of(environment: Mapping[str, str], default: int) -> int:
    """`KERAS_PARAGRAD_PORT`, or a default where it is not set."""
    return whole_number(environment, "KERAS_PARAGRAD_PORT", 1) if "KERAS_PARAGRAD_PORT" in environment else default
