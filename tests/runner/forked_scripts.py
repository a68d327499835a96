"""Scripts for a launcher to start, which run in processes forked from one that has imported TensorFlow."""

import contextlib
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

from runner import own_process

_ADDRESS = "KERAS_PARAGRAD_TEST_FORKED_SCRIPTS"
# It imports next to nothing, and takes what is printed, and the exit status, from the process that runs the script.
_STARTED = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from runner.forked_scripts import run_elsewhere
sys.exit(run_elsewhere({{script!r}}))
"""


@contextlib.contextmanager
def forked(script: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Has a script run by processes that have imported TensorFlow already.

    Args:
        script: The script.

    Yields:
        The script to start in its place, next to it, and what its environment needs.
    """
    started = script.with_name(f"started_{script.name}")
    started.write_text(_STARTED.format(script=str(script)))
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket", "AF_UNIX") as listener:
        threading.Thread(target=_serve, args=(listener, Path(folder)), daemon=True).start()
        yield started, {_ADDRESS: str(listener.address)}


def run_elsewhere(script: str) -> int:
    """Has the script run, and prints what it printed; returns its exit status."""
    with Client(os.environ[_ADDRESS], "AF_UNIX") as server:
        server.send((script, sys.argv[1:], str(Path.cwd()), dict(os.environ)))
        printed, status = server.recv()
    sys.stderr.write(printed)
    return status


def _serve(listener: Listener, folder: Path) -> None:
    # It is closed when the test has ended.
    with contextlib.suppress(OSError):
        for number in range(sys.maxsize):
            arguments = listener.accept(), folder / str(number)
            threading.Thread(target=_run, args=arguments, daemon=True).start()


def _run(started: Connection, output: Path) -> None:
    *script, environment = started.recv()
    process = own_process.start(run_script, script, environment, output)
    # One that is killed says nothing more, and the script ends with it.
    wait([process.sentinel, started])
    process.kill()
    process.join()
    with contextlib.suppress(OSError):
        started.send((output.read_text(errors="replace"), process.exitcode))


def run_script(script: tuple[str, list[str], str]) -> None:
    """Runs a script with its arguments in a folder."""
    path, arguments, folder = script
    os.chdir(folder)
    sys.argv = [path, *arguments]
    # As Python does with a script, and `runpy` with a folder alone.
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
