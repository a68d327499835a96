"""`make ledger`: what becomes of each case of the census, of the exactness matrix and of the fuzzer's first seeds.

The package measured is the one that Python finds. What was measured of it is kept in `build`, so a run that was ended
goes on, and a change of the package begins anew. It is written into `ledger.json`, and compared with the committed one.
"""

import argparse
import collections
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

LEDGER = Path(__file__).parent / "ledger.json"
KEPT = Path(__file__).parents[2] / "build" / "ledger.json"
# Of this process and of those that it starts.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def committed() -> dict[str, str]:
    """The ledger of the last commit."""
    command = ["git", "-C", str(LEDGER.parent), "show", f"HEAD:./{LEDGER.name}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(shown.stdout) if shown.returncode == 0 else {}


def kind_of(outcome: str) -> str:
    return outcome.partition(":")[0]


def lost(before: str, after: str) -> bool:
    """Whether a case was exact and no longer is."""
    return kind_of(before) == "exact" != kind_of(after)


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What isn't as before; what was lost comes first."""
    pairs = [(name, before.get(name, "not there"), outcome) for name, outcome in after.items()]
    changed = sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: not lost(*pair[1:]))
    return [f"{name}: {one}  ->  {other}" for name, one, other in changed]


def _kept(package: Path) -> dict[str, Any]:
    """What was measured of this package: the kind, how and the seconds of each case."""
    sources = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    digest = hashlib.sha256(sources).hexdigest()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return kept if kept.get("package") == digest else {"package": digest, "cases": {}}


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def main(words: list[str] | None = None) -> int:
    """Measures what is left; the exit status is 1 if a case is no longer exact, or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", help="how cases' names begin; one named in full is measured again")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="the most that a case may take")
    given = parser.parse_args(words)
    os.environ |= ENVIRONMENT
    from ledger.cases import Found, every

    package = Path(str(importlib.util.find_spec("keras_paragrad").origin)).parent
    cases, kept, before = every(), _kept(package), committed()
    known = kept["cases"]
    # A case's name begins others' too: fuzz/1, fuzz/10.
    begins = tuple(each for each in given.chosen if each not in cases)
    chosen = [name for name in cases if not given.chosen or name in given.chosen or name.startswith(begins)]
    # On a busy machine, more takes too long.
    left = [name for name in chosen if name in given.chosen or known.get(name, ["timeout"])[0] == "timeout"]
    print(f"{len(left)} of {len(cases)} cases, of {package}", flush=True)

    def measured(name: str) -> list[Any]:
        began = time.monotonic()
        found = cases[name](given.seconds)
        return [found.kind, found.how, round(time.monotonic() - began, 1)]

    def recorded(names: list[str]) -> dict[str, str]:
        return {name: Found(*known[name][:2]).recorded for name in names if name in known}

    pool = ThreadPoolExecutor(given.processes)
    try:
        futures = {pool.submit(measured, name): name for name in left}
        for number, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            kind, how, seconds = known[name] = future.result()
            print(f"{number}/{len(left)} {name}, {seconds:.0f} s: {kind} {how[:300]}", flush=True)
            _write(KEPT, kept)
    except KeyboardInterrupt:
        print("Ended. The same command goes on.")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # What no longer is a case goes.
        now = before | recorded(list(cases))
        _write(LEDGER, {name: now[name] for name in cases if name in now})
    found = recorded(chosen)
    for part in dict.fromkeys(name.partition("/")[0] for name in found):
        names = [name for name in found if name.startswith(f"{part}/")]
        kinds = collections.Counter(kind_of(found[name]) for name in names)
        minutes = sum(known[name][2] for name in names) / 60
        print(f"{part}, {minutes:.0f} minutes: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    print("\n".join(differences(before, found)) or "No difference to the committed ledger.")
    gone = any(lost(before.get(name, ""), outcome) for name, outcome in found.items())
    return int(gone or any(kind_of(outcome) == "wrong" for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
