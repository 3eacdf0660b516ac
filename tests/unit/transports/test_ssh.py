"""Test what an ssh connection that is cut does to its threads, with a connection that the test makes."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from zlaunch.errors import NodeError
from zlaunch.transports.ssh import HostSettings, SshTransport, open_ssh


class CutChannel:
    """A channel whose connection is cut: what is written raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.status_event = threading.Event()

    def exec_command(self, command: str) -> None:
        return

    def sendall(self, data: bytes) -> None:
        raise self.error

    def shutdown_write(self) -> None:
        raise self.error

    def recv_stderr_ready(self) -> bool:
        return False


@pytest.mark.parametrize(
    "error", [EOFError(), OSError("Socket is closed"), paramiko.SSHException("timed out")]
)
def test_a_connection_that_is_cut_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    about = SimpleNamespace(
        set_keepalive=lambda seconds: None, open_session=lambda timeout: CutChannel(error)
    )
    client: Any = SimpleNamespace(get_transport=lambda: about, close=lambda: None)
    transport = SshTransport("n1", client, [], "python", 1.0)
    transport.send({"cmd": "ping"})
    transport._writer.join()
    assert seen == [] and transport.close(timeout_s=0.0) is None


@pytest.mark.parametrize(
    ("hostname", "said"),
    [("n1", "no such host (unknown)"), ("n1.example", "no such host: n1.example (unknown)")],
)
def test_a_host_without_an_address_is_named_once(
    monkeypatch: pytest.MonkeyPatch, hostname: str, said: str
) -> None:
    def connect(self: paramiko.SSHClient, *args: object, **more: object) -> None:
        raise socket.gaierror(-2, "unknown")

    monkeypatch.setattr(paramiko.SSHClient, "connect", connect)
    settings = HostSettings(
        alias="n1",
        hostname=hostname,
        user="me",
        port=22,
        identity_files=(),
        identities_only=True,
        known_hosts=("none",),
        accept_new=False,
        timeout_s=1.0,
    )
    with pytest.raises(NodeError) as caught:
        open_ssh(settings, "python", accept_new=False)
    assert (caught.value.host, caught.value.text) == ("n1", said)
