"""The launchers of several machines: they meet at the first one's, and end together."""

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras_paragrad
from keras_paragrad.distribution.launch.tasks import Layout, Place
from keras_paragrad.distribution.listening import host_of, listen_at, port_of
from keras_paragrad.distribution.rendezvous_server import LONGEST, Caller, MessageSigner, RendezvousServer

# Seconds between two looks for a signal, and between two lines about who is waited for.
_LOOK, _REPEATED = 0.2, 30.0
# Without an answer, a machine is given up after about 25 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class NodeEnded(NamedTuple):
    """Event: the launcher of another machine has ended, or its connection was lost.

    Attributes:
        node: The machine's rank.
        status: The exit status; 0 if all of its workers are done.
        reason: Why, if it isn't 0.
    """

    node: int
    status: int
    reason: str


class StoppedError(Exception):
    """The launcher received a signal before all machines had come, as `number`."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Meeting:
    """Where the launchers of several machines meet.

    Attributes:
        nodes: The number of machines.
        rank: The rank of this one.
        address: `host:port` on the first machine.
        token: The token that signs their messages.
        seconds: How long to wait for the others.
        host: This machine's address, at which the others reach its workers; by default the address of its connection.
    """

    nodes: int
    rank: int
    address: str
    token: str
    seconds: float
    host: str | None = None

    def signer(self, run: str = "") -> MessageSigner:
        """The signer of messages: before the machines have met, or of a run."""
        return MessageSigner(self.derived_key(f"nodes {run}").encode())

    def derived_key(self, purpose: str) -> str:
        """A key for one purpose, from which the token can't be found."""
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


