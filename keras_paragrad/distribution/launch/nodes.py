"""The launchers of several machines, or nodes: they meet on the first machine, end together, and meet again.

Each machine runs a gang, its own workers. When all meet again, they start new gangs. A machine's facts are values that
have to be the same on all, and the addresses of its workers. The plan, sent to all that have joined, is the cluster
made of them; or `missing` machines, or the reason why a machine is `refused`.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras_paragrad
from keras_paragrad.distribution.joining import Wait, join
from keras_paragrad.distribution.launch.tasks import Layout, Place
from keras_paragrad.distribution.meeting import Caller, Meeting
from keras_paragrad.distribution.messages import LONGEST, LOOK, MessageSigner, difference, host_of, keep_alive

# The status of a gang that ends in order to meet again; no process has it.
MEETS_AGAIN = -1
# Seconds after which a machine that connects again is assumed to have lost its connection.
_PATIENCE = 5.0
# Seconds without a new machine after which fewer than the maximum begin.
_SETTLE = 5.0
# Seconds to wait for a machine that has trained before.
_SURVIVOR_SECONDS = 60.0


class MissingNodesError(ConnectionError):
    """Some machines haven't joined in time. The message, on all that have, names them."""


@dataclass(frozen=True, kw_only=True)
class RendezvousSettings:
    """Where the launchers of several machines meet.

    Attributes:
        least: The least number of machines.
        most: The most.
        rank: The rank of this one.
        address: `host:port` on the first machine.
        token: The token that signs their messages.
        seconds: How long to wait for the others when training begins.
        again: How long to wait for them after some were lost.
        host: This machine's address, at which the others reach its workers; by default the address of its connection.
    """

    least: int
    most: int
    rank: int
    address: str
    token: str
    seconds: float
    again: float
    host: str | None = None

    def signer(self, run: str = "") -> MessageSigner:
        """The signer of messages: before the machines have met, or of a run."""
        return MessageSigner(self.derived_key(f"nodes {run}").encode())

    def derived_key(self, purpose: str) -> str:
        """A key for one purpose, from which the token can't be found."""
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def facts(self, workers: Sequence[str] = ()) -> dict[str, Any]:
        """What a machine sends to the first one: values that must agree, and its workers' addresses."""
        nodes = f"{self.most}" if self.least == self.most else f"{self.least}:{self.most}"
        return {"--nodes": nodes, "keras_paragrad": keras_paragrad.__version__, "workers": list(workers)}


@dataclass(frozen=True)
class NodeEnded:
    """Event: the launcher of another machine has ended, or its connection was lost.

    Attributes:
        node: The machine's rank.
        status: The exit status; 0 if all of its workers are done.
        reason: Why, if it isn't 0.
        leaves: Whether the machine won't come to the next rendezvous.
        gang: Which of this machine's gangs it trained with.
    """

    node: int
    status: int
    reason: str
    leaves: bool = False
    gang: int = 0


