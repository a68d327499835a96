"""The launchers of several machines, or nodes: they meet on the first machine, end together, and meet again.

Each machine runs a gang, its own workers. When all meet again, they start new gangs.
"""

import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_paragrad.distribution.launch.rendezvous_host import RendezvousHost, nodes_in_words
from keras_paragrad.distribution.launch.rendezvous_settings import (
    LOOK,
    MissingNodesError,
    RendezvousSettings,
    Wait,
    keep_alive,
    node_facts,
)
from keras_paragrad.distribution.launch.tasks import Layout, Place
from keras_paragrad.distribution.listening import host_of, port_of
from keras_paragrad.distribution.rendezvous_server import LONGEST

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

    Args:
        rendezvous: Where they met.
        connections: The connections, by rank.
        plan: The first machine's message to all: the addresses of the cluster's `jobs`, the index of each machine's
            first worker (`firsts`), the machines' `ranks`, the number of `restarts`, and an identifier of the `run`.
        gang: The number of this machine's gang.
        on_ended: Called, in another thread, when another launcher reports how its workers ended, or is lost.

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

    Args:
        rendezvous: Where they meet.
        layout: The processes of this machine.
        goes_on: Whether they meet again.
        signal_received: The number of a signal, or 0.
        say: Prints a message.
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
        self._host = RendezvousHost(rendezvous) if rendezvous.rank == 0 else None
        self._nodes: Nodes | None = None
        self._gangs = 0

    def meet(self, restarts: int, on_ended: Callable[[NodeEnded], None]) -> Nodes:
        """Waits for the launchers of the others, in any order.

        Args:
            restarts: How often all have been restarted after a failure; the first machine's number counts.
            on_ended: Called, in another thread, when another launcher has ended, or another one has joined.

        Raises:
            MissingNodesError: Some machines didn't connect in time.
            ConnectionError: The first machine can't listen.
            ValueError: The machines were started with different options, or two with the same rank.
            StoppedError: The launcher received a signal.
        """
        previous, rendezvous = self._nodes, self._rendezvous
        first_time = rendezvous.seconds, "--startup-timeout"
        seconds, option = first_time if previous is None else (rendezvous.again, "--wait")
        wait = Wait(seconds, option, self._signal_received, self._say)
        if self._host is None:
            connections, plan = _join(rendezvous, self._layout, wait)
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

    def close(self) -> None:
        """Stops listening."""
        if self._host is not None:
            self._host.close()


def _join(
    rendezvous: RendezvousSettings, layout: Layout, wait: Wait
) -> tuple[dict[int, socket.socket], dict[str, Any]]:
    """Connects to the first machine, retrying; returns the connection, by rank, and the first machine's plan."""
    signer, failure = rendezvous.signer(), "no answer"
    source = None if rendezvous.host is None else (rendezvous.host, 0)
    first_machine = host_of(rendezvous.address), port_of(rendezvous.address)
    while wait.goes_on():
        connection = None
        try:
            connection = socket.create_connection(first_machine, timeout=5, source_address=source)
            keep_alive(connection)
            host = rendezvous.host or str(connection.getsockname()[0]).partition("%")[0]
            number = secrets.token_hex(8)
            # Node 0 repeats the number, so that an answer to another machine can't be taken for this one's.
            message = {
                "rank": rendezvous.rank,
                "number": number,
                "facts": node_facts(rendezvous, layout.addresses(host)),
            }
            connection.sendall(signer.sign(message))
            wait.report_missing(
                f"node {rendezvous.rank} has reached node 0 at {rendezvous.address}, and waits for all to join"
            )
            line = _read_line(connection, wait)
            answer = signer.verify(line) or {}
            if answer.get("number") == number:
                return {0: connection}, answer
            failure = (
                "the listener there has a different token, or isn't a launcher"
                if line
                else "it has ended, or waits no more"
            )
        except OSError as error:
            failure = str(error)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if connection is not None:
            connection.close()
        wait.report_missing(f"node {rendezvous.rank} waits for node 0 at {rendezvous.address}: {failure}")
        time.sleep(LOOK)
    raise MissingNodesError(
        f"Node {rendezvous.rank} could not reach node 0 at {rendezvous.address} within {wait.seconds:g} s: {failure}. "
        "Start the same command there, with --node-rank 0 and the same token, open the port, or wait longer: "
        f"{wait.option} 3600."
    )


def _read_line(connection: socket.socket, wait: Wait) -> bytes:
    """Reads a line, byte by byte so that nothing after it is lost; what there is, if the other side closes."""
    line = b""
    connection.settimeout(LOOK)
    # The first machine says who is missing a little after its deadline.
    while not line.endswith(b"\n") and len(line) <= LONGEST and (wait.goes_on() or time.monotonic() < wait.until + 10):
        with contextlib.suppress(TimeoutError):
            received = connection.recv(1)
            if not received:
                break
            line += received
    return line
