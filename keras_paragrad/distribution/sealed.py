"""Messages between the processes of one run: a line each, of bounded size, with a code that only the run can make."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.launch.tasks import TOKEN

LONGEST = 65536
_CODE_BYTES = 64
# What tells one run of a cluster from the next, where those who describe it say so.
_RUNS = {"Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), "SageMaker": ("TRAINING_JOB_NAME",)}


class Seal:
    """Writes and reads the messages of one run.

    A message is a line: an HMAC-SHA256 in hexadecimal, a space, and JSON. Nothing of it is read before the code has
    been found right, in constant time, and the key itself is never sent.

    Args:
        key: What all processes of the run know.

    Example:

    >>> from keras_paragrad.distribution.sealed import Seal
    >>> line = Seal(b"one").closed({"rank": 1})
    >>> Seal(b"one").opened(line), Seal(b"another").opened(line)
    ({'rank': 1}, None)
    """

    def __init__(self, key: bytes):
        self._key = key

    @classmethod
    def of(cls, cluster: Cluster, environment: Mapping[str, str]) -> "Seal":
        """The seal of a run: by `KERAS_PARAGRAD_TOKEN` if it is set, or else by the cluster's description."""
        token = environment.get(TOKEN)
        if token:
            return cls(token.encode())
        names = _RUNS.get(cluster.source, ())
        run = {name: environment[name] for name in names if name in environment}
        return cls(hashlib.sha256(json.dumps([cluster.jobs, run], sort_keys=True).encode()).digest())

    def closed(self, message: Mapping[str, Any]) -> bytes:
        """A message as a line.

        Raises:
            ValueError: It is too long.
        """
        body = json.dumps(message).encode()
        line = self._code(body) + b" " + body + b"\n"
        if len(line) > LONGEST:
            raise ValueError(f"A message of {len(line)} bytes was to be sent, and they may have {LONGEST}.")
        return line

    def opened(self, line: bytes) -> dict[str, Any] | None:
        """What a line says; `None` if it is no message of this run."""
        code, _, body = line.rstrip(b"\n").partition(b" ")
        if len(code) != _CODE_BYTES or not hmac.compare_digest(code, self._code(body)):
            return None
        message = json.loads(body)
        return message if isinstance(message, dict) else None

    def _code(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()
