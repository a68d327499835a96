"""Starts a gang, and restarts it when it fails."""

import contextlib
import os
import queue
import signal
from collections.abc import Iterator, Sequence

from keras_paragrad.distribution.launch.gang import Events, Gang, Signalled
from keras_paragrad.distribution.launch.output import Output
from keras_paragrad.distribution.launch.tasks import Layout

_FOLLOWED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(layout: Layout, command: Sequence[str], max_restarts: int, grace: float) -> int:
    """Runs a command as a cluster on this machine.

    Args:
        layout: The cluster.
        command: The command line of each of its processes.
        max_restarts: How often the whole gang is restarted, on other ports, after one of its processes has failed.
        grace: Seconds between asking a process to end and killing it.

    Returns:
        The exit status: 0; the failing process's, by the shell's convention; or 128 plus the signal that the launcher
        received.

    Raises:
        ValueError: There are not enough free ports or GPUs.
    """
    events: Events = queue.SimpleQueue()
    output = Output(on_closed=lambda: events.put(Signalled(signal.SIGPIPE)))
    restarts = 0
    with _signals_to(events):
        while True:
            gang = Gang(layout.tasks(os.environ), command, grace, output, events)
            status = gang.run()
            if status == 0 or gang.signalled or restarts == max_restarts:
                return status
            restarts += 1
            output.say(f"starting all again, restart {restarts} of {max_restarts}")


@contextlib.contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """Turns signals into events; signals that are ignored, as under `nohup`, stay ignored."""
    followed = [number for number in _FOLLOWED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: events.put(Signalled(number))) for number in followed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
