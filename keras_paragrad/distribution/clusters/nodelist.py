"""Slurm's short forms of lists: nodes, ports, and tasks on each node."""

import re

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


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
        raise ValueError(f"{text!r} is not a list of nodes. Expected a form such as 'node[01-03,07],gpu-a[1-2]'.")
    return [node for part in parts for node in _expand_part(part)]


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
            raise ValueError(f"{text!r} is not a number of tasks for each node. Expected a form such as '2(x3),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_numbers(text: str) -> list[str]:
    """The numbers in a form such as `01-03,07`, as text, for zeros in front count.

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
            raise ValueError(f"{text!r} is not a list of numbers. Expected a form such as '01-03,07'.")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _expand_part(part: str) -> list[str]:
    """Expands the first brackets, and then those after them: `rack[1-2]node[1-2]` has two."""
    group = _GROUP.search(part)
    if group is None:
        return [part]
    tails = _expand_part(part[group.end() :]) if part[group.end() :] else [""]
    head = part[: group.start()]
    return [f"{head}{number}{tail}" for number in expand_numbers(group[1]) for tail in tails]