class Nodes:
    """The connections to the other machines' launchers, and this machine's place. The first has one to each.

    Attributes:
        place: This machine's part of the cluster.
        ranks: The machines that have joined.
        restarts: How often all have been restarted after a failure.
        gone: On the first machine, the ranks of machines that won't rejoin unless they are started again.
    """

    def __init__(
        self,
        rendezvous: RendezvousSettings,
        connections: Mapping[int, socket.socket],
        plan: Mapping[str, Any],
        gang: int,
        on_ended: Callable[[NodeEnded], None],
    ):
        first = plan["firsts"][str(rendezvous.rank)]
        self.place = Place(plan["jobs"], rendezvous.derived_key(f"workers {plan['run']}"), first)
        self.ranks: list[int] = plan["ranks"]
        self.restarts: int = plan["restarts"]
        self.gone: set[int] = set()
        self._rank, self._gang = rendezvous.rank, gang
        self._signer = rendezvous.signer(plan["run"])
        self._connections = dict(connections)
        self._on_ended = on_ended
        self._telling_lock = threading.Lock()
        self._failed = False
        self._has_ended = {rank: threading.Event() for rank in connections}
        # The machines still running, whose ends the first machine relays to the others.
        self._running = set(connections) if rendezvous.rank == 0 else set[int]()
        for rank, connection in connections.items():
            connection.settimeout(None)
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()

    @property
    def running(self) -> bool:
        """On the first machine, whether another one's workers still run."""
        return bool(self._running)

    def wait_for_end(self, rank: int, seconds: float) -> None:
        """Waits until it is known how another machine ended: it may join again before its end was read."""
        if rank in self._has_ended:
            self._has_ended[rank].wait(seconds)

    def end(self, status: int, reason: str = "", leaves: bool = False) -> None:
        """Tells the others that this machine's workers are done, or have failed."""
        self._tell(NodeEnded(self._rank, status, reason, leaves))

    def close(self) -> None:
        """Closes the connections after the other machines have read all messages."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()

    def _tell(self, ended: NodeEnded) -> None:
        """Sends an end to all machines but the one that ended; nothing after the first failure."""
        with self._telling_lock:
            if self._failed:
                return
            self._failed = ended.status != 0
            line = self._signer.sign(dataclasses.asdict(ended))
            for rank, connection in self._connections.items():
                if rank != ended.node:
                    with contextlib.suppress(OSError):
                        connection.sendall(line)

    def _listen(self, rank: int, connection: socket.socket) -> None:
        """Reads another launcher's messages until it has failed or its connection closes; runs in a thread."""
        ended = None
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            while (ended is None or ended.status == 0) and (line := lines.readline(LONGEST)):
                message = self._signer.verify(line)
                if message is not None:
                    ended = NodeEnded(**message)
        if ended is None:
            reason = "was lost: its launcher was killed, its machine is down, or the network failed"
            ended = NodeEnded(rank, 1, reason, leaves=True)
        self._running.discard(rank)
        if ended.leaves or not ended.status:
            self.gone.add(ended.node)
        # Record the end here first: the other machines react to the message.
        self._on_ended(dataclasses.replace(ended, gang=self._gang))
        self._has_ended[rank].set()
        if ended.status and self._rank == 0:
            self._tell(ended)


