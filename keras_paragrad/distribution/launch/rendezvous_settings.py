"""The rendezvous of several machines' launchers: its address, and how long they wait."""

import hashlib
import hmac
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras_paragrad
from keras_paragrad.distribution.rendezvous_server import MessageSigner

# Seconds between two checks for a signal, and between two lines about missing machines.
LOOK, _REPEATED = 0.2, 30.0
# A machine that doesn't answer counts as lost after about 25 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class StoppedError(Exception):
    """The launcher received a signal before all machines had joined, as `number`."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class MissingNodesError(ConnectionError):
    """Some machines haven't joined in time. The message, on all that have, names them."""


@dataclass(frozen=True)
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

    @property
    def nodes(self) -> str:
        """The number of machines as it is written: 2 or 1:4."""
        return f"{self.most}" if self.least == self.most else f"{self.least}:{self.most}"

    def signer(self, run: str = "") -> MessageSigner:
        """The signer of messages: before the machines have met, or of a run."""
        return MessageSigner(self.derived_key(f"nodes {run}").encode())

    def derived_key(self, purpose: str) -> str:
        """A key for one purpose, from which the token can't be found."""
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


class Wait:
    """A wait for other machines: its deadline, and reports of who is missing.

    Args:
        seconds: How long to wait.
        option: The command-line option that sets `seconds`, for error messages.
        signal_received: Returns the number of a signal that the launcher received, or 0.
        say: Prints a line.

    Attributes:
        until: The deadline, by `time.monotonic`.
    """

    def __init__(self, seconds: float, option: str, signal_received: Callable[[], int], say: Callable[[str], None]):
        self.seconds, self.option = seconds, option
        self.until = time.monotonic() + seconds
        self._signal_received = signal_received
        self._say = say
        self._said = ""
        self._said_at = 0.0

    def goes_on(self) -> bool:
        """Whether there is time left.

        Raises:
            StoppedError: The launcher received a signal.
        """
        if number := self._signal_received():
            raise StoppedError(number)
        return time.monotonic() < self.until

    def report_missing(self, what: str) -> None:
        """Says who is missing: at once, and then every half a minute."""
        if what != self._said or time.monotonic() - self._said_at > _REPEATED:
            self._said, self._said_at = what, time.monotonic()
            self._say(what)


def node_facts(rendezvous: RendezvousSettings, addresses: Mapping[str, list[str]]) -> dict[str, Any]:
    """The facts that a machine sends to the first one: values that must agree, and its workers' addresses."""
    return {"--nodes": rendezvous.nodes, "keras_paragrad": keras_paragrad.__version__, "workers": addresses["worker"]}


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel notice when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
