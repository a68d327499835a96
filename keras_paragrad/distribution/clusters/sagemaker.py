"""SageMaker: the instances of a training job."""

from collections.abc import Mapping

from keras_paragrad.arguments import quote
from keras_paragrad.distribution.cluster import DEFAULT_PORT, Cluster, ClusterKind, read_port
from keras_paragrad.plain_text import read_json


class SageMaker(ClusterKind):
    """The variables of https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md."""

    source = "SageMaker"
    precedence = 20
    run_variables = ("TRAINING_JOB_NAME",)

    def read(self, environment: Mapping[str, str]) -> Cluster | None:
        """Reads `SM_HOSTS` and `SM_CURRENT_HOST`; `None` if they are not set."""
        if "SM_HOSTS" not in environment:
            return None
        text, current = environment["SM_HOSTS"], environment.get("SM_CURRENT_HOST", "")
        try:
            hosts = read_json(text)
        except ValueError:
            hosts = None
        if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
            raise ValueError(f'SM_HOSTS is {quote(text)}. Expected a JSON list of names, such as ["algo-1", "algo-2"].')
        if current not in hosts:
            raise ValueError(
                f"SM_CURRENT_HOST is {quote(current)}, which is not in SM_HOSTS={text:.200}. Set it to one of them."
            )
        port = read_port(environment, DEFAULT_PORT)
        addresses = tuple(f"{host}:{port}" for host in hosts)
        return Cluster({"worker": addresses}, "worker", hosts.index(current), self.source)


KIND: ClusterKind = SageMaker()
