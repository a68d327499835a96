"""The launchers of several machines, or nodes: they meet on the first machine, end together, and meet again.

Each machine runs a gang, its own workers. When all meet again, they start new gangs.
"""

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_paragrad.distribution.launch.rendezvous_host import (
    MissingNodesError,
    RendezvousHost,
    RendezvousSettings,
    node_facts,
    nodes_in_words,
)
from keras_paragrad.distribution.launch.tasks import Layout, Place
from keras_paragrad.distribution.rendezvous_server import LONGEST, Wait, join

# The status of a gang that ends in order to meet again; no process has it.
MEETS_AGAIN = -1
# Seconds after which a machine that connects again is assumed to have lost its connection.
_PATIENCE = 5.0


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
        # The plan is the first machine's message to all: see `rendezvous_host`.
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
    """Meets the launchers of the other machines: once, or again after each failure and when another machine comes."""

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
        self._host = RendezvousHost(rendezvous) if rendezvous.rank == 0 else None
        self._nodes: Nodes | None = None
        self._gangs = 0

    def meet(self, restarts: int, on_ended: Callable[[NodeEnded], None]) -> Nodes:
        """Waits for the launchers of the others, in any order."""
        previous, rendezvous = self._nodes, self._rendezvous
        first_time = rendezvous.seconds, "--startup-timeout"
        seconds, option = first_time if previous is None else (rendezvous.again, "--wait")
        wait = Wait(seconds, self._say, self._signal_received)
        if self._host is None:
            connections, plan = self._join(wait, option)
        else:
            survivors = set(previous.ranks) - previous.gone if previous else set[int]()
            connections, plan = self._host.gather(self._layout, wait, survivors, restarts)
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
        if self._host is not None and self._goes_on:

            def meet_again(joined: list[int]) -> None:
                for rank in joined:
                    nodes.wait_for_end(rank, _PATIENCE)
                on_ended(NodeEnded(0, MEETS_AGAIN, f"{nodes_in_words(joined)} joined", gang=gang))

            self._host.watch(meet_again)
        elif self._host is not None:
            self._host.close()
        return nodes

    def _join(self, wait: Wait, option: str) -> tuple[dict[int, socket.socket], dict[str, Any]]:
        """Connects to the first machine; returns the connection, by rank, and the first machine's plan."""
        rendezvous = self._rendezvous
        names = f"node {rendezvous.rank}", "node 0", "the listener there has a different token, or isn't a launcher"
        facts_at = lambda host: node_facts(rendezvous, self._layout.addresses(host))  # noqa: E731
        try:
            connection, plan = join(
                rendezvous.address, rendezvous.rank, facts_at, rendezvous.signer(), wait, names, rendezvous.host
            )
        except ConnectionError as failure:
            raise MissingNodesError(
                f"Node {rendezvous.rank} could not reach node 0 at {rendezvous.address} within {wait.seconds:g} s: "
                f"{failure}. Start the same command there, with --node-rank 0 and the same token, open the port, or "
                f"wait longer: {option} 3600."
            ) from None
        return {0: connection}, plan

    def close(self) -> None:
        """Stops listening."""
        if self._host is not None:
            self._host.close()