class Nodes:
    """The connections to the other machines' launchers, and this machine's place. The first has one to each.

    Args:
        meeting: Where they met.
        connections: The connections, by rank.
        plan: What the first machine has told all: `jobs`, `firsts` and `run`.
        on_ended: Called, in another thread, when another launcher has ended.
    """

    def __init__(
        self,
        meeting: Meeting,
        connections: Mapping[int, socket.socket],
        plan: Mapping[str, Any],
        on_ended: Callable[[NodeEnded], None],
    ):
        self.place = Place(plan["jobs"], meeting.derived_key(f"workers {plan['run']}"), plan["firsts"][meeting.rank])
        self._rank = meeting.rank
        self._signer = meeting.signer(plan["run"])
        self._connections = dict(connections)
        self._on_ended = on_ended
        self._telling_lock = threading.Lock()
        self._failed = False
        # Who the others hear from through this machine.
        self._running = set(connections) if meeting.rank == 0 else set[int]()
        for rank, connection in connections.items():
            connection.settimeout(None)
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()

    @property
    def running(self) -> bool:
        """On the first machine, whether another one's workers still run."""
        return bool(self._running)

    def end(self, status: int, reason: str = "") -> None:
        """Tells the others that this machine's workers are done, or have failed."""
        self._tell(NodeEnded(self._rank, status, reason))

    def close(self) -> None:
        """Closes the connections, once the others have read what was sent."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()

    def _tell(self, ended: NodeEnded) -> None:
        """Sends an end to all others but the one that it is about; the first failure alone."""
        with self._telling_lock:
            if self._failed:
                return
            self._failed = ended.status != 0
            line = self._signer.sign({"node": ended.node, "status": ended.status, "reason": ended.reason})
            for rank, connection in self._connections.items():
                if rank != ended.node:
                    with contextlib.suppress(OSError):
                        connection.sendall(line)

    def _listen(self, rank: int, connection: socket.socket) -> None:
        """Reads what another launcher says, until it has ended."""
        ended = None
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            while (ended is None or ended.status == 0) and (line := lines.readline(LONGEST)):
                message = self._signer.verify(line)
                if message is not None:
                    ended = NodeEnded(int(message["node"]), int(message["status"]), str(message["reason"]))
        if ended is None:
            ended = NodeEnded(rank, 1, "was lost: its launcher was killed, its machine is down, or the network failed")
        self._running.discard(rank)
        if ended.status and self._rank == 0:
            self._tell(ended)
        self._on_ended(ended)


def meet(
    meeting: Meeting,
    layout: Layout,
    signal_received: Callable[[], int],
    say: Callable[[str], None],
    on_ended: Callable[[NodeEnded], None],
) -> Nodes:
    """Waits until the launchers of all machines have come, in any order.

    Args:
        meeting: Where they meet.
        layout: The processes of this machine.
        signal_received: The number of a signal, or 0.
        say: Prints a message.
        on_ended: Called, in another thread, when another launcher has ended.

    Raises:
        ConnectionError: Some haven't come in time. The message, on all that have, names them.
        ValueError: They were started with different options; or two with one rank.
        StoppedError: The launcher received a signal.
    """
    wait = _Wait(meeting, signal_received, say)
    connections, plan = _gather(meeting, layout, wait) if meeting.rank == 0 else _join(meeting, layout, wait)
    try:
        if "missing" in plan:
            raise ConnectionError(
                f"{plan['missing']} did not come to {meeting.address} within {meeting.seconds:g} s. Start the same "
                "command there, with its --node-rank and the same token, or wait longer: --startup-timeout 3600."
                f"{plan['besides']}"
            )
        if "refused" in plan:
            raise ValueError(plan["refused"])
    except Exception:
        for connection in connections.values():
            connection.close()
        raise
    return Nodes(meeting, connections, plan, on_ended)


class _Wait:
    """The time that is left for the machines to meet, and what is said meanwhile."""

    def __init__(self, meeting: Meeting, signal_received: Callable[[], int], say: Callable[[str], None]):
        self.until = time.monotonic() + meeting.seconds
        self._signal_received = signal_received
        self._say = say
        self._said = ""
        self._at = 0.0

    def goes_on(self) -> bool:
        """Whether there is time left.

        Raises:
            StoppedError: The launcher received a signal.
        """
        if number := self._signal_received():
            raise StoppedError(number)
        return time.monotonic() < self.until

    def for_whom(self, what: str) -> None:
        """Says what is waited for: at once, and every half a minute."""
        if what != self._said or time.monotonic() - self._at > _REPEATED:
            self._said, self._at = what, time.monotonic()
            self._say(what)


class _NodeServer(RendezvousServer):
    """Admits each machine once, since two may have been given one rank."""

    def admit(self, caller: Caller, rank: int) -> None:
        if rank not in self.callers:
            _keep_alive(caller.connection)
            super().admit(caller, rank)
            return
        first = self.callers[rank].host
        refusal = f"Node {rank} has come already, from {first}. Give each machine its own --node-rank, from 0."
        _answer(caller, self._signer, {"refused": refusal})
        caller.message = {}
        self._reject(caller, f"has the rank of node {rank}, which has come from {first}")

    def release(self) -> dict[int, Caller]:
        """Hands over the connections of the machines that have come, which stay open."""
        callers, self.callers = self.callers, {}
        for caller in callers.values():
            self._selector.unregister(caller.connection)
        return callers


def _gather(meeting: Meeting, layout: Layout, wait: _Wait) -> tuple[dict[int, socket.socket], dict[str, Any]]:
    """The first machine's side: waits for the others, and tells them the plan."""
    elsewhere = ["another machine:1"] * (meeting.nodes > 1)
    servers = listen_at(meeting.address, elsewhere, wait.until, "Node 0", "--rendezvous")
    signer = meeting.signer()
    with (
        selectors.DefaultSelector() as selector,
        _NodeServer(selector, servers, signer, meeting.nodes, "node", "has another token") as server,
    ):
        while (missing := _missing(meeting, server)) and wait.goes_on():
            wait.for_whom(f"node 0 waits at {meeting.address} for {missing}")
            server.wait(_LOOK)
        # Only now, so that the ports are still free when the workers start.
        of_this_node = _facts(meeting, layout.addresses(meeting.host or host_of(meeting.address)))
        facts = {0: of_this_node, **{rank: caller.message["facts"] for rank, caller in sorted(server.callers.items())}}
        plan = {"missing": missing, "besides": server.in_words()} if missing else _plan(facts)
        server.stop_listening()
        callers = server.release()
    for caller in callers.values():
        _answer(caller, signer, plan)
    return {rank: caller.connection for rank, caller in callers.items()}, plan


