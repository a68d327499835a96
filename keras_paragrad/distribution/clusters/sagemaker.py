"""The cluster that the instances of a SageMaker training job are."""

from collections.abc import Mapping

from keras_paragrad.arguments import shown
from keras_paragrad.distribution.clusters.found import DEFAULT_PORT, Found, port_of
from keras_paragrad.plain_json import read_json


def read_sagemaker(environment: Mapping[str, str]) -> Found | None:
    """Reads `SM_HOSTS` and `SM_CURRENT_HOST`; `None` where they are not set.

    The variables are those of https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md.

    Raises:
        ValueError: `SM_HOSTS` is not a JSON list of names, or does not hold `SM_CURRENT_HOST`.
    """
    if "SM_HOSTS" not in environment:
        return None
    text, current = environment["SM_HOSTS"], environment.get("SM_CURRENT_HOST", "")
    try:
        hosts = read_json(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f'SM_HOSTS is {shown(text)}. Expected a JSON list of names, such as ["algo-1", "algo-2"].')
    if current not in hosts:
        raise ValueError(
            f"SM_CURRENT_HOST is {shown(current)}, which SM_HOSTS={text:.200} does not name. Set it to one of them."
        )
    port = port_of(environment, DEFAULT_PORT)
    return Found({"worker": tuple(f"{host}:{port}" for host in hosts)}, "worker", hosts.index(current))
