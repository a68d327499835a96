"""Starts one process and makes sure it ends, even if the launcher dies. Run by path; needs only the standard library.

Each byte of standard input, a pipe from the launcher, is an order; end of file means that the launcher has ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

TERMINATE, KILL = b"t", b"k"


class Guard:
    """A process and its process group."""

    def __init__(self, command: list[str], grace: float, report: int):
        self._report = report
        self._deadline = threading.Timer(grace, self._overdue)
        self._deadline.daemon = True
        self._is_ending = False
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._say(f"started {self._process.pid}")

    def wait(self) -> None:
        """Waits for the process, kills its remaining children, and reports."""
        status = self._process.wait()
        self._kill_group()
        self._say(f"ended {status}")

    def obey(self) -> None:
        """Follows the launcher's orders until end of file."""
        for order in iter(lambda: os.read(0, 1), b""):
            if order == KILL:
                self._kill_group()
            else:
                self._end()
        self._end()

    def _end(self) -> None:
        """Sends SIGTERM to the process and starts the grace period; later calls do nothing."""
        if self._is_ending:
            return
        self._is_ending = True
        # Signal only the process: it may need its children to save its state.
        self._process.terminate()
        self._deadline.start()

    def _overdue(self) -> None:
        """Reports that the grace period is over, and kills the process group."""
        self._say("overdue")
        self._kill_group()

    def _kill_group(self) -> None:
        # macOS refuses to signal a group in which only a zombie is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._report, f"{line}\n".encode())


def main(report: str, grace: str, *command: str) -> None:
    """Guards a command until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, which the process would inherit.
        signal.signal(number, lambda *_: None)
    guard = Guard(list(command), float(grace), int(report))
    threading.Thread(target=guard.obey, daemon=True).start()
    guard.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
