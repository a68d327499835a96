"""Runs gangs one after another, each with as many workers as there are, until training is done."""

import contextlib
import dataclasses
import os
import queue
import signal
import threading
from collections.abc import Generator, Sequence
from typing import NamedTuple

from keras_paragrad.distribution.joining import StoppedError
from keras_paragrad.distribution.launch.gang import Events, Gang, Output, Resize, Signalled
from keras_paragrad.distribution.launch.nodes import (
    MEETS_AGAIN,
    MissingNodesError,
    NodeEnded,
    Nodes,
    RendezvousSettings,
    RepeatedRendezvous,
)
from keras_paragrad.distribution.launch.tasks import Layout
from keras_paragrad.plain_text import counted

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit status if too few machines are left: try again.
_TOO_FEW = os.EX_TEMPFAIL
# The exit status of workers that were told to stop and made a backup.
_STOPPED = 128 + signal.SIGTERM
# A day, in seconds: the longest delay before a restart, which doubles each time.
_LONGEST_REGROW = 24 * 3600.0
# The action after a failed run.
_RESUMES = "the same command resumes, from the newest backup"


class Supervision(NamedTuple):
    """How the launcher supervises its processes.

    Attributes:
        least: The least number of workers on this machine, if it is the only one.
        max_restarts: How often to start again after a failure.
        grace: Seconds between terminating and killing a process.
        regrow: Seconds until lost workers of this machine are started again, doubled each time; 0 for never.
        log_dir: The directory of the files to which all processes but the first print; a temporary one, if `None`.
    """

    least: int
    max_restarts: int
    grace: float
    regrow: float = 60.0
    log_dir: str | None = None


def launch(
    layout: Layout, command: Sequence[str], supervision: Supervision, rendezvous: RendezvousSettings | None = None
) -> int:
    """Runs a command as a cluster on this machine, or as its part of one; returns the status, 75 to be tried again."""
    events: Events = queue.SimpleQueue()
    output, status = Output(supervision.log_dir), 1
    try:
        world = _Worlds(command, supervision, output, events)
        with _signals_as_events(events):
            status = world.run_here(layout) if rendezvous is None else world.run_nodes(layout, rendezvous)
        if status != 0 and output.saved.exists():
            output.say(_RESUMES)
        return status
    finally:
        output.close(failed=status != 0)


