"""Attach to a process as VS Code does: the few messages of the Debug Adapter Protocol that this takes."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.limits import LIMIT_S


class DapClient:
    """Speaks to debugpy over its socket."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=LIMIT_S)
        self._file = self._socket.makefile("rb")
        self._count = 0

    def attach(self, connect: dict[str, Any], breakpoints: dict[str, list[int]]) -> None:
        """Attach with these breakpoints, file -> lines; the process then runs."""
        self.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True)
        self._send("attach", connect=connect)
        self.wait_for("initialized")
        for path, lines in breakpoints.items():
            self.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": line} for line in lines])
        self.ask("configurationDone")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the body of its response."""
        number = self._send(command, **arguments)
        response = self._until(lambda message: message.get("request_seq") == number)
        assert response["success"], response
        return dict(response.get("body") or {})

    def wait_for(self, event: str) -> dict[str, Any]:
        """Return the body of the next event of this name."""
        return dict(self._until(lambda message: message.get("event") == event).get("body") or {})

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()

    def _send(self, command: str, **arguments: Any) -> int:
        self._count += 1
        message = {"seq": self._count, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return self._count

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            size = 0
            while line := self._file.readline().strip():
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
            assert size, "the debugger has hung up"
            message: dict[str, Any] = json.loads(self._file.read(size))
            if wanted(message):
                return message
