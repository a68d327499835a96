"""`make fuzz`: random trainings under random components, beside plain Keras on one device.

Each case runs in a process of its own. A finding is shrunk, and printed with the command that repeats it.
"""

import argparse
import collections
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from fuzz.cases import Case, drawn, read, simpler, written

# Of a case, and of all that a finding is shrunk by.
SECONDS, TRIES = 300, 40
FINDINGS = ("DIFFERS", "FAILS", "NO END", "CRASH")


def is_like(found: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a simpler case shows what the first one did."""
    same_error = found["kind"] != "FAILS" or found["about"].split(":")[0] == other["about"].split(":")[0]
    return found["kind"] == other["kind"] and same_error


def shrunk(
    case: Case, found: dict[str, Any], run: Callable[[Case], dict[str, Any]], tries: int = TRIES
) -> tuple[Case, dict[str, Any]]:
    """The simplest case that can be found to show the same, and its outcome."""
    progress = True
    while progress:
        progress = False
        for one in simpler(case):
            if tries <= 0:
                return case, found
            tries -= 1
            if is_like(other := run(one), found):
                case, found, progress = one, other, True
                break
    return case, found


def main(words: list[str] | None = None) -> int:
    """Runs one case, or cases until the time is over; the exit status is 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, help="the number of the first case")
    parser.add_argument(
        "--case", default=os.environ.get("CASE"), help="one case: its number or its settings, as printed"
    )
    parser.add_argument("--as-it-is", action="store_true", help="don't shrink what is found")
    given = parser.parse_args(words)
    # Imported by the processes that run cases, once TensorFlow is.
    from fuzz.outcomes import outside

    def run(case: Case) -> dict[str, Any]:
        return outside(written(case), SECONDS)

    if given.case:
        case = read(given.case)
        found = run(case)
        print(f"{found['kind']}: {found['about']}\n{found['said']}")
        return int(found["kind"] in FINDINGS)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"Seed {seed}, {given.minutes:g} minutes", flush=True)
    deadline, number, worst = time.monotonic() + 60 * given.minutes, seed, 0.0
    kinds, refusals = collections.Counter[str](), collections.Counter[str]()
    seen: set[str] = set()
    while time.monotonic() < deadline:
        case = drawn(number)
        found = run(case)
        kinds[found["kind"]] += 1
        if found["kind"] == "refused":
            refusals[found["about"][:110]] += 1
        if found["kind"] in ("same", "by design"):
            worst = max(worst, found["error"])
        known = found["kind"] == "FAILS" and found["about"] in seen
        seen.add(found["about"])
        if known:
            print(f"\n{number} {found['kind']}, as before: {found['about']}", flush=True)
        elif found["kind"] in FINDINGS:
            print(f"\n{number} {found['kind']}: {found['about']} ({found['seconds']:.0f} s)", flush=True)
            if not given.as_it_is:
                case, found = shrunk(case, found, run)
                print(f"The simplest like it: {found['about']}. {found['said'][-1500:]}")
            print(f"make fuzz CASE='{written(case)}'", flush=True)
        number += 1
    print(f"\nCases {seed} to {number - 1}: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}.")
    print(f"The largest error that passed: {worst:.1e}")
    for about, count in refusals.most_common():
        print(f"{count:4} refused: {about}")
    return int(any(kind in FINDINGS for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
