"""Answer the launcher before there is a plan: who a node is, and at which address of node 0 all can meet.

Commands: hello (answer: hello), checkup (checkup), listen (listening), reach (reached), sweep (swept). The
answers are events. Nothing runs on the node yet, so these may take a moment.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from zlaunch.system.events import Event
from zlaunch.system.network import interface_of, open_listener, own_address_towards
from zlaunch.system.processes import Process, pid_namespace, run_processes, sweep


class QuestionError(Exception):
    """Names what a launcher with another zlaunch leaves out of a command."""


class _Question(dict[str, Any]):
    """Holds a command of the launcher."""

    def __missing__(self, name: str) -> NoReturn:
        text = f"{self.get('cmd')} without {name!r}"
        raise QuestionError(f"the launcher's zlaunch sends {text}: install the same zlaunch here and there")


class Handshake:
    """Answers the launcher until the plan comes, and holds node 0's rendezvous port open until then."""

    def __init__(self, send: Callable[[Event], None], watch: Callable[[int, Callable[[], object]], None]):
        self._send = send
        self._watch = watch
        self._listener: socket.socket | None = None
        self._token = b""

    def handle(self, message: Event) -> None:
        """Answer one command. Raises QuestionError."""
        message = _Question(message)
        command = message.get("cmd")
        if command == "hello":
            from zlaunch.system.machine import own_facts

            self._send(own_facts().as_event())
        elif command == "checkup":
            from zlaunch.system.checkup import own_checkup

            workdir = str(message["workdir"])
            gpus = [str(token) for token in message["gpus"]]
            self._send(own_checkup(workdir, message["nccl_setting"], gpus).as_event())
        elif command == "sweep":
            self._sweep(message)
        elif command == "listen":
            self._listen(int(message["port"]), str(message["token"]).encode())
        elif command == "reach":
            self._reach(message["addresses"], int(message["port"]), str(message["token"]).encode())

    def _sweep(self, message: Event) -> None:
        """End what is left of a run whose agent here has died: by the run's id and by the sessions of the
        agent and its workers, as far as they are known. The answer says whether certainly nothing is left.
        """
        run_id = str(message["run_id"])
        # Process ids of another namespace (a container) name other processes here.
        here = message["pid_namespace"] != 0 and message["pid_namespace"] == pid_namespace()
        sessions = [Process(int(pid), int(ticks)) for pid, ticks in message["sessions"]] if here else []
        count = sweep(run_id, sessions)
        is_clean = here and not run_processes(run_id, sessions)
        self._send({"type": "swept", "count": count, "clean": is_clean})

    def _listen(self, port: int, token: bytes) -> None:
        """Take a port and tell everyone who connects that it is us; asked again, keep a port that will do."""
        self._token = token
        if self._listener is None or port not in (0, self._listener.getsockname()[1]):
            try:
                self._listener = open_listener(port)
            except OSError as error:
                self._send({"type": "listening", "port": 0, "error": error.strerror or str(error)})
                return
            self._listener.setblocking(False)
            self._watch(self._listener.fileno(), partial(self._accept, self._listener))
        self._send({"type": "listening", "port": self._listener.getsockname()[1], "error": ""})

    def _accept(self, listener: socket.socket) -> None:
        """Send the token to the next one that has connected."""
        with suppress(OSError):
            connection, _ = listener.accept()
            # By the token, a node knows that it has reached node 0 of this run. Anything may listen at the
            # same port of a wrong address.
            connection.sendall(self._token)
            connection.close()

    def _reach(self, addresses: list[str], port: int, token: bytes) -> None:
        """Find the first address where node 0 answers, and the interface that leads there."""
        for address in addresses:
            own = own_address_towards(address, port, token)
            if own is not None:
                self._send({"type": "reached", "address": address, "interface": interface_of(own)})
                return
        self._send({"type": "reached", "address": "", "interface": ""})

    def close(self) -> int | None:
        """Let go of the port and return the descriptor that must no longer be watched, if there is one."""
        if self._listener is None:
            return None
        fd = self._listener.fileno()
        self._listener.close()
        self._listener = None
        return fd
