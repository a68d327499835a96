"""A tiny training of each component on each pair of releases of Keras and TensorFlow, beside whole batches.

`python benchmarks/releases.py 3.10-2.19` makes an environment for the pair in `.venv-releases/`, or takes the one that
is there, installs the wheel in `dist/` into it, and saves in `results/releases.json` how far the cases of
`tests/trainings/every_component.py` and two workers end from one device, or the sentence that refuses. Without a pair,
it takes all.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "benchmarks" / "results" / "releases.json"
ENVIRONMENTS = ROOT / ".venv-releases"
# What pip installs for each pair.
PAIRS = {
    "3.10-2.19": ["keras==3.10.*", "tensorflow==2.19.*"],
    "3.12-2.20": ["keras==3.12.*", "tensorflow==2.20.*"],
    "3.15-2.21": ["keras==3.15.*", "tensorflow==2.21.*"],
    # Pip takes pre-releases of what is bounded by one.
    "pre": ["keras", "tensorflow>=2.19.0.dev0"],
}
CASES = ROOT / "tests" / "trainings" / "every_component.py"
VERSIONS = """
import json, keras, platform, tensorflow
versions = keras.__version__, tensorflow.__version__, platform.python_version()
print(json.dumps(dict(zip(("keras", "tensorflow", "python"), versions))))
"""
WORKERS = """
import json, sys
sys.path.insert(0, "benchmarks")
import exactness_cell
print(json.dumps({"case": "DistributedFit, two workers", **exactness_cell.run({"replicas": "2 workers"})}))
"""
HELD = 1e-6


def install(python, pair, *packages, command=("install",)):
    """Installs a pair of releases and other packages into an environment; by another pip `command`, downloads them."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, *command, "-q", *PAIRS[pair], *packages], check=True)
    if pair == "pre":
        # Keras's pre-releases are a package of another name with the same files; TensorFlow's depend on that one.
        subprocess.run([*pip, "uninstall", "-qq", "-y", "keras", "keras-nightly"], check=True)
        subprocess.run([*pip, *command, "-q", "--pre", "--no-deps", "keras-nightly"], check=True)


def versions_in(python, **options):
    """The versions of Keras, TensorFlow and Python in an environment."""
    run = subprocess.run([python, "-P", "-c", VERSIONS], capture_output=True, text=True, check=True, **options)
    return json.loads(run.stdout.splitlines()[-1])


def python_of(pair, environments):
    """The path of Python in a pair's environment, which is made if it isn't there."""
    folder = environments / pair
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        venv.create(folder, clear=True, with_pip=True)
        install(python, pair, "dp-accounting>=0.6,<0.7", "rich>=13.7")
        (folder / ".made").touch()
    return python


def measured(pair, environments, limit):
    """Runs all cases on a pair of releases within `limit` seconds; returns its versions and the result of each case."""
    python = python_of(pair, environments)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    start, results = time.monotonic(), {}
    for command in (["-P", CASES], ["-P", "-c", WORKERS]):
        left = limit - (time.monotonic() - start)
        run = subprocess.run([python, *command], timeout=left, **options)
        lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode or not lines:
            raise SystemExit(f"{pair}: {run.stderr[-2000:]}")
        results |= {each.pop("case"): each for each in lines}
    for name, result in results.items():
        print(f"{pair}: {name}: {result.get('error', result.get('difference'))}", file=sys.stderr, flush=True)
    return {**versions_in(python, env=environment), "cases": results}


def parsed(parser):
    """Parses the arguments of a command, with the `pairs` that it names, or all of them."""
    parser.add_argument("pairs", nargs="*", metavar="pair", help=f"of {', '.join(PAIRS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.pairs) - PAIRS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(PAIRS)}")
    arguments.pairs = arguments.pairs or list(PAIRS)
    return arguments


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where they are, or are made")
    parser.add_argument("--limit", type=float, default=300, help="the most seconds that the cases of a pair may take")
    arguments = parsed(parser)
    saved = json.loads(SAVED.read_text()) if SAVED.exists() else {}
    wrong = []
    for pair in arguments.pairs:
        found = measured(pair, arguments.environments, arguments.limit)
        # What was refused before may be refused; what held has to hold.
        before = saved.get(pair, {"cases": {}})["cases"]
        refused = {name for name, result in before.items() if "error" in result}
        wrong += [
            f"{pair}: {name}: {result}"
            for name, result in found["cases"].items()
            if not ("error" in result and name in refused) and not result.get("difference", 1) <= HELD
        ]
        saved[pair] = found
        SAVED.write_text(json.dumps({each: saved[each] for each in PAIRS if each in saved}, indent=1) + "\n")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
