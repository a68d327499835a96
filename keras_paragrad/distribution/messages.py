"""The messages by which workers, and the launchers of several machines, meet: signed lines of JSON.

Nothing here imports TensorFlow.
"""

import hashlib
import hmac
import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from keras_paragrad.distribution.cluster import Cluster, cluster_kinds
from keras_paragrad.distribution.launch.tasks import TOKEN

LONGEST = 65536
_CODE_BYTES = 64
_LONGEST_FACT = 2000
# Seconds between two looks for a signal or for who has joined.
LOOK = 0.2
# A machine that doesn't answer counts as lost after about 25 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class MessageSigner:
    """Writes and reads the messages of one run.

    A message is a line: an HMAC-SHA256 in hexadecimal, a space, and JSON. The JSON is parsed only after the code is
    verified, in constant time; the key is never sent.

    Example:

    >>> from keras_paragrad.distribution.messages import MessageSigner
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


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])


def difference(first: Mapping[str, Any], rank: int, other: Mapping[str, Any], names: Iterable[str], member: str) -> str:
    """The first difference between the facts of the first and of another, in words; empty if there is none."""
    for name in names:
        if other.get(name) != first[name]:
            mine, others = (str(facts.get(name))[:_LONGEST_FACT] for facts in (first, other))
            return f"{member} 0 has {name} {mine}, and {member.lower()} {rank} {others}"
    return ""


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel notice when the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
