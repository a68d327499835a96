"""A gang: processes of one machine that start and end together.

A member is one of them; its guard is a process that ends it even if the launcher dies. A node is one of several
machines, each with its own gang; after a failure, or when a machine joins, all meet again and start new gangs.
"""

import queue
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_paragrad.distribution.launch.member import Member, Output
from keras_paragrad.distribution.launch.nodes import MEETS_AGAIN, NodeEnded
from keras_paragrad.distribution.launch.tasks import Task

# Seconds after the grace period at which a guard is considered unresponsive.
_GUARD_SECONDS = 5.0


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


@dataclass(frozen=True)
class Resize:
    """Event: the gang is to end with a backup, so that another one can go on with more workers.

    Attributes:
        gang: The number of the gang.
        reason: Why.
    """

    gang: int
    reason: str


Events = queue.SimpleQueue[Ended | Overdue | Signalled | Resize | NodeEnded]


class Gang:
    """Runs tasks until all have ended; terminates all when one fails or the launcher receives a signal.

    It ends with its chief, or without one with its workers; other tasks serve them. Events about gangs of other numbers
    are ignored. `on_failure` is told the exit status, the reason, and whether this machine won't meet the others again.

    Attributes:
        status: The failed member's exit status, by the shell's convention (128 plus the signal that killed
            it); 128 plus the signal that the launcher received; `MEETS_AGAIN`; or 0.
        signalled: Whether the launcher received a signal.
        failed: The task that failed, if one of this machine did.
        killed: Whether that was killed by a signal, and so had no time for a backup.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        command: Sequence[str],
        grace: float,
        output: Output,
        events: Events,
        number: int = 0,
        on_failure: Callable[[int, str, bool], None] = lambda status, reason, leaves: None,
    ):
        self._on_failure = on_failure
        self.status = 0
        self.signalled = False
        self.failed: Task | None = None
        self.killed = False
        self._number = number
        self._grace = grace
        self._output = output
        self._events = events
        # Whether the gang is being ended; in order to be resized; and whether a member then ended before it was done.
        self._ending = self._resizing = self._cut_short = False
        # Whether a worker, here or elsewhere, has ended well: then a larger gang would have nothing left to do.
        self._is_done = False
        self._interrupts = 0
        self._leading_job = "chief" if any(task.job == "chief" for task in tasks) else "worker"
        self._running = [
            Member(task, command, task is tasks[0], grace, output, self._note_ended, self._note_overdue)
            for task in tasks
        ]

    def run(self) -> int:
        """Handles events until all members have ended; returns `status`."""
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
            elif isinstance(event, Resize):
                if event.gang == self._number:
                    self._resize(event.reason)
            elif isinstance(event, Overdue):
                self._output.say(f"{event.member.task.label} did not exit within {self._grace:g} s and is killed")
            else:
                self._handle_exit(event.member)
        # If all members ended with status 0, training is done.
        if self._resizing and self._cut_short and not self.signalled:
            self.status = MEETS_AGAIN
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
            self._cut_short |= member.status != 0
            return
        if member.status != 0:
            self.failed = member.task
            self.status = _exit_status(member.status)
            self.killed = member.status is None or member.status < 0
            failure = f"{member.task.label} {_describe_exit(member.status)} after {_format_seconds(member.seconds)}"
            self._on_failure(self.status, failure, False)
            self._end_others(failure)
            self._output.show_end(member.task)
        else:
            self._is_done = True
        if not self._ending and not any(other.task.job == self._leading_job for other in self._running):
            self._end()

    def _handle_node(self, ended: NodeEnded) -> None:
        """Ends the gang if another machine's has failed, or if all meet again."""
        if ended.gang != self._number or self._ending:
            return
        if ended.status == MEETS_AGAIN:
            self._resize(ended.reason)
        elif ended.status:
            self.status = ended.status
            failure = f"node {ended.node}: {ended.reason}"
            # Tell the first machine that this one is still there, and will join the next rendezvous.
            self._on_failure(self.status, failure, False)
            self._end_others(failure)
        else:
            self._is_done = True

    def _resize(self, reason: str) -> None:
        """Ends the gang by SIGTERM, at which its members make a backup."""
        if not self._ending and not self._is_done:
            self._resizing = True
            self._on_failure(MEETS_AGAIN, reason, False)
            self._output.say(f"{reason}: all make a backup, and go on together")
            self._end()

    def _end_others(self, failure: str) -> None:
        """Reports a failure and terminates the other members."""
        if self._running:
            names = ", ".join(member.task.label for member in self._running)
            failure += f"; stopping {names}: SIGTERM, then SIGKILL after {self._grace:g} s"
        self._output.say(failure)
        self._end()

    def _end(self) -> None:
        """Terminates all members that still run."""
        self._ending = True
        for member in self._running:
            member.terminate()

    def _forward(self, number: int) -> None:
        """Ends the gang, once, by SIGTERM, at which its members make a backup; kills on the second SIGINT."""
        self._interrupts += number == signal.SIGINT
        # A signal during a resize ends the launcher as well.
        if not self._ending or (self._resizing and not self.signalled):
            self.status = 128 + number
            if not self._ending:
                self._end()
            name = signal.Signals(number).name
            self._on_failure(self.status, f"received {name}", True)
            self._output.say(f"received {name}; what still runs after {self._grace:g} s is killed")
        elif self._interrupts > 1:
            for member in self._running:
                member.kill()
        self.signalled = True

    def _destroy(self) -> None:
        """Kills all members and their guards, which should have ended them by now."""
        for member in self._running:
            self._output.say(f"the guard of {member.task.label} does not respond, so both are killed")
            member.destroy()


def _exit_status(status: int | None) -> int:
    """A failed member's status by the shell's convention: 128 plus the signal that killed it."""
    if status is None:
        return 128 + signal.SIGKILL
    return status if status > 0 else 128 - status


def _describe_exit(status: int | None) -> str:
    """How a failed member ended, by its status, as the end of a sentence."""
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
