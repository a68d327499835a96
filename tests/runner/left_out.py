"""Counts the tests that are left out, as the machine lacks what they need, and says how to get it."""

import os
from collections import Counter
from pathlib import Path

NO_BROWSER = (
    "needs Chromium and its driver on the path: sudo apt-get install chromium chromium-driver fonts-dejavu-core"
)
# The recipe of a package that isn't installed with this one's tests.
NO_PACKAGE = "runs a recipe with packages that are not installed: "
# It comes with the extra `dev`: Keras takes its datasets from 3.11 on.
NO_GRAIN = "needs Grain, which isn't installed, or has no wheel for this interpreter: .venv/bin/pip install grain"


def lines(skipped):
    """What to say of the reports of tests that were skipped for a reason of this module."""
    reasons = Counter(
        each.longrepr[2].removeprefix("Skipped: ") for each in skipped if isinstance(each.longrepr, tuple)
    )
    return [
        f"Left out: {reasons[reason]} tests: {reason}"
        for reason in sorted(reasons)
        if reason.startswith((NO_BROWSER, NO_PACKAGE, NO_GRAIN))
    ]


def report(terminal):
    """Says it last, and to the file that LEFT_OUT names, for who runs more than these tests."""
    for line in lines(terminal.stats.get("skipped", ())):
        terminal.write_line(line)
        if path := os.environ.get("LEFT_OUT"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
