"""Numbers in environment variables."""

import re
from collections.abc import Mapping

from keras_paragrad.arguments import shown

DEFAULT_PORT = 2222
# More would take minutes to write down, and no cluster that trains together has so many.
MOST_TASKS = 10_000


def whole_number(environment: Mapping[str, str], name: str, least: int = 0, most: int = 10**18) -> int:
    """The number in an environment variable.

    Raises:
        ValueError: It is not set, is not a number, or is less than `least` or more than `most`.
    """
    text = environment.get(name, "").strip()
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= most:
        said = f"is {shown(text)}" if name in environment else "is not set"
        bounds = f"from {least} to {most}" if most < 10**18 else f"of at least {least}"
        raise ValueError(f"{name} {said}. Expected an integer {bounds}.")
    return int(text)


def port_of(environment: Mapping[str, str], default: int) -> int:
    """`KERAS_PARAGRAD_PORT`, or a default where it is not set."""
    return (
        whole_number(environment, "KERAS_PARAGRAD_PORT", 1, 65535) if "KERAS_PARAGRAD_PORT" in environment else default
    )