def _missing(meeting: Meeting, server: RendezvousServer) -> str:
    """The machines that haven't come, in words."""
    ranks = [rank for rank in range(1, meeting.nodes) if rank not in server.callers]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(f"node {rank}" for rank in ranks[:8]) + more


def _facts(meeting: Meeting, addresses: Mapping[str, list[str]]) -> dict[str, Any]:
    """What a machine tells the first one: what has to be the same, and its workers' addresses."""
    return {"--nodes": meeting.nodes, "keras_paragrad": keras_paragrad.__version__, "workers": addresses["worker"]}


def _plan(facts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The cluster of all machines' workers, in order of ranks; or what differs between them."""
    for name in ("--nodes", "keras_paragrad"):
        for rank, each in facts.items():
            if each.get(name) != facts[0][name]:
                differs = f"Node 0 has {name} {facts[0][name]}, and node {rank} {each.get(name)}."
                return {"refused": f"{differs} Start all machines with the same."}
    workers = [list(map(str, each["workers"])) for each in facts.values()]
    firsts = [sum(map(len, workers[:rank])) for rank in range(len(workers))]
    return {"jobs": {"worker": sum(workers, [])}, "firsts": firsts, "run": secrets.token_hex(16)}


def _answer(caller: Caller, signer: MessageSigner, plan: Mapping[str, Any]) -> None:
    """Tells a machine the plan, with its own number, so that no answer to another can be taken for it."""
    with contextlib.suppress(OSError):
        caller.connection.settimeout(10)
        caller.connection.sendall(signer.sign({**plan, "number": caller.message.get("number")}))


def _join(meeting: Meeting, layout: Layout, wait: _Wait) -> tuple[dict[int, socket.socket], dict[str, Any]]:
    """Another machine's side: finds the first, and waits for its plan."""
    signer, failure = meeting.signer(), "no answer"
    source = None if meeting.host is None else (meeting.host, 0)
    here = host_of(meeting.address), port_of(meeting.address)
    while wait.goes_on():
        connection = None
        try:
            connection = socket.create_connection(here, timeout=5, source_address=source)
            _keep_alive(connection)
            host = meeting.host or str(connection.getsockname()[0]).partition("%")[0]
            number = secrets.token_hex(8)
            message = {"rank": meeting.rank, "number": number, "facts": _facts(meeting, layout.addresses(host))}
            connection.sendall(signer.sign(message))
            wait.for_whom(f"node {meeting.rank} has reached node 0 at {meeting.address}, and waits for all to come")
            line = _read_line(connection, wait)
            answer = signer.verify(line) or {}
            if answer.get("number") == number:
                return {0: connection}, answer
            failure = (
                "who listens there has another token, or is no launcher" if line else "it has ended, or waits no more"
            )
        except OSError as error:
            failure = str(error)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if connection is not None:
            connection.close()
        wait.for_whom(f"node {meeting.rank} waits for node 0 at {meeting.address}: {failure}")
        time.sleep(_LOOK)
    raise ConnectionError(
        f"Node {meeting.rank} could not reach node 0 at {meeting.address} within {meeting.seconds:g} s: {failure}. "
        "Start the same command there, with --node-rank 0 and the same token, open the port, or wait longer: "
        "--startup-timeout 3600."
    )


def _read_line(connection: socket.socket, wait: _Wait) -> bytes:
    """Reads a line, byte by byte so that nothing after it is lost; what there is, if the other side closes."""
    line = b""
    connection.settimeout(_LOOK)
    # The first machine says who is missing a little after its deadline.
    while not line.endswith(b"\n") and len(line) <= LONGEST and (wait.goes_on() or time.monotonic() < wait.until + 10):
        with contextlib.suppress(TimeoutError):
            received = connection.recv(1)
            if not received:
                break
            line += received
    return line


def _keep_alive(connection: socket.socket) -> None:
    """Has the kernel notice that the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
