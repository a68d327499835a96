"""Sockets that listen on the address given by the cluster, and nowhere else."""

import contextlib
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Sequence

_log = logging.getLogger("keras_paragrad")
_PAUSE = 0.2


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])


def listen_at(address: str, others: Sequence[str], until: float) -> list[socket.socket]:
    """Listens on an address of this machine, IPv4 or IPv6; on each, if its name resolves to several.

    A name that can't be resolved yet is retried. Listens on all interfaces, and logs that, only if the address is not
    one of this machine's (as behind NAT), or if it resolves to 127.0.0.1 while other machines are to connect.

    Args:
        address: `host:port`.
        others: The addresses of the workers that will connect.
        until: When to give up, by `time.monotonic()`.

    Returns:
        The sockets; the caller closes them.

    Raises:
        ConnectionError: Can't listen on the address. The message says why.
    """
    host, port = host_of(address), port_of(address)
    while True:
        try:
            places = sorted({info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
            return _open(address, list(map(str, places)), _is_remote(host, others))
        except OSError as error:
            transient = isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE
            if not transient or time.monotonic() > until:
                raise ConnectionError(
                    f"The first worker can't listen on {address}: {error}. Free the port, or use an address of this "
                    "machine in the cluster description."
                ) from error
        time.sleep(_PAUSE)


def _is_remote(host: str, others: Sequence[str]) -> bool:
    """Whether workers connect from other machines, where the name resolves to another address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return False
    return any(host_of(other) != host for other in others)


def _open(address: str, places: list[str], is_remote: bool) -> list[socket.socket]:
    port = port_of(address)
    if is_remote and any(ipaddress.ip_address(place.partition("%")[0]).is_loopback for place in places):
        return [_everywhere(address, port, f"here it resolves to {', '.join(places)}")]
    with contextlib.ExitStack() as opened:
        servers, failure = [], None
        for place in places:
            family = socket.AF_INET6 if ":" in place else socket.AF_INET
            try:
                servers.append(opened.enter_context(socket.create_server((place, port), family=family, backlog=128)))
            except OSError as error:
                failure = error
        if not servers and failure is not None:
            if failure.errno != errno.EADDRNOTAVAIL:
                raise failure
            return [_everywhere(address, port, "it is not an address of this machine")]
        opened.pop_all()
        return servers


def _everywhere(address: str, port: int, why: str) -> socket.socket:
    _log.warning(
        "The first worker listens on port %d of all interfaces, as others can't reach it at %s: %s. Use an address of "
        "this machine in the cluster description to listen on that one only.",
        *(port, address, why),
    )
    return socket.create_server(("", port), backlog=128)
