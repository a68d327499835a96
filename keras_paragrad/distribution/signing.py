"""Authenticated messages between the processes of one run: one line each, of bounded size."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.clusters.kind import cluster_kinds
from keras_paragrad.distribution.launch.tasks import TOKEN

LONGEST = 65536
_CODE_BYTES = 64


class MessageSigner:
    """Writes and reads the messages of one run.

    A message is a line: an HMAC-SHA256 in hexadecimal, a space, and JSON. The JSON is parsed only after the code has
    been verified, in constant time; the key itself is never sent.

    Args:
        key: The shared key of the run's processes.

    Example:

    >>> from keras_paragrad.distribution.signing import MessageSigner
    >>> line = MessageSigner(b"one").sign({"rank": 1})
    >>> MessageSigner(b"one").verify(line), MessageSigner(b"another").verify(line)
    ({'rank': 1}, None)
    """

    def __init__(self, key: bytes):
        self._key = key

    @classmethod
    def of(cls, cluster: Cluster, environment: Mapping[str, str]) -> "MessageSigner":
        """The seal of a run, keyed by `KERAS_PARAGRAD_TOKEN` if set, else by the cluster's description."""
        token = environment.get(TOKEN)
        if token:
            return cls(token.encode())
        names = [name for kind in cluster_kinds() if kind.source == cluster.source for name in kind.run_variables]
        run = {name: environment[name] for name in names if name in environment}
        return cls(hashlib.sha256(json.dumps([cluster.jobs, run], sort_keys=True).encode()).digest())

    def sign(self, message: Mapping[str, Any]) -> bytes:
        """A message as a line."""
        body = json.dumps(message).encode()
        line = self._code(body) + b" " + body + b"\n"
        if len(line) > LONGEST:
            raise ValueError(f"A message has {len(line)} bytes; at most {LONGEST} can be sent.")
        return line

    def verify(self, line: bytes) -> dict[str, Any] | None:
        """The message in a line; `None` if it is not from this run."""
        code, _, body = line.rstrip(b"\n").partition(b" ")
        if len(code) != _CODE_BYTES or not hmac.compare_digest(code, self._code(body)):
            return None
        message = json.loads(body)
        return message if isinstance(message, dict) else None

    def _code(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()
