"""`make mutants`: plants one fault after the other in a copy of the package, and shows which test finds each."""

import compileall
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

from faults import FAULTS, PACKAGE, ROOT, TESTS, Fault
from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
# The tests of a fault take seconds. A step that never ends, or collectives that wait for each other, are given so many.
SECONDS = 300
# All tests that found a fault, without any.
SECONDS_OF_ALL = 1800
_FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", re.MULTILINE)


class Found(NamedTuple):
    """What became of a fault.

    Attributes:
        by: The first test that failed, or the limit that they ran into; `None` if all passed.
        seconds: How long that took, with the start of pytest.
    """

    by: str | None
    seconds: float


class PytestError(RuntimeError):
    """Pytest has not run the tests: there are none of that name, or they can't be imported."""


def find(fault: Fault, copied: Path) -> Found:
    """Runs the tests of a fault's component with the fault in the copied package, until one fails."""
    module = copied / PACKAGE.name / fault.file
    sound = module.read_text()
    module.write_text(fault.planted(sound))
    began = time.monotonic()
    try:
        by = first_failure(fault.tests, copied)
    finally:
        module.write_text(sound)
    return Found(by, round(time.monotonic() - began, 1))


def first_failure(tests: Sequence[str], copied: Path, limit: int = SECONDS) -> str | None:
    """The first of some tests that fails with the copied package, or the limit; `None` if all pass.

    Args:
        tests: Below `tests`.
        copied: The folder that the package was copied to.
        limit: Seconds after which they are ended.

    Raises:
        PytestError: They could not be run.
    """
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    # For the processes that tests start, too. The width is that of the summary, in which names are cut off.
    environment = {**os.environ, "PYTHONPATH": str(copied), "COLUMNS": "1000"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *(str(TESTS / test) for test in tests)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"the limit of {limit} s"
        finally:
            # With all that the tests have started, and left behind if one of them failed.
            _end(process)
        output.seek(0)
        said = output.read()
    failed = _FAILED.findall(said)
    if status == 1 and failed:
        return failed[0]
    if status:
        raise PytestError(f"pytest ended with status {status} on {', '.join(tests)}:\n{said[-3000:]}")
    return None


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(faults: Sequence[Fault]) -> dict[str, Found]:
    """Plants each fault in turn; afterwards, the tests that found them have to pass without any."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        shutil.copytree(PACKAGE, copied / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        # By content: a fault may be as long as what it replaces, and as old to the second.
        compileall.compile_dir(copied, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        for number, fault in enumerate(faults, 1):
            found[fault.name] = find(fault, copied)
            by, seconds = found[fault.name]
            print(f"{number}/{len(faults)} {fault.name}: {by or 'NOT FOUND'}, {seconds:.0f} s", flush=True)
        finders = sorted({each.by for each in found.values() if each.by and "::" in each.by})
        failing = first_failure(finders, copied, SECONDS_OF_ALL) if finders else None
    if failing:
        raise SystemExit(f"{failing} fails without a fault, too.")
    return found


def report(faults: Sequence[Fault], found: dict[str, Found]) -> None:
    """Prints the table, and writes its rows into `results`, beside those of other faults."""
    table = Table("fault", "file", "found by", "s", title=f"{len(faults)} faults, and the first test that finds each")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for fault in faults:
        by, seconds = found[fault.name]
        table.add_row(fault.name, fault.file, escape(by or "NOT FOUND"), f"{seconds:.0f}")
        rows[fault.name] = {"file": fault.file, "found by": by, "seconds": seconds}
    Console(width=160).print(table)
    rows = {fault.name: rows[fault.name] for fault in FAULTS if fault.name in rows}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def main(words: Sequence[str]) -> None:
    """Plants the faults with the given text in their names, or all."""
    wanted = " ".join(words)
    faults = [fault for fault in FAULTS if wanted in fault.name]
    if not faults:
        names = "\n".join(f"  {fault.name}" for fault in FAULTS)
        raise SystemExit(f"No fault has {wanted!r} in its name. Write FAULTS= and a part of one of these:\n{names}")
    found = run(faults)
    report(faults, found)
    missed = [name for name, each in found.items() if each.by is None]
    if missed:
        raise SystemExit(f"No test finds: {'; '.join(missed)}.")


if __name__ == "__main__":
    # So that what runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main(sys.argv[1:])