@contextlib.contextmanager
def _signals_as_events(events: Events) -> Generator[None]:
    """Turns signals into events; signals that are ignored, as under `nohup`, stay ignored."""
    signals = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: events.put(Signalled(number))) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Worlds:
    """Starts gangs, the workers that train together, one after another."""

    def __init__(self, command: Sequence[str], supervision: Supervision, output: Output, events: Events):
        self._supervision, self._output, self._events = supervision, output, events
        self._for_gangs = command, supervision.grace, output, events
        self._restarts = 0

    def run_here(self, layout: Layout) -> int:
        """Runs the workers of this machine. One that is lost is left out, if enough are left, and tried again later."""
        supervision, gangs, losses = self._supervision, 0, 0
        # The GPU shares of the workers that are left; a lost worker's GPUs aren't given to another worker.
        gpu_slots = list(range(layout.workers))
        while True:
            gangs += 1
            here = dataclasses.replace(layout, workers=len(gpu_slots), gpu_slots=gpu_slots)
            gang = Gang(here.tasks(os.environ), *self._for_gangs, gangs)
            regrowth = self._regrowth(gangs, losses) if len(gpu_slots) < layout.workers else None
            status = gang.run()
            if regrowth is not None:
                regrowth.cancel()
            if status == 0 or gang.signalled:
                return status
            if status == MEETS_AGAIN:
                gpu_slots = list(range(layout.workers))
                self._output.say(f"going on with {counted(len(gpu_slots), 'worker')}")
                continue
            # Killed by SIGTERM, it has made no backup: endless restarts would make no progress.
            stopped = status == _STOPPED and not gang.killed
            if not self._may_restart(stopped):
                return status
            if gang.failed is not None and gang.failed.job == "worker" and len(gpu_slots) > supervision.least:
                losses += 1
                del gpu_slots[gang.failed.index]
            self._say_restarting(stopped, f" with {counted(len(gpu_slots), 'worker')}" if losses else "")

    def run_nodes(self, layout: Layout, rendezvous: RendezvousSettings) -> int:
        """Runs this machine's workers, in a cluster of all machines that there are."""
        may_meet_again = self._supervision.max_restarts > 0 or rendezvous.least < rendezvous.most
        repeated = RepeatedRendezvous(rendezvous, layout, may_meet_again, self._signal_received, self._output.say)
        gangs = 0
        try:
            while True:
                gangs += 1
                nodes = repeated.meet(self._restarts, self._events.put)
                self._restarts = nodes.restarts
                status, gang = self._run_gang_of(nodes, layout, rendezvous, gangs)
                if status == 0 or gang.signalled or not may_meet_again:
                    return status
                if status == MEETS_AGAIN:
                    continue
                stopped = status == _STOPPED
                if not self._may_restart(stopped):
                    return status
                self._say_restarting(stopped)
        except StoppedError as stopped:
            self._output.say(f"received {signal.Signals(stopped.number).name} before all nodes had come")
            return 128 + stopped.number
        except MissingNodesError as error:
            if gangs == 1:
                raise
            self._output.say(f"too few nodes are left: {error}")
            return _TOO_FEW
        finally:
            repeated.close()

    def _run_gang_of(
        self, nodes: Nodes, layout: Layout, rendezvous: RendezvousSettings, number: int
    ) -> tuple[int, Gang]:
        """Runs this machine's gang, until all machines' gangs have ended; returns the exit status and the gang."""
        try:
            workers = counted(len(nodes.place.jobs["worker"]), "worker")
            who, ranks = f"all {rendezvous.most} nodes have", ", ".join(map(str, nodes.ranks))
            if len(nodes.ranks) < rendezvous.most:
                who = f"node {ranks} has" if len(nodes.ranks) == 1 else f"nodes {ranks} have"
            self._output.say(f"{who} joined, with {workers}")
            gang = Gang(layout.tasks(os.environ, nodes.place), *self._for_gangs, number, nodes.end)
            status = gang.run()
            return status or self._await_nodes(nodes, gang, number), gang
        finally:
            nodes.close()

    def _await_nodes(self, nodes: Nodes, gang: Gang, number: int) -> int:
        """Tells the others that this machine is done, and waits on the first one for all; returns the exit status."""
        nodes.end(0)
        while nodes.running:
            event = self._events.get()
            if isinstance(event, NodeEnded) and event.gang == number and event.status not in (0, MEETS_AGAIN):
                self._output.say(f"node {event.node}: {event.reason}")
                return event.status
            if isinstance(event, Signalled):
                gang.signalled = True
                nodes.end(128 + event.number, f"received {signal.Signals(event.number).name}", leaves=True)
                return 128 + event.number
        return 0

    def _regrowth(self, gang: int, losses: int) -> threading.Timer | None:
        """Starts a timer after which a gang ends, so that one with all workers can follow; `None` if none is wanted."""
        if not self._supervision.regrow:
            return None
        # Cap the exponent at 20, as larger powers may overflow a float.
        seconds = min(self._supervision.regrow * 2 ** min(losses - 1, 20), _LONGEST_REGROW)
        resize = Resize(gang, "the workers that were lost are started again")
        timer = threading.Timer(seconds, self._events.put, [resize])
        timer.daemon = True
        timer.start()
        return timer

    def _may_restart(self, stopped: bool) -> bool:
        """Whether to start again. Counts a restart, unless the gang was told to stop and so hasn't failed."""
        self._restarts += not stopped
        return self._restarts <= self._supervision.max_restarts and self._supervision.max_restarts > 0

    def _say_restarting(self, stopped: bool, what: str = "") -> None:
        why = f"restart {self._restarts} of {self._supervision.max_restarts}"
        self._output.say(f"restarting all processes{what}, {'as one was told to stop' if stopped else why}")

    def _signal_received(self) -> int:
        """The number of a received signal, or 0; drops other events, which are about gangs that have ended."""
        with contextlib.suppress(queue.Empty):
            event = self._events.get_nowait()
            return event.number if isinstance(event, Signalled) else 0
        return 0
