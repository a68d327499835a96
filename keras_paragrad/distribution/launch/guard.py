"""Starts one process and sees to its end, also when the launcher is gone. Run by its path, it needs only Python itself.

Its standard input is a pipe from the launcher, each byte of which is an order; its end, for whatever reason, says that
the launcher is no more. That works wherever there are pipes, and leaves no moment at which a process is unwatched.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

INTERRUPT, TERMINATE, KILL = b"i", b"t", b"k"


class Guard:
    """A process and the group of those that it starts.

    Args:
        command: The process's words.
        grace: Seconds from the first order to end until the whole group is killed.
        report: A file descriptor for lines that say `started <pid>`, `overdue` and `ended <status>`.
    """

    def __init__(self, command: list[str], grace: float, report: int):
        self._report = report
        self._deadline = threading.Timer(grace, self._overdue)
        self._deadline.daemon = True
        self._told = False
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._say(f"started {self._process.pid}")

    def wait(self) -> None:
        """Waits for the process, ends what it left behind, and reports."""
        status = self._process.wait()
        self._kill_group()
        self._say(f"ended {status}")

    def obey(self) -> None:
        """Follows the launcher's orders, of which the last is its end."""
        for order in iter(lambda: os.read(0, 1), b""):
            if order == KILL:
                self._kill_group()
            else:
                self._end(signal.SIGINT if order == INTERRUPT else signal.SIGTERM)
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._told:
            return
        self._told = True
        # To the process alone: those that it started may be what it needs to save its state.
        self._process.send_signal(number)
        self._deadline.start()

    def _overdue(self) -> None:
        self._say("overdue")
        self._kill_group()

    def _kill_group(self) -> None:
        # macOS refuses to signal a group of which nobody is left but the process that waits to be collected.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._report, f"{line}\n".encode())


def main(report: str, grace: str, *command: str) -> None:
    """Guards a command until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Handled rather than ignored: what is ignored would be so in the process too.
        signal.signal(number, lambda *_: None)
    guard = Guard(list(command), float(grace), int(report))
    threading.Thread(target=guard.obey, daemon=True).start()
    guard.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
