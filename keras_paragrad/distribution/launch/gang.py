"""A gang: processes that start, end and restart together."""

import contextlib
import os
import queue
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from keras_paragrad.distribution.launch.member import Member, Output
from keras_paragrad.distribution.launch.nodes import Meeting, NodeEnded, Nodes, StoppedError, meet
from keras_paragrad.distribution.launch.tasks import Layout, Task

# Time after the grace period until a guard is considered unresponsive.
_GUARD_SECONDS = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """Event: a member has ended."""

    member: Member


@dataclass(frozen=True)
class Overdue:
    """Event: a member did not end in time, and is killed."""

    member: Member


@dataclass(frozen=True)
class Signalled:
    """Event: the launcher received a signal."""

    number: int


Events = queue.SimpleQueue[Ended | Overdue | Signalled | NodeEnded]


# What to do after a run that hasn't ended well.
_RESUMES = (
    "the same command resumes, from the newest backup, if the script makes backups: "
    "callbacks=dist.callbacks(directory) in fit"
)


def launch(
    layout: Layout,
    command: Sequence[str],
    max_restarts: int,
    grace: float,
    all_epochs: bool = False,
    meeting: Meeting | None = None,
) -> int:
    """Runs a command as a cluster on this machine, or as this machine's part of one.

    Args:
        layout: The processes of this machine.
        command: The command of each.
        max_restarts: How often to start again after a failure, on this machine alone.
        grace: Seconds between terminating and killing a process.
        all_epochs: Whether to show the lines about epochs of all workers, and not of the first alone.
        meeting: Where the launchers of several machines meet.

    Returns:
        The exit status.

    Raises:
        ConnectionError: Other machines haven't come. The message names them.
        ValueError: There are no free ports, or the machines' options differ.
    """
    events: Events = queue.SimpleQueue()
    output = Output(lambda: events.put(Signalled(signal.SIGPIPE)), all_epochs)
    with _signals_as_events(events):
        if meeting is None:
            status = _run_with_restarts(layout, command, max_restarts, grace, output, events)
        else:
            try:
                status = _run_node(layout, command, grace, output, events, meeting)
            except StoppedError as stopped:
                output.say(f"received {signal.Signals(stopped.number).name} before all nodes had come")
                return 128 + stopped.number
    if status == 0:
        output.remove_file()
    elif status != 128 + signal.SIGPIPE:
        output.say(_RESUMES)
    return status


def _run_with_restarts(
    layout: Layout, command: Sequence[str], max_restarts: int, grace: float, output: Output, events: Events
) -> int:
    """Runs a cluster on this machine, again after a failure."""
    restarts = 0
    while True:
        gang = Gang(layout.tasks(os.environ), command, grace, output, events)
        status = gang.run()
        output.end_run()
        if status == 0 or gang.signalled or restarts == max_restarts:
            return status
        restarts += 1
        output.say(f"restarting all processes, restart {restarts} of {max_restarts}")


def _run_node(
    layout: Layout, command: Sequence[str], grace: float, output: Output, events: Events, meeting: Meeting
) -> int:
    """Runs this machine's part of a cluster, until all machines' parts have ended."""

    def signal_received() -> int:
        with contextlib.suppress(queue.Empty):
            event = events.get_nowait()
            return event.number if isinstance(event, Signalled) else 0
        return 0

    nodes = meet(meeting, layout, signal_received, output.say, events.put)
    try:
        workers = len(nodes.place.jobs["worker"])
        elsewhere = "" if meeting.rank == 0 or output.all_epochs else "; epochs are shown on node 0"
        output.say(f"all {meeting.nodes} nodes have come, with {workers} workers{elsewhere}")
        gang = Gang(layout.tasks(os.environ, nodes.place), command, grace, output, events, nodes.end)
        status = gang.run()
        output.end_run()
        return status or _await_nodes(nodes, output, events)
    finally:
        nodes.close()


def _await_nodes(nodes: Nodes, output: Output, events: Events) -> int:
    """Tells the others that this machine is done, and waits on the first one for all; returns the exit status."""
    nodes.end(0)
    while nodes.running:
        event = events.get()
        if isinstance(event, NodeEnded) and event.status:
            output.say(f"node {event.node}: {event.reason}")
            return event.status
        if isinstance(event, Signalled):
            nodes.end(128 + event.number, f"received {signal.Signals(event.number).name}")
            return 128 + event.number
    return 0


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


