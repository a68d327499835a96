"""The server on the first of several machines, which other machines' launchers join at the start or later.

A machine's facts are values that have to be the same on all, and the addresses of its workers. The plan, sent to all
that have joined, is the cluster made of them; or `missing` machines, or the reason why a machine is `refused`.
"""

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import keras_paragrad
from keras_paragrad.distribution.launch.tasks import Layout
from keras_paragrad.distribution.listening import host_of, listen_at
from keras_paragrad.distribution.rendezvous_server import (
    LOOK,
    Caller,
    MessageSigner,
    RendezvousServer,
    Wait,
    answer,
    difference,
    keep_alive,
)


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


def node_facts(rendezvous: RendezvousSettings, addresses: Mapping[str, list[str]]) -> dict[str, Any]:
    """The facts that a machine sends to the first one: values that must agree, and its workers' addresses."""
    return {"--nodes": rendezvous.nodes, "keras_paragrad": keras_paragrad.__version__, "workers": addresses["worker"]}


# Seconds without a new machine after which fewer than the maximum begin.
_SETTLE = 5.0
# Seconds to wait for a machine that has trained before.
_SURVIVOR_SECONDS = 60.0


class _NodeServer(RendezvousServer):
    """Admits each machine once, since two may have been given one rank."""

    # The first machine's facts, once it trains: a machine with different facts is then rejected individually, without
    # failing the run.
    facts: Mapping[str, Any] | None = None

    def admit(self, caller: Caller, rank: int) -> None:
        """Adds a machine, or refuses its rank or facts."""
        if rank in self.callers:
            first = self.callers[rank].host
            refusal = f"Node {rank} has already joined, from {first}. Give each machine its own --node-rank, from 0."
            self._refuse(caller, refusal, f"has the rank of node {rank}, which has joined from {first}")
        elif self.facts and (differs := _difference(self.facts, rank, caller.message["facts"])):
            self._refuse(caller, differs, f"has other options or a different version: {differs.partition('. ')[0]}")
        else:
            keep_alive(caller.connection)
            super().admit(caller, rank)

    def _refuse(self, caller: Caller, refusal: str, why: str) -> None:
        """Tells a machine of the refusal, logs why, and closes the connection."""
        answer(caller, self._signer, {"refused": refusal})
        caller.message = {}
        self._reject(caller, why)

    def release(self) -> dict[int, Caller]:
        """Hands over the connections of the machines that have joined, which stay open."""
        callers, self.callers = self.callers, {}
        for caller in callers.values():
            self._selector.unregister(caller.connection)
        return callers


class RendezvousHost:
    """The first machine's side of the rendezvous, which the others join, also while training goes on."""

    def __init__(self, rendezvous: RendezvousSettings):
        self._rendezvous = rendezvous
        self._signer = rendezvous.signer()
        self._stack = contextlib.ExitStack()
        self._server: _NodeServer | None = None
        self._watcher: threading.Thread | None = None
        self._stops_watching = threading.Event()

    def gather(
        self, layout: Layout, wait: Wait, survivors: Collection[int], restarts: int
    ) -> tuple[dict[int, socket.socket], dict[str, Any]]:
        """Waits for the others, and tells them the plan."""
        self._stop_watching()
        server = self._server or self._open(wait)
        began = changed = time.monotonic()
        count = len(server.callers)
        while not self._is_complete(server, survivors, began, changed):
            if not wait.goes_on():
                break
            wait.report_missing(f"node 0 waits at {self._rendezvous.address} for {_missing(self._rendezvous, server)}")
            server.wait(LOOK)
            if len(server.callers) != count:
                count, changed = len(server.callers), time.monotonic()
        # Choose ports only now, so that they are still free when the workers start.
        addresses = layout.addresses(self._rendezvous.host or host_of(self._rendezvous.address))
        facts = {0: node_facts(self._rendezvous, addresses)}
        facts |= {rank: caller.message["facts"] for rank, caller in sorted(server.callers.items())}
        if 1 + len(server.callers) < self._rendezvous.least:
            plan = {"missing": _missing(self._rendezvous, server), "besides": server.in_words()}
        else:
            plan = {**_plan(facts), "restarts": restarts}
        callers = server.release()
        for caller in callers.values():
            answer(caller, self._signer, plan)
        return {rank: caller.connection for rank, caller in callers.items()}, plan

    def watch(self, on_join: Callable[[list[int]], None]) -> None:
        """Listens while training goes on, and calls `on_join`, in a thread, with the first machines that join then."""
        self._stops_watching.clear()
        cast("_NodeServer", self._server).facts = node_facts(self._rendezvous, {"worker": []})
        self._watcher = threading.Thread(target=self._watch, args=(on_join,), daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stops listening."""
        self._stop_watching()
        self._stack.close()

    def _open(self, wait: Wait) -> "_NodeServer":
        """Starts to listen; `close` ends it."""
        rendezvous = self._rendezvous
        # The other machines' addresses aren't known; any other host tells `listen_at` that there are some.
        elsewhere = ["another machine:1"] * (rendezvous.most > 1)
        servers = listen_at(rendezvous.address, elsewhere, wait.until, "Node 0", "--rendezvous")
        selector = self._stack.enter_context(selectors.DefaultSelector())
        server = _NodeServer(selector, servers, self._signer, rendezvous.most, "node", "has a different token")
        self._server = self._stack.enter_context(server)
        return server

    def _is_complete(self, server: "_NodeServer", survivors: Collection[int], began: float, changed: float) -> bool:
        """Whether to stop waiting: all machines have joined, or all that trained before, or none joined for a while."""
        present, now = {0, *server.callers}, time.monotonic()
        if len(present) < self._rendezvous.least:
            return False
        if len(present) == self._rendezvous.most or survivors and present.issuperset(survivors):
            return True
        return now - changed >= _SETTLE and (not survivors or now - began >= _SURVIVOR_SECONDS)

    def _watch(self, on_join: Callable[[list[int]], None]) -> None:
        """Serves callers until `_stop_watching`; calls `on_join` once, when the first have joined."""
        server, has_told = cast("_NodeServer", self._server), False
        while not self._stops_watching.is_set():
            server.wait(LOOK)
            if server.callers and not has_told:
                has_told = True
                on_join(sorted(server.callers))

    def _stop_watching(self) -> None:
        self._stops_watching.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None


def _missing(rendezvous: RendezvousSettings, server: RendezvousServer) -> str:
    """The machines that haven't joined, in words."""
    return nodes_in_words([rank for rank in range(1, rendezvous.most) if rank not in server.callers])


def nodes_in_words(ranks: Sequence[int]) -> str:
    """Machines, in words."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(f"node {rank}" for rank in ranks[:8]) + more


def _plan(facts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The plan: the cluster of all machines' workers, in order of ranks, or `refused` if their facts differ."""
    for rank, machine in facts.items():
        if differs := _difference(facts[0], rank, machine):
            return {"refused": differs}
    workers: list[str] = []
    firsts: dict[str, int] = {}
    for rank, machine in facts.items():
        firsts[str(rank)] = len(workers)
        workers += map(str, machine["workers"])
    return {"jobs": {"worker": workers}, "firsts": firsts, "ranks": list(facts), "run": secrets.token_hex(16)}


def _difference(first: Mapping[str, Any], rank: int, other: Mapping[str, Any]) -> str:
    """The first forbidden difference between the facts of node 0 and of another machine; empty if there is none."""
    differs = difference(first, rank, other, ("--nodes", "keras_paragrad"), "Node")
    return f"{differs}. Start all machines with the same." if differs else ""
