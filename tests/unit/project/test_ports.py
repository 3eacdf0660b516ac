"""Test that a reserved port is the server's alone."""

from __future__ import annotations

import errno
import socket

import pytest

from tests.ports import reserved_port


def test_a_server_gets_a_reserved_port_and_nobody_else_does() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError) as caught:
            other.bind(("127.0.0.1", port))
        assert caught.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", port)) as server:  # it sets SO_REUSEADDR
            socket.create_connection(server.getsockname()).close()
