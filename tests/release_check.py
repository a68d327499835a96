"""Checks a release before it is made: what the distributions hold, and that they work in empty environments.

`make release-check` builds the source distribution, the wheel from it, and reads both. Then, for each Python of 3.11 to
3.14 that is on the path, it installs the wheel alone and runs README's first example, and installs it with all extras
for users and lets pip check that they go together. It prints a line for each, and the exit status is 1 if one fails.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
# For users; the others are for those who work on the package.
EXTRAS = ("privacy", "profile", "ray")
IN_WHEEL = (
    "keras_paragrad/py.typed",
    "keras_paragrad/docs/guides/launch.md",
    "dist-info/licenses/LICENSE",
    "dist-info/entry_points.txt",
)
IN_SOURCE = (
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "docs/index.md",
    "tests/conftest.py",
    "examples/digits.py",
    "Makefile",
)


def run(*words: object, folder: Path = ROOT) -> str:
    """Runs a command, and returns what it printed.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run([str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def missing(names: Sequence[str], expected: Sequence[str]) -> list[str]:
    """What no name ends with."""
    return [each for each in expected if not any(name.endswith(each) for name in names)]


def check_versions() -> str:
    """The package, the changelog and the citation are of one version."""
    (version,) = re.findall(r'^__version__ = "(.*)"', (ROOT / "keras_paragrad/__init__.py").read_text(), re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()
    unreleased = changes.partition("## [Unreleased]")[2].partition("\n## [")[0]
    if f"## [{version}]" not in changes or unreleased.strip():
        raise RuntimeError(f"CHANGELOG.md has changes under [Unreleased]: move them to [{version}], with the day.")
    if f'version: "{version}"' not in (ROOT / "CITATION.cff").read_text():
        raise RuntimeError(f"CITATION.cff is not of version {version}.")
    return version


def build(folder: Path) -> str:
    """Both distributions, the wheel from the source's; complete."""
    run(sys.executable, "-m", "build", "--outdir", folder)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        lacks = missing(archive.namelist(), IN_WHEEL)
    with tarfile.open(source) as archive:
        lacks += missing(archive.getnames(), IN_SOURCE)
    if lacks:
        raise RuntimeError(f"The distributions lack {', '.join(lacks)}.")
    return f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; {source.name}, {source.stat().st_size / 1e6:.1f} MB"


def install(python: str, what: str, folder: Path) -> Path:
    """A new environment's Python, with a requirement in it, all of which go together."""
    run(python, "-m", "venv", folder)
    ours = folder / "bin" / "python"
    run(ours, "-m", "pip", "install", "-q", "--disable-pip-version-check", what)
    run(ours, "-m", "pip", "check")
    return ours


def check_alone(python: str, wheel: Path, folder: Path) -> str:
    """The wheel alone trains, and its commands start."""
    ours = install(python, str(wheel), folder)
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    (folder / "example.py").write_text(example)
    last = run(ours, "-P", folder / "example.py", folder=folder).strip().splitlines()[-1]
    if last != "12 updates":
        raise RuntimeError(f"README's first example ends with {last!r}.")
    run(folder / "bin" / "keras-paragrad", "doctor", folder=folder)
    return last


def check_extras(python: str, wheel: Path, folder: Path) -> str:
    """All extras for users together."""
    ours = install(python, f"{wheel}[{','.join(EXTRAS)}]", folder)
    run(ours, "-P", "-c", "import keras_paragrad, dp_accounting, ray, xprof", folder=folder)
    return ", ".join(EXTRAS)


def main() -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*EXTRAS, "demo", "docs", "dev"} == set(extras), "an extra is neither for users nor for developers"
    failed = False

    def show(what: str, check: Callable[..., str], *arguments: object) -> None:
        nonlocal failed
        try:
            print(f"{what}: {check(*arguments)}", flush=True)
        except RuntimeError as error:
            failed = True
            print(f"{what}: FAILED\n{error}", flush=True)

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        show("version", check_versions)
        show("distributions", build, folder)
        if not (wheels := list(folder.glob("*.whl"))):
            return 1
        for python in PYTHONS:
            if (
                shutil.which(python) is None
                or subprocess.run([python, "-V"], capture_output=True, check=False).returncode
            ):
                print(f"{python}: not on the path, so it wasn't tried")
                continue
            for name, check in (("alone", check_alone), ("with extras", check_extras)):
                environment = folder / f"{python} {name}".replace(" ", "-")
                show(f"{python}, {name}", check, python, wheels[0], environment)
                shutil.rmtree(environment, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
