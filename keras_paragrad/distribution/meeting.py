"""The rendezvous of workers, and of several machines' launchers: `Meeting` on the first, `join` on the others.

Each sends one signed message, with its `rank` and its `facts`, which have to agree; the first answers all. Imports no
TensorFlow.
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_paragrad.distribution.cluster import Cluster, cluster_kinds
from keras_paragrad.distribution.launch.tasks import TOKEN

_log = logging.getLogger("keras_paragrad")
LONGEST = 65536
_CODE_BYTES = 64
_LONGEST_FACT = 2000
# Seconds between two looks for a signal, and between two lines about missing ones.
LOOK, _REPEATED = 0.2, 30.0
# Seconds that a caller has to identify itself.
_PATIENCE = 10.0
# A machine that doesn't answer counts as lost after about 25 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class MessageSigner:
    """Writes and reads the messages of one run.

    A message is a line: an HMAC-SHA256 in hexadecimal, a space, and JSON. The JSON is parsed only after the code is
    verified, in constant time; the key is never sent.

    Example:

    >>> from keras_paragrad.distribution.meeting import MessageSigner
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


@dataclass(frozen=True)
class Caller:
    """A connection of one that has identified itself.

    Attributes:
        connection: The connection.
        host: The peer's host.
        message: Its message.
    """

    connection: socket.socket
    host: str
    message: Mapping[str, Any]

    def is_there(self) -> bool:
        """Whether it waits for the answer; one that has disconnected, or has said more, doesn't."""
        self.connection.setblocking(False)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def answer(self, signer: MessageSigner, message: Mapping[str, object]) -> None:
        """Answers with the caller's own number, so that no answer to another can be taken for it."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_PATIENCE)
            self.connection.sendall(signer.sign({**message, "number": self.message.get("number")}))


class Meeting(socketserver.ThreadingTCPServer):
    """Listens on the first, and admits the others, each in a thread, so that none keeps the others waiting.

    Args:
        address: `host:port` to listen at.
        until: When to give up waiting for a port that is in use, by `time.monotonic`.
        signer: The signer of the run's messages.
        members: How many meet, with the first.
        member: What one is called in messages: "worker" or "node".
        stranger: Why a connection is rejected whose message isn't signed by this run.
        refuse: Why a caller with a signed message is refused, which is told of it; empty to admit it.

    Raises:
        ConnectionError: The address can't be listened at.
    """

    daemon_threads = True

    def __init__(
        self,
        address: str,
        until: float,
        signer: MessageSigner,
        members: int,
        *,
        member: str = "worker",
        stranger: str = "belongs to another run or has another cluster description",
        refuse: Callable[[Caller], str] = lambda caller: "",
    ):
        super().__init__(("", 0), socketserver.BaseRequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = _listen(address, until, f"The first {member}")
        self._signer, self._members, self._member, self._stranger = signer, members, member, stranger
        self._refuse = refuse
        self._on_joined: Callable[[list[int]], None] | None = None
        self._mutex = threading.RLock()
        self._callers: dict[int, Caller] = {}
        self._rejections: Counter[str] = Counter()
        self._gone: set[int] = set()
        threading.Thread(target=self.serve_forever, args=(LOOK / 4,), daemon=True).start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Reads a caller's message, and admits or rejects it."""
        host = str(client_address[0]).removeprefix("::ffff:")
        line = b""
        try:
            request.settimeout(_PATIENCE)
            while not line.endswith(b"\n") and len(line) <= LONGEST and (received := request.recv(LONGEST)):
                line += received
            message = self._signer.verify(line) if len(line) <= LONGEST else None
        except TimeoutError:
            self._reject(request, f"a connection from {host} sent no message of this run")
            return
        except OSError:
            message = None
        rank = message.get("rank") if message else None
        if message is None or not isinstance(rank, int) or not 0 < rank < self._members or "facts" not in message:
            self._reject(request, f"a connection from {host} {self._stranger}")
            return
        caller = Caller(request, host, message)
        with self._mutex:
            if refusal := self._refuse(caller):
                caller.answer(self._signer, {"refused": refusal})
                self._reject(request, f"a connection from {host} was refused: {refusal.rstrip('.')}")
                return
            if rank in self._callers:
                # The worker was restarted.
                self._callers[rank].connection.close()
            self._callers[rank] = caller
            on_joined = self._on_joined
        if on_joined is not None:
            self.watch(on_joined)

    def callers(self) -> dict[int, Caller]:
        """Those that have joined and are still there, by rank."""
        with self._mutex:
            for rank in [rank for rank, caller in self._callers.items() if not caller.is_there()]:
                self._callers.pop(rank).connection.close()
                self._gone.add(rank)
            return dict(sorted(self._callers.items()))

    def watch(self, on_joined: Callable[[list[int]], None] | None) -> None:
        """Has a function called once, in a thread, with the ranks of the first that join; `None` for no function."""
        with self._mutex:
            ranks = sorted(self.callers()) if on_joined is not None else []
            self._on_joined = None if ranks else on_joined
        if on_joined is not None and ranks:
            threading.Thread(target=on_joined, args=(ranks,), daemon=True).start()

    def release(self) -> dict[int, Caller]:
        """Hands over the connections of those that have joined."""
        with self._mutex:
            callers, self._callers = self.callers(), {}
            return callers

    def close(self) -> None:
        """Stops listening, so that the port is free, and turns those away that were not released."""
        self.shutdown()
        self.server_close()
        for caller in self.release().values():
            caller.connection.close()

    def in_words(self) -> str:
        """The rejected callers, to append to an error message; empty if there were none."""
        with self._mutex:
            parts = [f"{why} ({n} times)" if n > 1 else why for why, n in list(self._rejections.items())[:4]]
            gone = sorted(self._gone - self._callers.keys())
        parts += [f"{self._member} {rank} connected and disconnected again" for rank in gone]
        return f" Also: {'; '.join(parts)}." if parts else ""

    def _reject(self, connection: socket.socket, why: str) -> None:
        """Closes a connection, and logs why, once for each reason."""
        with self._mutex:
            if why not in self._rejections and len(self._rejections) < 100:
                _log.warning("The first %s rejected a connection and keeps waiting: %s.", self._member, why)
            self._rejections[why] += 1
        # A misconfigured peer sees an answer of another run, and reports that.
        with contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE)
            connection.send(b"another run\n")
        connection.close()


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])


