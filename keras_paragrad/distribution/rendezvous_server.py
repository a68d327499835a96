"""The rendezvous of workers, and of several machines' launchers: `RendezvousServer` on the first, `join` on the others.

Each sends one signed message, with its `rank` and its `facts`, which have to agree; the first answers all.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from keras_paragrad.distribution.cluster import Cluster, cluster_kinds
from keras_paragrad.distribution.launch.tasks import TOKEN
from keras_paragrad.distribution.listening import host_of, port_of

LONGEST = 65536
_CODE_BYTES = 64
_LONGEST_FACT = 2000
# Seconds between two looks for a signal, and between two lines about missing ones.
LOOK, _REPEATED = 0.2, 30.0
# A machine that doesn't answer counts as lost after about 25 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class MessageSigner:
    """Writes and reads the messages of one run.

    A message is a line: an HMAC-SHA256 in hexadecimal, a space, and JSON. The JSON is parsed only after the code is
    verified, in constant time; the key is never sent.

    Example:

    >>> from keras_paragrad.distribution.rendezvous_server import MessageSigner
    >>> line = MessageSigner(b"one").sign({"rank": 1})
    >>> MessageSigner(b"one").verify(line), MessageSigner(b"another").verify(line)
    ({'rank': 1}, None)
    """

    def __init__(self, key: bytes):
        self._key = key

    @classmethod
    def of(cls, cluster: Cluster, environment: Mapping[str, str]) -> "MessageSigner":
        """The signer of a run, keyed by `KERAS_PARAGRAD_TOKEN` if set, else by the cluster's description."""
        token = environment.get(TOKEN)
        if token:
            return cls(token.encode())
        names = [name for kind in cluster_kinds() if kind.source == cluster.source for name in kind.run_variables]
        variables = {name: environment[name] for name in names if name in environment}
        return cls(hashlib.sha256(json.dumps([cluster.jobs, variables], sort_keys=True).encode()).digest())

    def sign(self, message: Mapping[str, object]) -> bytes:
        """A message as a line."""
        body = json.dumps(message).encode()
        line = self._code(body) + b" " + body + b"\n"
        if len(line) > LONGEST:
            raise ValueError(f"A message has {len(line)} bytes; at most {LONGEST} can be sent.")
        return line

    def verify(self, line: bytes) -> dict[str, Any] | None:
        """The message in a line; `None` if it is of another run."""
        code, _, body = line.rstrip(b"\n").partition(b" ")
        if len(code) != _CODE_BYTES or not hmac.compare_digest(code, self._code(body)):
            return None
        message = json.loads(body)
        return message if isinstance(message, dict) else None

    def _code(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()


_log = logging.getLogger("keras_paragrad")
# Seconds that a caller has to identify itself.
_PATIENCE = 10.0


@dataclass
class Caller:
    """A connection and the data received on it.

    Attributes:
        connection: The connection.
        host: The peer's host.
        connected_at: When it connected, by `time.monotonic()`.
        received: The bytes received.
        message: The message, once verified as one of this run.
    """

    connection: socket.socket
    host: str
    connected_at: float = field(default_factory=time.monotonic)
    received: bytes = b""
    message: dict[str, Any] = field(default_factory=dict)


class RendezvousServer:
    """Accepts the workers' connections and reads their messages, all at once, so that none blocks the others.

    Attributes:
        callers: The workers that have connected, by rank.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        servers: Sequence[socket.socket],
        signer: MessageSigner,
        workers: int,
        member: str = "worker",
        stranger: str = "belongs to another run or has another cluster description",
    ) -> None:
        self._member = member
        self._stranger = stranger
        self.callers: dict[int, Caller] = {}
        self._selector = selector
        self._servers = list(servers)
        self._signer = signer
        self._workers = workers
        self._unidentified: list[Caller] = []
        self._rejections: dict[str, int] = {}
        self._disconnected: list[int] = []
        for server in self._servers:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_listening()
        for caller in [*self._unidentified, *self.callers.values()]:
            self._close(caller)

    def wait(self, seconds: float) -> None:
        """Waits for connections and data, and handles them."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept(cast("socket.socket", key.fileobj))
            else:
                self._receive(key.data)
        for caller in [
            connection for connection in self._unidentified if time.monotonic() - connection.connected_at > _PATIENCE
        ]:
            self._reject(caller, "sent no message of this run")

    def stop_listening(self) -> None:
        """Stops accepting connections."""
        for server in self._servers:
            self._selector.unregister(server)
            server.close()
        self._servers = []

    def in_words(self) -> str:
        """The rejected callers, to append to an error message; empty if there were none."""
        parts = [f"{why} ({count} times)" if count > 1 else why for why, count in list(self._rejections.items())[:4]]
        parts += [
            f"{self._member} {rank} connected and disconnected again"
            for rank in sorted(set(self._disconnected) - set(self.callers))
        ]
        return f" Also: {'; '.join(parts)}." if parts else ""

    def _accept(self, server: socket.socket) -> None:
        """Accepts a connection, which has to identify itself."""
        try:
            connection, address = server.accept()
        except OSError:
            # The peer has already disconnected.
            return
        connection.setblocking(False)
        caller = Caller(connection, str(address[0]))
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._unidentified.append(caller)

    def _receive(self, caller: Caller) -> None:
        """Reads from a connection; a worker that has identified itself is expected to send nothing more."""
        try:
            received = caller.connection.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if caller.message:
            # After its message, it has disconnected or sent too much.
            self._disconnected.append(caller.message["rank"])
            del self.callers[caller.message["rank"]]
            self._close(caller)
            return
        caller.received += received
        if caller.received.endswith(b"\n") or not received or len(caller.received) > LONGEST:
            self._identify(caller)

    def _identify(self, caller: Caller) -> None:
        """Admits the sender of a message that is signed by a worker of this run, and rejects any other."""
        message = self._signer.verify(caller.received) if len(caller.received) <= LONGEST else None
        rank = message.get("rank") if message else None
        is_worker = isinstance(rank, int) and 0 < rank < self._workers and isinstance(message.get("facts"), dict)  # pyright: ignore
        if not is_worker or message is None:
            self._reject(caller, self._stranger)
            return
        caller.message = message
        self.admit(caller, message["rank"])

    def admit(self, caller: Caller, rank: int) -> None:
        """Adds a worker that has identified itself to `callers`, in place of its earlier connection, if any."""
        before = self.callers.pop(rank, None)
        if before is not None:
            # The worker was restarted.
            self._close(before)
        self._unidentified.remove(caller)
        self.callers[rank] = caller

    def _reject(self, caller: Caller, why: str) -> None:
        """Closes a connection, and logs why, once for each reason."""
        reason = f"a connection from {caller.host} {why}"
        if reason not in self._rejections and len(self._rejections) < 100:
            _log.warning("The first %s rejected a connection and keeps waiting: %s.", self._member, reason)
            self._rejections[reason] = 0
        self._rejections[reason] = self._rejections.get(reason, 0) + 1
        self._unidentified.remove(caller)
        # A misconfigured peer sees an answer of another run, and reports that.
        with contextlib.suppress(OSError):
            caller.connection.send(b"another run\n")
        self._close(caller)

    def _close(self, caller: Caller) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.connection)
        caller.connection.close()


