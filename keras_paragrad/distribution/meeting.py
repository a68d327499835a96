"""`Meeting`: the rendezvous of workers, or of several machines' launchers, on the first of them. Others `join` it.

Each sends one signed message, with its `rank` and its `facts`, which have to agree; the first answers all.
"""

import contextlib
import errno
import ipaddress
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_paragrad.distribution.messages import LONGEST, LOOK, MessageSigner, host_of, port_of

_log = logging.getLogger("keras_paragrad")
# Seconds that a caller has to identify itself.
_PATIENCE = 10.0


@dataclass(frozen=True)
class Caller:
    """A connection of one that has identified itself by a message, and its host."""

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

    Until `until`, by `time.monotonic`, it waits for a port that is in use. `members` meet, with the first. `refuse`
    gives the reason why a caller is refused, which is told of it, or nothing to admit it. In messages, each is called
    `member`, "worker" or "node", and `stranger` is why a message isn't signed by this run.
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
        # Why callers were rejected, in order.
        self._rejections: dict[str, None] = {}
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
            parts = [*self._rejections][:4]
            gone = sorted(self._gone - self._callers.keys())
        parts += [f"{self._member} {rank} connected and disconnected again" for rank in gone]
        return f" Also: {'; '.join(parts)}." if parts else ""

    def _reject(self, connection: socket.socket, why: str) -> None:
        """Closes a connection, and logs why, once for each reason."""
        with self._mutex:
            if why not in self._rejections and len(self._rejections) < 100:
                self._rejections[why] = None
                _log.warning("The first %s rejected a connection and keeps waiting: %s.", self._member, why)
        # A misconfigured peer sees an answer of another run, and reports that.
        with contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE)
            connection.send(b"another run\n")
        connection.close()


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