def _listen(address: str, until: float, who: str) -> socket.socket:
    """Listens at an IP address of this machine.

    Where the address is a name, which may stand for another address on other machines, or isn't one of this machine, as
    behind NAT, it listens on all interfaces.
    """
    host, port = host_of(address), port_of(address)
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host.partition("%")[0]).version == 6 else socket.AF_INET
    except ValueError:
        host = ""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    while True:
        try:
            dualstack = not host and family == socket.AF_INET6
            return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=dualstack)
        except OSError as error:
            if host and error.errno == errno.EADDRNOTAVAIL:
                _log.warning(
                    "%s listens on port %d of all interfaces, as %s is no address of this machine.", who, port, host
                )
                host = ""
            elif error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise ConnectionError(
                    f"{who} can't listen on {address}: {error}. Free the port, or use an address of this machine."
                ) from error
        time.sleep(LOOK)


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
    *,
    member: str,
    stranger: str,
    host: str | None = None,
) -> tuple[socket.socket, dict[str, Any]]:
    """Connects to the first, retrying; returns the connection and the answer.

    Args:
        address: The first one's.
        rank: Of this one.
        facts_at: Returns its facts, given its own host.
        signer: The signer of the run's messages.
        wait: How long to try.
        member: What the two are called in messages.
        stranger: Why an answer may not be signed by the first.
        host: The host to connect from, if not the one that the system chooses.

    Raises:
        ConnectionError: There was no answer in time. The message says why.
    """
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
                wait.report_missing(f"{member} {rank} has reached {member} 0 at {address}, and waits for all to join")
                line = _read_line(connection, wait)
                answered = signer.verify(line) or {}
                if answered.get("number") == number:
                    stack.pop_all()
                    return connection, answered
                failure = stranger if line else "it has ended, or waits no more"
            except OSError as error:
                failure = str(error)
        wait.report_missing(f"{member} {rank} waits for {member} 0 at {address}: {failure}")
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
