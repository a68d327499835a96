"""The share of collectives, from a profile if there is one."""

from pathlib import Path

from keras_paragrad.plain_json import read_json
from keras_paragrad.profiling.summary import ProfileSummary


def collective_share(log_dir: Path) -> float | None:
    """The share of step time in collectives, in the newest profile of a log directory, or `None`."""
    summaries = sorted(log_dir.glob("plugins/profile/*/keras_paragrad.json"))
    if not summaries:
        return None
    try:
        steps = ProfileSummary.from_dict(read_json(summaries[-1].read_text(encoding="utf-8"))).steps
    except (OSError, ValueError, KeyError, TypeError):
        return None
    duration = sum(step.duration for step in steps)
    return sum(step.collective for step in steps) / duration if duration else None
