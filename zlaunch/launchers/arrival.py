"""Number the nodes of a run in the order in which they arrive, as torchrun's c10d rendezvous does.

The same command runs on every node, and names an address of one of them. That node listens there and is
node 0. The others connect, say what they run, and wait. When all have come, each hears its number. A
connection that ends before that is a node that has given up.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from zlaunch.errors import LaunchError
from zlaunch.launchers.reception import LINE_BYTES, Caller, Reception
from zlaunch.plan.options import Launch
from zlaunch.system.network import open_listener

DEFAULT_PORT = 29400
"""Where nodes meet without a port, as with torchrun."""
USUAL_LIMIT_S = 600.0
"""The time that torchrun waits for all nodes."""
_LONGER = "--rdzv_conf join_timeout=SECONDS waits longer"
_AGAIN_S = 0.3
_FAREWELL_S = 5.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Says where the nodes of a run meet, and what has to be the same on each."""

    host: str
    port: int
    is_own: bool
    """Tells whether the address is one of this machine."""
    nodes: int
    workers: int
    """Counts the workers of each node."""
    run: str
    """The user's name of the run: --rdzv_id."""

    @staticmethod
    def of(launch: Launch) -> Arrival | None:
        """Return where the nodes of a launch meet; None where they know their numbers."""
        if launch.arrival_run is None:
            return None
        assert launch.master_addr is not None and launch.num_nodes is not None and launch.num_gpus is not None
        return Arrival(
            launch.master_addr,
            launch.master_port,
            launch.is_meeting_point,
            launch.num_nodes,
            launch.num_gpus,
            launch.arrival_run,
        )

    def number(self, limit_s: float, say: Callable[[str], None]) -> int:
        """Wait until all nodes have come and return the number of this one. Raises LaunchError."""
        deadline = time.monotonic() + limit_s
        listener = None
        if self.is_own:
            try:
                listener = open_listener(self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # then another node on this machine may have it
                    raise LaunchError(f"--rdzv_endpoint {self}: {error.strerror}") from None
        if listener is None:
            return self._join(deadline, limit_s, say)
        return self._host(listener, deadline, limit_s, say)

    def __str__(self) -> str:
        """Return the address."""
        return f"{self.host}:{self.port}"

    def _hello(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name in ("nodes", "workers", "run")}

    def _host(
        self, listener: socket.socket, deadline: float, limit_s: float, say: Callable[[str], None]
    ) -> int:
        """Collect the other nodes and tell each its number."""
        with Reception(listener) as reception:
            say(f"waiting for all {self.nodes} nodes at {self}")
            nodes: list[Caller] = []
            while len(nodes) < self.nodes - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LaunchError(
                        f"--rdzv_endpoint {self}: {len(nodes) + 1} of {self.nodes} nodes came within "
                        f"{limit_s:g} s; {_LONGER}"
                    )
                for caller in reception.heard(left):
                    if caller in nodes:  # it has hung up
                        nodes.remove(caller)
                        reception.dismiss(caller)
                    elif len(nodes) == self.nodes - 1 or not self._greets(caller):
                        reception.dismiss(caller)  # no node, or one for which there is no number
                    else:
                        nodes.append(caller)
                        say(f"{len(nodes) + 1} of {self.nodes} nodes are at {self}")
            listener.close()  # its port is the rendezvous of the workers
            for index, caller in enumerate(nodes, start=1):
                caller.connection.settimeout(_FAREWELL_S)
                with suppress(OSError):
                    _send(caller.connection, {"rank": index})
            for caller in nodes:  # the end that closes first keeps the port for a while: not this one
                connection = caller.connection
                with suppress(OSError):
                    connection.recv(1)
        return 0

    def _greets(self, caller: Caller) -> bool:
        """Refuse a node that runs something else. Return whether the caller is a node that stays."""
        theirs = _parse(bytes(caller.line))
        if theirs is None:
            return False
        different = {name for name, value in self._hello().items() if theirs.get(name) != value}
        if different:
            ours = ", ".join(f"{_FLAGS[name]} {self._hello()[name]}" for name in _FLAGS if name in different)
            with suppress(OSError):
                _send(caller.connection, {"error": f"node 0 runs with {ours}"})
        return not different

    def _join(self, deadline: float, limit_s: float, say: Callable[[str], None]) -> int:
        """Connect to node 0, again and again until it is there, and wait for the number."""
        said = has_told_why = False
        last_error = ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection((self.host, self.port), timeout=min(left, 10.0)) as connection:
                    last_error = ""
                    _send(connection, self._hello())
                    if not said:
                        say(f"waiting for all {self.nodes} nodes at {self}")
                        said = True
                    connection.settimeout(left)
                    answer = _receive(connection)
            except OSError as error:
                answer = None
                last_error = error.strerror or str(error)
                if not has_told_why:
                    say(f"cannot reach {self} yet: {last_error}")
                    has_told_why = True
            if answer is not None and "error" in answer:
                raise LaunchError(f"--rdzv_endpoint {self}: {answer['error']}; use the same on every node")
            number = answer.get("rank") if answer is not None else None
            if type(number) is int and 0 < number < self.nodes:
                return number
            time.sleep(_AGAIN_S)
        reason = f" ({last_error})" if last_error else ""
        raise LaunchError(
            f"--rdzv_endpoint {self}: not all {self.nodes} nodes came within {limit_s:g} s, or no zlaunch "
            f"runs there{reason}; {_LONGER}"
        )


_FLAGS = {"nodes": "--nnodes", "workers": "--nproc_per_node", "run": "--rdzv_id"}


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Read one line; None where it is none of ours."""
    data = b""
    deadline = time.monotonic() + (connection.gettimeout() or _FAREWELL_S)
    try:
        # One timeout for the line, not for each piece: a stranger may send a byte now and then.
        while not data.endswith(b"\n") and len(data) < LINE_BYTES:
            if time.monotonic() > deadline:
                return None
            chunk = connection.recv(LINE_BYTES - len(data))
            if not chunk:
                return None
            data += chunk
    except OSError:
        return None
    return _parse(data)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the message of a line; None if it is none of ours."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # thousands of brackets exceed the parser's depth
        return None
    return message if isinstance(message, dict) else None