class RepeatedRendezvous:
    """Meets the launchers of the other machines: once, or again after each failure and when another machine comes.

    The first machine listens for the others, also while training goes on.
    """

    def __init__(
        self,
        rendezvous: RendezvousSettings,
        layout: Layout,
        goes_on: bool,
        signal_received: Callable[[], int],
        say: Callable[[str], None],
    ):
        self._rendezvous, self._layout, self._goes_on = rendezvous, layout, goes_on
        self._signal_received, self._say = signal_received, say
        self._meeting: Meeting | None = None
        self._nodes: Nodes | None = None
        self._gangs = 0

    def meet(self, restarts: int, on_ended: Callable[[NodeEnded], None]) -> Nodes:
        """Waits for the launchers of the others, in any order."""
        previous, rendezvous = self._nodes, self._rendezvous
        first_time = rendezvous.seconds, "--startup-timeout"
        seconds, option = first_time if previous is None else (rendezvous.again, "--wait")
        wait = Wait(seconds, self._say, self._signal_received)
        if rendezvous.rank:
            connections, plan = self._join(wait, option)
        else:
            survivors = set(previous.ranks) - previous.gone if previous else set[int]()
            connections, plan = self._gather(wait, survivors, restarts)
        try:
            if "missing" in plan:
                raise MissingNodesError(
                    f"{plan['missing']} did not join at {rendezvous.address} within {seconds:g} s. Start the same "
                    f"command there, with its --node-rank and the same token, or wait longer: {option} 3600."
                    f"{plan['besides']}"
                )
            if "refused" in plan:
                raise ValueError(plan["refused"])
        except Exception:
            for connection in connections.values():
                connection.close()
            raise
        self._gangs += 1
        gang = self._gangs
        nodes = self._nodes = Nodes(rendezvous, connections, plan, gang, on_ended)
        if self._meeting is not None and self._goes_on:

            def meet_again(joined: list[int]) -> None:
                for rank in joined:
                    nodes.wait_for_end(rank, _PATIENCE)
                on_ended(NodeEnded(0, MEETS_AGAIN, f"{_in_words(joined)} joined", gang=gang))

            self._meeting.watch(meet_again)
        else:
            self.close()
        return nodes

    def close(self) -> None:
        """Stops listening."""
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def _join(self, wait: Wait, option: str) -> tuple[dict[int, socket.socket], dict[str, Any]]:
        """Connects to the first machine; returns the connection, by rank, and the first machine's plan."""
        rendezvous = self._rendezvous
        try:
            connection, plan = join(
                rendezvous.address,
                rendezvous.rank,
                lambda host: rendezvous.facts(self._layout.addresses(host)["worker"]),
                rendezvous.signer(),
                wait,
                member="node",
                stranger="the listener there has a different token, or isn't a launcher",
                host=rendezvous.host,
            )
        except ConnectionError as failure:
            raise MissingNodesError(
                f"Node {rendezvous.rank} could not reach node 0 at {rendezvous.address} within {wait.seconds:g} s: "
                f"{failure}. Start the same command there, with --node-rank 0 and the same token, open the port, or "
                f"wait longer: {option} 3600."
            ) from None
        return {0: connection}, plan

    def _gather(
        self, wait: Wait, survivors: Collection[int], restarts: int
    ) -> tuple[dict[int, socket.socket], dict[str, Any]]:
        """Waits on the first machine for the others, and tells them the plan; `survivors` have trained before."""
        rendezvous, signer = self._rendezvous, self._rendezvous.signer()
        if self._meeting is None:
            self._meeting = Meeting(
                rendezvous.address,
                wait.until,
                signer,
                rendezvous.most,
                member="node",
                stranger="has a different token",
                refuse=self._refuse,
            )
        meeting = self._meeting
        meeting.watch(None)
        began = changed = time.monotonic()
        callers = meeting.callers()
        while not self._is_complete(callers, survivors, began, changed) and wait.goes_on():
            wait.report_missing(f"node 0 waits at {rendezvous.address} for {self._missing(callers)}")
            time.sleep(LOOK)
            before, callers = callers, meeting.callers()
            changed = changed if callers.keys() == before.keys() else time.monotonic()
        callers = meeting.release()
        # Choose ports only now, so that they are still free when the workers start.
        addresses = self._layout.addresses(rendezvous.host or host_of(rendezvous.address))
        facts = {rank: caller.message["facts"] for rank, caller in callers.items()}
        if 1 + len(callers) < rendezvous.least:
            plan = {"missing": self._missing(callers), "besides": meeting.in_words()}
        else:
            plan = {**_plan({0: rendezvous.facts(addresses["worker"]), **facts}), "restarts": restarts}
        for caller in callers.values():
            caller.answer(signer, plan)
        return {rank: caller.connection for rank, caller in callers.items()}, plan

    def _refuse(self, caller: Caller) -> str:
        """Why a machine isn't admitted: two may have been given one rank, and others train, with other options."""
        keep_alive(caller.connection)
        rank, meeting = caller.message["rank"], self._meeting
        if meeting is not None and (other := meeting.callers().get(rank)):
            return f"Node {rank} has already joined, from {other.host}. Give each machine its own --node-rank, from 0."
        # Before they train, all are told of a difference.
        return _difference(self._rendezvous.facts(), rank, caller.message["facts"]) if self._nodes else ""

    def _is_complete(
        self, callers: Mapping[int, Caller], survivors: Collection[int], began: float, changed: float
    ) -> bool:
        """Whether to stop waiting: all machines have joined, or all that trained before, or none joined for a while."""
        present, now = {0, *callers}, time.monotonic()
        if len(present) < self._rendezvous.least:
            return False
        if len(present) == self._rendezvous.most or survivors and present.issuperset(survivors):
            return True
        return now - changed >= _SETTLE and (not survivors or now - began >= _SURVIVOR_SECONDS)

    def _missing(self, callers: Mapping[int, Caller]) -> str:
        """The machines that haven't joined, in words."""
        return _in_words([rank for rank in range(1, self._rendezvous.most) if rank not in callers])


def _in_words(ranks: Sequence[int]) -> str:
    """Machines, in words."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(f"node {rank}" for rank in ranks[:8]) + more


def _plan(facts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The plan: the cluster of all machines' workers, in order of ranks, or `refused` if their facts differ."""
    for rank, machine in facts.items():
        if differs := _difference(facts[0], rank, machine):
            return {"refused": differs}
    workers: list[str] = []
    firsts: dict[str, int] = {}
    for rank, machine in facts.items():
        firsts[str(rank)] = len(workers)
        workers += map(str, machine["workers"])
    return {"jobs": {"worker": workers}, "firsts": firsts, "ranks": list(facts), "run": secrets.token_hex(16)}


def _difference(first: Mapping[str, Any], rank: int, other: Mapping[str, Any]) -> str:
    """The first forbidden difference between the facts of node 0 and of another machine; empty if there is none."""
    differs = difference(first, rank, other, ("--nodes", "keras_paragrad"), "Node")
    return f"{differs}. Start all machines with the same." if differs else ""
