"""`join`: connects to the `Meeting` on the first worker or machine, and waits for its answer."""

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from keras_paragrad.distribution.messages import LONGEST, LOOK, MessageSigner, host_of, keep_alive, port_of

# Seconds between two lines about the same missing ones.
_REPEATED = 30.0


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
    """Connects to the first at `address`, retrying; returns the connection and the answer.

    Without an answer in time, it raises a `ConnectionError`. `facts_at` returns the facts, given this one's host:
    `host`, or the one that the system chooses. In messages, each is called `member`, "worker" or "node", and `stranger`
    is why an answer isn't signed by the first.
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
