"""Slurm's short forms of lists: nodes, ports, and tasks on each node."""

import itertools
import math
import re

from keras_paragrad.arguments import shown
from keras_paragrad.distribution.clusters.variables import MOST_TASKS

# Ports are numbers, too.
MOST_NUMBERS = 65536

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_nodes(text: str) -> list[str]:
    """The nodes that Slurm's short form stands for, in its order.

    Args:
        text: Names with ranges in brackets, as in `SLURM_STEP_NODELIST`.

    Returns:
        A name for each node.

    Raises:
        ValueError: It is not such a list.

    Example:

    >>> from keras_paragrad.distribution.clusters.nodelist import expand_nodes
    >>> expand_nodes("node[01-03,07],gpu-a[1-2]")
    ['node01', 'node02', 'node03', 'node07', 'gpu-a1', 'gpu-a2']
    """
    parts = _PART.findall(text)
    if not parts or ",".join(parts) != text:
        raise ValueError(f"{shown(text)} is not a list of nodes. Expected a form such as 'node[01-03,07],gpu-a[1-2]'.")
    nodes: list[str] = []
    for part in parts:
        nodes += _expand_part(part, text)
        _check_count(len(nodes), text)
    return nodes


def expand_tasks(text: str) -> list[int]:
    """How many tasks run on each node, from a form such as `2(x3),1`.

    Raises:
        ValueError: It is not of that form.

    Example:

    >>> from keras_paragrad.distribution.clusters.nodelist import expand_tasks
    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{shown(text)} is not a list of task counts per node. Expected a form such as '2(x3),1'.")
        _check_count(len(counts) + int(match[2] or 1), text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_numbers(text: str) -> list[str]:
    """The numbers in a form such as `01-03,07`, as text, since leading zeros count.

    Raises:
        ValueError: It is not of that form.

    Example:

    >>> from keras_paragrad.distribution.clusters.nodelist import expand_numbers
    >>> expand_numbers("09-11,7")
    ['09', '10', '11', '7']
    """
    numbers = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{shown(text)} is not a list of numbers. Expected a form such as '01-03,07'.")
        first, last = match[1], match[2] or match[1]
        _check_count(len(numbers) + int(last) - int(first) + 1, text, MOST_NUMBERS)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _expand_part(part: str, text: str) -> list[str]:
    """Expands the brackets of a part, the last one fastest: `rack[1-2]node[1-2]` has two."""
    # Every other token was in brackets.
    choices = [expand_numbers(token) if index % 2 else [token] for index, token in enumerate(_GROUP.split(part))]
    _check_count(math.prod(map(len, choices)), text)
    return ["".join(tokens) for tokens in itertools.product(*choices)]


def _check_count(count: int, text: str, most: int = MOST_TASKS) -> None:
    if count > most:
        raise ValueError(f"{shown(text)} stands for {count} or more; at most {most} are allowed. Correct it.")