def answer(caller: Caller, signer: MessageSigner, message: Mapping[str, object]) -> None:
    """Answers with the caller's own number, so that no answer to another can be taken for it."""
    with contextlib.suppress(OSError):
        caller.connection.settimeout(_PATIENCE)
        caller.connection.sendall(signer.sign({**message, "number": caller.message.get("number")}))


def difference(first: Mapping[str, Any], rank: int, other: Mapping[str, Any], names: Iterable[str], member: str) -> str:
    """The first difference between the facts of the first and of another, in words; empty if there is none."""
    for name in names:
        if other.get(name) != first[name]:
            mine, others = (str(facts.get(name))[:_LONGEST_FACT] for facts in (first, other))
            return f"{member} 0 has {name} {mine}, and {member.lower()} {rank} {others}"
    return ""


class StoppedError(Exception):
    """A signal was received before all had joined, as `number`."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Wait:
    """A wait for others: its deadline, and reports of who is missing.

    Attributes:
        seconds: How long to wait.
        until: The deadline, by `time.monotonic`.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[str], None],
        signal_received: Callable[[], int] = lambda: 0,
        quiet: float = 0.0,
    ):
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self._say, self._signal_received = say, signal_received
        self._said, self._not_before = "", time.monotonic() + quiet

    def goes_on(self) -> bool:
        """Whether there is time left."""
        if number := self._signal_received():
            raise StoppedError(number)
        return time.monotonic() < self.until

    def report_missing(self, what: str) -> None:
        """Says who is missing, and the same again every half a minute."""
        now = time.monotonic()
        if now >= self._not_before and (what != self._said or now >= self._not_before + _REPEATED):
            self._said, self._not_before = what, now
            self._say(what)


def join(
    address: str,
    rank: int,
    facts_at: Callable[[str], Mapping[str, object]],
    signer: MessageSigner,
    wait: Wait,
    names: tuple[str, str, str],
    host: str | None = None,
) -> tuple[socket.socket, dict[str, Any]]:
    """Connects to the first, retrying; returns the connection and the answer."""
    # Its own name, the first one's name, and why an answer may not be signed by the first one.
    own, first, stranger = names
    failure = "no answer"
    while wait.goes_on():
        with contextlib.ExitStack() as stack:
            try:
                source = None if host is None else (host, 0)
                connection = socket.create_connection((host_of(address), port_of(address)), 5, source)
                stack.callback(connection.close)
                keep_alive(connection)
                facts = facts_at(host or str(connection.getsockname()[0]).partition("%")[0])
                number = secrets.token_hex(8)
                connection.sendall(signer.sign({"rank": rank, "number": number, "facts": facts}))
                wait.report_missing(f"{own} has reached {first} at {address}, and waits for all to join")
                line = _read_line(connection, wait)
                answered = signer.verify(line) or {}
                if answered.get("number") == number:
                    stack.pop_all()
                    return connection, answered
                failure = stranger if line else "it has ended, or waits no more"
            except OSError as error:
                failure = str(error)
        wait.report_missing(f"{own} waits for {first} at {address}: {failure}")
        time.sleep(LOOK)
    raise ConnectionError(failure)


def _read_line(connection: socket.socket, wait: Wait) -> bytes:
    """Reads a line, byte by byte so that nothing after it is lost; what there is, if the other side closes."""
    line = b""
    connection.settimeout(LOOK)
    # The first says who is missing a little after its deadline.
    while not line.endswith(b"\n") and len(line) <= LONGEST and (wait.goes_on() or time.monotonic() < wait.until + 10):
        with contextlib.suppress(TimeoutError):
            received = connection.recv(1)
            if not received:
                break
            line += received
    return line


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel notice when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
