"""Keep what a run knows of its hosts from attempt to attempt: agents, spare hosts, hosts that are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from zlaunch.errors import NodeError
from zlaunch.plan.plan import Plan
from zlaunch.supervisor.nodes import Link, Node, Say, close_all

_LOOK_S = 5.0
"""Seconds between two looks whether a host is back."""
_PING_S, _IDLE_S, _GIVE_UP_S = 15.0, 900.0, 2.0
"""Seconds between two signs of life for a spare host's agent, that it waits for one, that it may be late with
an answer.
"""
Connect = Callable[[Sequence[str], Say], tuple[list[Node], list[NodeError]]]
"""Starts an agent on each host."""


class Agents:
    """Keeps the agents of a run from one attempt to the next."""

    def __init__(self, connect: Connect, say: Say) -> None:
        self._connect, self._say = connect, say
        self._nodes: dict[str, Node] = {}
        self._spares = _PreparedSpares(connect, {}, [], {})

    def connect(self, hosts: Sequence[str]) -> tuple[list[Node], list[NodeError]]:
        """Start agents where there are none; return the nodes in the order of the hosts, and errors."""
        ready = self._spares.stop()
        self._nodes |= {host: ready.pop(host) for host in hosts if host in ready}
        missing = [host for host in hosts if host not in self._nodes]
        found, errors = self._connect(missing, self._say) if missing else ([], [])
        self._nodes |= {node.host: node for node in found}
        return [self._nodes[host] for host in hosts if host in self._nodes], errors

    def show_life(self) -> None:
        """Have the agents that are there wait for their plan a while longer."""
        for node in self._nodes.values():
            node.link.transport.send({"cmd": "ping", "idle_s": _IDLE_S})

    def drop(self, hosts: Collection[str]) -> None:
        """End the agents of these hosts."""
        close_all([self._nodes.pop(host) for host in hosts if host in self._nodes])

    def keep(self, links: Sequence[Link]) -> None:
        """Take note that only these are left."""
        self._nodes = {node.host: node for node in self._nodes.values() if node.link in links}

    def prepare(self, hosts: Sequence[str], plan: Plan) -> None:
        """Have spare hosts import what a plan's workers do, while these train: in the background, until nodes
        are asked for.
        """
        ready = self._spares.stop()
        worker = asdict(plan.nodes[0].workers[0])
        order = {"cmd": "preload", "modules": plan.preload, "cwd": plan.cwd, "worker": worker}
        self._spares = _PreparedSpares(self._connect, ready, hosts if plan.preload else (), order)

    def end(self) -> None:
        """End all that are left."""
        self._nodes |= self._spares.stop()
        close_all(list(self._nodes.values()))
        self._nodes.clear()


class _PreparedSpares:
    """Keeps agents on spare hosts, in a thread: has them import, and shows them that the launcher lives."""

    def __init__(
        self, connect: Connect, ready: dict[str, Node], hosts: Sequence[str], order: Mapping[str, Any]
    ) -> None:
        """Take the agents that are `ready`, which have had the order already."""
        self._connect, self._nodes, self._order = connect, ready, dict(order)
        self._missing = [host for host in hosts if host not in ready]
        self._end, self._given_up = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        if hosts:
            self._thread.start()

    def _run(self) -> None:
        found, _ = self._connect(self._missing, lambda what, seconds: None) if self._missing else ([], [])
        for node in found:
            with suppress(OSError):  # the first ping says that it is gone
                node.link.transport.send(self._order)
        self._nodes = {**self._nodes, **{node.host: node for node in found}}
        has_ended = False
        while not has_ended:
            has_ended = self._end.wait(_PING_S)  # and once more at the end: who is handed out lives
            for node in list(self._nodes.values()):
                try:
                    node.link.ask({"cmd": "ping", "idle_s": _IDLE_S}, "pong")
                except (NodeError, OSError):  # it is connected to again when it is needed
                    del self._nodes[node.host]
        if self._given_up:
            self._kill()

    def _kill(self) -> None:
        for node in self._nodes.values():
            node.link.transport.kill()

    def stop(self) -> dict[str, Node]:
        """Return the agents that are there, by host; whoever is being waited for is given up."""
        self._end.set()
        if self._given_up:
            return {}
        if self._thread.is_alive():
            self._thread.join(_GIVE_UP_S)
        if not self._thread.is_alive():
            return self._nodes
        self._given_up = True
        self._kill()
        return {}


class Hosts:
    """Says which hosts the next attempt runs on."""

    def __init__(self, hosts: Sequence[str], spares: int, min_nodes: int | None) -> None:
        """Take all hosts; the last ones are `spares`. `min_nodes`: go on with so many; None: all."""
        self._all = tuple(hosts)
        self.wanted = len(hosts) - spares
        self.used = self._all[: self.wanted]
        self.needed = self.wanted if min_nodes is None else min_nodes
        self._spares = list(self._all[self.wanted :])
        self._may_shrink = min_nodes is not None
        self._unhealthy: set[str] = set()

    @property
    def spares(self) -> list[str]:
        """List the hosts that wait to take another's place."""
        return list(self._spares)

    @property
    def absent(self) -> list[str]:
        """List the hosts that are gone and may come back. An unhealthy host answers all the time, and would
        end one attempt after another.
        """
        others = {*self.used, *self._spares, *self._unhealthy}
        return [host for host in self._all if host not in others]

    def suffice_without(self, unhealthy: Collection[str]) -> bool:
        """Tell whether the run could have enough hosts without these, once all that are gone are back."""
        return len({*self._all} - {*self._unhealthy, *unhealthy}) >= self.needed

    def lose(self, lost: Collection[str], unhealthy: Collection[str] = ()) -> str:
        """Go on without lost and unhealthy hosts, if that is possible; return what to tell the user, "" if it
        is not.
        """
        lost = {*lost, *unhealthy}
        gone = [host for host in self.used if host in lost]
        taken = dict(zip(gone, self._spares, strict=False))
        left = tuple(taken.get(host, host) for host in self.used if host in taken or host not in gone)
        whole = len(left) == len(self.used)
        if not gone or not (whole or (self._may_shrink and len(left) >= self.needed)):
            return ""
        self._spares = self._spares[len(taken) :]
        self._unhealthy |= set(unhealthy)
        self.used = left
        said = [f"{spare} takes the place of {host}" for host, spare in taken.items()]
        if not whole:
            names = ", ".join(sorted(host for host in gone if host not in taken))
            said.append(f"going on with {len(left)} of {self.wanted} nodes, without {names}")
        return "; ".join(said)

    def take_back(self, host: str) -> None:
        """Use a host again that was gone, or keep it as a spare."""
        if len(self.used) < self.wanted:
            self.used = tuple(each for each in self._all if each in (*self.used, host))
        elif host not in self._spares:
            self._spares.append(host)


class Returns:
    """Looks, in a thread, whether hosts that are gone are back."""

    def __init__(self, connect: Connect, hosts: Sequence[str]) -> None:
        self._connect, self._hosts = connect, list(hosts)
        self._found: list[str] = []
        self._end = threading.Event()
        if hosts:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._hosts and not self._end.wait(_LOOK_S):
            nodes, _ = self._connect(self._hosts, lambda what, seconds: None)
            close_all(nodes)
            for node in nodes:
                self._hosts.remove(node.host)
                self._found.append(node.host)

    def found(self) -> list[str]:
        """List the hosts that are back."""
        return list(self._found)

    def end(self) -> None:
        """Look no more."""
        self._end.set()
