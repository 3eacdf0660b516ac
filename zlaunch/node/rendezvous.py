"""Answer the launcher before there is a plan: who a node is, and at which address of node 0 all can meet.

Nothing runs on the node yet, so the answers may take a moment.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from zlaunch.system.messages import (
    AgentEvent,
    CheckUp,
    CheckUpAnswer,
    Command,
    Hello,
    HelloAnswer,
    Listen,
    Listening,
    Reach,
    Reached,
    Sweep,
    Swept,
)
from zlaunch.system.network import interface_of, open_listener, own_address_towards
from zlaunch.system.processes import Process, kill_leftovers, pid_namespace, run_processes


class Handshake:
    """Answers the launcher until the plan comes, and holds node 0's rendezvous port open until then."""

    def __init__(
        self, send: Callable[[AgentEvent], None], watch: Callable[[int, Callable[[], object]], None]
    ):
        self._send = send
        self._watch = watch
        self._listener: socket.socket | None = None
        self._token = b""
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            Hello: self._hello,
            CheckUp: self._check_up,
            Sweep: self._kill_leftovers,
            Listen: self._listen,
            Reach: self._reach,
        }

    def handle(self, command: Command) -> None:
        """Answer one command."""
        self._handlers[type(command)](command)

    def _hello(self, _command: Hello) -> None:
        """Say who this node is."""
        from zlaunch.system.machine import own_facts

        self._send(HelloAnswer(own_facts().as_event()))

    def _check_up(self, command: CheckUp) -> None:
        """Report the health of this node."""
        from zlaunch.system.checkup import own_checkup

        gpus = [str(token) for token in command.gpus]
        checkup = own_checkup(str(command.workdir), command.nccl_setting, gpus)
        self._send(CheckUpAnswer(checkup.as_event()))

    def _kill_leftovers(self, command: Sweep) -> None:
        """End what is left of a run whose agent here has died: by the run's id and by the sessions of the
        agent and its workers, as far as they are known. The answer says whether certainly nothing is left.
        """
        run_id = str(command.run_id)
        # Process ids of another namespace (a container) name other processes here.
        here = command.pid_namespace != 0 and command.pid_namespace == pid_namespace()
        sessions = [Process(int(pid), int(ticks)) for pid, ticks in command.sessions] if here else []
        count = kill_leftovers(run_id, sessions)
        is_clean = here and not run_processes(run_id, sessions)
        self._send(Swept(count, is_clean))

    def _listen(self, command: Listen) -> None:
        """Take a port and tell everyone who connects that it is us; asked again, keep a port that will do."""
        port = int(command.port)
        self._token = str(command.token).encode()
        if self._listener is None or port not in (0, self._listener.getsockname()[1]):
            try:
                self._listener = open_listener(port)
            except OSError as error:
                self._send(Listening(0, error.strerror or str(error)))
                return
            self._listener.setblocking(False)
            self._watch(self._listener.fileno(), partial(self._accept, self._listener))
        self._send(Listening(self._listener.getsockname()[1], ""))

    def _accept(self, listener: socket.socket) -> None:
        """Send the token to the next one that has connected."""
        with suppress(OSError):
            connection, _ = listener.accept()
            # By the token, a node knows that it has reached node 0 of this run. Anything may listen at the
            # same port of a wrong address.
            connection.sendall(self._token)
            connection.close()

    def _reach(self, command: Reach) -> None:
        """Find the first address where node 0 answers, and the interface that leads there."""
        for address in command.addresses:
            own = own_address_towards(address, int(command.port), str(command.token).encode())
            if own is not None:
                self._send(Reached(address, interface_of(own)))
                return
        self._send(Reached("", ""))

    def close(self) -> int | None:
        """Let go of the port and return the descriptor that must no longer be watched, if there is one."""
        if self._listener is None:
            return None
        fd = self._listener.fileno()
        self._listener.close()
        self._listener = None
        return fd
