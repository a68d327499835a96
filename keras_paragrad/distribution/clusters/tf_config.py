"""The cluster that `TF_CONFIG` describes, in TensorFlow's own format."""

import re
from collections.abc import Mapping
from typing import Any

from keras_paragrad.arguments import quote
from keras_paragrad.distribution.cluster import Cluster, ClusterKind
from keras_paragrad.plain_text import read_json

EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


class TfConfig(ClusterKind):
    """The format of https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable."""

    source = "TF_CONFIG"
    # Set for this process, by hand or by a launcher within a scheduler's job.
    precedence = 10

    def read(self, environment: Mapping[str, str]) -> Cluster | None:
        """Reads `TF_CONFIG`; `None` if it is not set, or describes no cluster."""
        text = environment.get("TF_CONFIG", "").strip()
        if not text:
            return None
        try:
            config = read_json(text)
        except ValueError as error:
            raise ValueError(f"TF_CONFIG is not JSON: {error}. It is {quote(text)}. Expected {EXAMPLE}.") from None
        _expect(config, dict, "TF_CONFIG")
        cluster = _expect(config.get("cluster", {}), dict, "`cluster`")
        if not cluster:
            return None
        task = _expect(config.get("task"), dict, "`task`")
        job = _expect(task.get("type"), str, "`task.type`")
        jobs = {name: _addresses(name, hosts) for name, hosts in cluster.items()}
        return Cluster(jobs, job, _index(task.get("index")), self.source)


def _expect(value: object, kind: type, name: str) -> Any:
    """Returns the value; refuses one that is not of a type."""
    if not isinstance(value, kind):
        raise ValueError(f"In TF_CONFIG, {name} is {quote(value)}. Expected {EXAMPLE}.")
    return value


def _addresses(name: str, hosts: Any) -> tuple[str, ...]:
    _expect(hosts, list, f"`cluster.{name}`")
    return tuple(_expect(host, str, f"an address in `cluster.{name}`") for host in hosts)


def _index(index: object) -> int:
    """The index of the task, which some launchers write as a string."""
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        return int(index)
    if isinstance(index, bool):
        index = None
    return _expect(index, int, "`task.index`")


KIND: ClusterKind = TfConfig()
