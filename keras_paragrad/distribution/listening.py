"""Listening at an address, IPv4 or IPv6, that may be another machine's name for this one. Imports no TensorFlow."""

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


def listen_at(address: str, others: Sequence[str], until: float, who: str, where: str) -> list[socket.socket]:
    """Listens on an IPv4 or IPv6 address of this machine, or on all that its name resolves to.

    A name that can't be resolved yet is retried. Listens on all interfaces, and logs that, only if the address isn't
    one of this machine (as behind NAT), or resolves to 127.0.0.1 although other machines connect.
    """
    host, port = host_of(address), port_of(address)
    while True:
        try:
            hosts = sorted({info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
            return _open_sockets(address, list(map(str, hosts)), _is_remote(host, others), who, where)
        except OSError as error:
            transient = isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE
            if not transient or time.monotonic() > until:
                raise ConnectionError(
                    f"{who} can't listen on {address}: {error}. Free the port, or use an address of this machine in "
                    f"{where}."
                ) from error
        time.sleep(_PAUSE)


def _is_remote(host: str, others: Sequence[str]) -> bool:
    """Whether `host` is a name, and workers connect from other hosts, where it may resolve to another address."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return False
    return any(host_of(other) != host for other in others)


def _open_sockets(address: str, hosts: list[str], is_remote: bool, who: str, where: str) -> list[socket.socket]:
    """Listens at the addresses `hosts`; on all interfaces if this machine lacks them, or others can't reach them."""
    port = port_of(address)
    if is_remote and any(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts):
        return [_listen_on_all_interfaces(address, port, f"here it resolves to {', '.join(hosts)}", who, where)]
    with contextlib.ExitStack() as stack:
        servers, failure = [], None
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                servers.append(stack.enter_context(socket.create_server((host, port), family=family, backlog=128)))
            except OSError as error:
                failure = error
        if not servers and failure is not None:
            if failure.errno != errno.EADDRNOTAVAIL:
                raise failure
            return [_listen_on_all_interfaces(address, port, "it is not an address of this machine", who, where)]
        # The sockets stay open for the caller.
        stack.pop_all()
        return servers


def _listen_on_all_interfaces(address: str, port: int, why: str, who: str, where: str) -> socket.socket:
    """Listens on all interfaces, and logs why."""
    _log.warning(
        "%s listens on port %d of all interfaces, as others can't reach it at %s: %s. Use an address of this machine "
        "in %s to listen on that one only.",
        *(who, port, address, why, where),
    )
    return socket.create_server(("", port), backlog=128)