class Gang:
    """Runs tasks until all have ended; terminates all when one fails or the launcher receives a signal.

    Args:
        tasks: The tasks. The gang ends with its chief, or without one with its workers; other tasks serve them.
        command: The command of each task.
        grace: Seconds between terminating and killing a member.
        output: Receives the members' output.
        events: Delivers signals to the launcher.
        on_failure: Called once with the exit status and the reason, if a member fails or a signal is received.

    Attributes:
        status: The exit status: that of the failed member, by the shell's convention (128 plus the signal that killed
            it); 128 plus the signal that the launcher received; or 0.
        signalled: Whether the launcher received a signal.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        command: Sequence[str],
        grace: float,
        output: Output,
        events: Events,
        on_failure: Callable[[int, str], None] = lambda status, reason: None,
    ):
        self._on_failure = on_failure
        self.status = 0
        self.signalled = False
        self._grace = grace
        self._output = output
        self._events = events
        self._ending = False
        self._interrupts = 0
        self._leading_job = "chief" if any(task.job == "chief" for task in tasks) else "worker"
        self._running = [
            Member(task, command, number, grace, output, self._note_ended, self._note_overdue)
            for number, task in enumerate(tasks)
        ]

    def run(self) -> int:
        """Waits until all members have ended."""
        while self._running:
            try:
                event = self._events.get(timeout=self._grace + _GUARD_SECONDS if self._ending else None)
            except queue.Empty:
                self._destroy()
                continue
            if isinstance(event, Signalled):
                self._forward(event.number)
            elif isinstance(event, NodeEnded):
                self._handle_node(event)
            elif isinstance(event, Overdue):
                self._output.say(f"{event.member.task.label} did not exit within {self._grace:g} s and is killed")
            else:
                self._handle_exit(event.member)
        return self.status

    def _note_ended(self, member: Member) -> None:
        self._events.put(Ended(member))

    def _note_overdue(self, member: Member) -> None:
        self._events.put(Overdue(member))

    def _handle_exit(self, member: Member) -> None:
        """Ends the gang if a member failed, or once no process of the leading job runs."""
        self._running.remove(member)
        member.close()
        if self._ending:
            return
        if member.status != 0:
            self.status = _exit_status(member.status)
            failure = f"{member.task.label} {_describe_exit(member.status)} after {_format_seconds(member.seconds)}"
            self._on_failure(self.status, failure)
            self._end_others(failure)
        elif not any(other.task.job == self._leading_job for other in self._running):
            self._end(signal.SIGTERM)

    def _handle_node(self, ended: NodeEnded) -> None:
        """Ends the gang if another machine's has failed."""
        if ended.status and not self._ending:
            self.status = ended.status
            self._end_others(f"node {ended.node}: {ended.reason}")

    def _end_others(self, failure: str) -> None:
        """Says what failed, once, and terminates the others; how they fail with it goes to a file."""
        if self._running:
            names = ", ".join(member.task.label for member in self._running)
            failure += (
                f"; stopping {names}: SIGTERM, then SIGKILL after {self._grace:g} s; what follows is in "
                f"{self._output.divert()}"
            )
        self._output.say(failure)
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Interrupts or terminates all processes that run."""
        self._ending = True
        for member in self._running:
            if number == signal.SIGINT:
                member.interrupt()
            else:
                member.terminate()

    def _forward(self, number: int) -> None:
        """Forwards a signal once; kills on the second SIGINT."""
        self._interrupts += number == signal.SIGINT
        self.signalled = True
        if not self._ending:
            self.status = 128 + number
            self._end(number)
            name = signal.Signals(number).name
            self._on_failure(self.status, f"received {name}")
            self._output.say(f"received {name}; what still runs after {self._grace:g} s is killed")
        elif self._interrupts > 1:
            for member in self._running:
                member.kill()

    def _destroy(self) -> None:
        for member in self._running:
            self._output.say(f"the guard of {member.task.label} does not respond, so both are killed")
            member.destroy()


def _exit_status(status: int | None) -> int:
    """An exit status by the shell's convention."""
    if status is None:
        return 128 + signal.SIGKILL
    return status if status > 0 else 128 - status


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "lost its guard, and was killed,"
    if status > 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
