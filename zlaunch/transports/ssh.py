"""Start the agent on another host; an ssh channel carries its lines."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import queue
import random
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko

from zlaunch.errors import NodeError
from zlaunch.system.events import AgentStream, Event, encode
from zlaunch.transports.ssh_config import HostSettings

# It would print tracebacks of its threads; what matters comes to us as exceptions.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False

_CHUNK_BYTES = 1 << 16
_KEEPALIVE_S = 5
_DIAGNOSTICS_BYTES = 4096
_ATTEMPTS = 6
"""Attempts to connect: sshd turns connections away at random when many arrive at once (MaxStartups)."""


def remote_command(python: str) -> str:
    """Return the fixed command line: all that differs between runs travels over stdin."""
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; "
        "from zlaunch.node.agent import main; sys.exit(main())"
    )
    return f"exec {shlex.quote(python)} -c '{code}'"


class AuthenticationRefused(NodeError):
    """Names a host that answers, and takes none of our keys."""


class SshTransport:
    """Holds one connection with one channel. A writer thread sends: `send` is safe in a signal handler."""

    local = False

    def __init__(
        self,
        host: str,
        client: paramiko.SSHClient,
        jumps: list[paramiko.SSHClient],
        python: str,
        timeout_s: float,
    ) -> None:
        self.host = host
        self._client, self._jumps = client, jumps
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(_KEEPALIVE_S)
        transport.channel_timeout = timeout_s
        self._channel = transport.open_session(timeout=timeout_s)
        self._channel.exec_command(remote_command(python))
        self._stderr: collections.deque[int] = collections.deque(maxlen=_DIAGNOSTICS_BYTES)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: Event) -> None:
        """Queue a line."""
        self._outgoing.put(encode(message))

    def _write(self) -> None:
        # It is gone; its reader sees that too. A connection that was cut raises any of these.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while (data := self._outgoing.get()) is not None:
                self._channel.sendall(data)
            self._channel.shutdown_write()

    def events(self) -> Iterator[Event]:
        """Yield events until the channel ends; lines that are not events (a noisy shell) are passed over."""
        stream = AgentStream()
        while not stream.damaged:
            try:
                chunk = self._channel.recv(_CHUNK_BYTES)
            except OSError:
                return
            self._take_stderr()
            if not chunk:
                return
            yield from stream.feed(chunk)

    def _take_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            self._stderr.extend(self._channel.recv_stderr(_CHUNK_BYTES))

    def close(self, timeout_s: float) -> int | None:
        """End the agent's stdin, wait for its exit status, and hang up."""
        self._outgoing.put(None)
        ended = self._channel.status_event.wait(timeout_s)
        self._take_stderr()
        self._hang_up()
        return self._channel.recv_exit_status() if ended else None

    def kill(self) -> None:
        """Hang up: the agent finds its stdin closed and stops its workers."""
        threading.Thread(target=self._hang_up, daemon=True).start()

    def _hang_up(self) -> None:
        self._outgoing.put(None)
        for client in (self._client, *self._jumps):
            client.close()

    def diagnostics(self) -> str:
        """Return the end of what came on stderr."""
        return bytes(self._stderr).decode("utf-8", "replace").strip()


def open_ssh(settings: HostSettings, python: str, *, accept_new: bool) -> SshTransport:
    """Connect, through jump hosts where the configuration says so, and start the agent.

    Raises NodeError with what to do about it.
    """
    for attempt in range(_ATTEMPTS):
        jumps: list[paramiko.SSHClient] = []
        try:
            client = _connect(settings, jumps, accept_new)
            return SshTransport(settings.alias, client, jumps, python, settings.timeout_s)
        except (NodeError, paramiko.SSHException, OSError, EOFError) as error:
            for jump in jumps:
                jump.close()
            if isinstance(error, NodeError):
                raise
            busy = "banner" in str(error) or isinstance(error, (ConnectionResetError, EOFError))
            if not busy or attempt == _ATTEMPTS - 1:
                refused = AuthenticationRefused if _is_refusal(error) else NodeError
                raise refused(settings.alias, _explain(settings, error)) from None
            time.sleep(random.uniform(0.2, 0.6) * (attempt + 1))
    raise AssertionError


def _connect(settings: HostSettings, jumps: list[paramiko.SSHClient], accept_new: bool) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    for path in settings.known_hosts:
        is_first = path == settings.known_hosts[0]
        with contextlib.suppress(OSError):
            (client.load_host_keys if is_first else client.load_system_host_keys)(path)
    client.set_missing_host_key_policy(_UnknownKey(settings, accept_new or settings.accept_new))
    sock: Any = None
    if settings.jump is not None:
        jump = _connect(settings.jump, jumps, accept_new)
        jumps.append(jump)
        transport = jump.get_transport()
        assert transport is not None
        sock = transport.open_channel(
            "direct-tcpip", (settings.hostname, settings.port), ("", 0), timeout=settings.timeout_s
        )
    try:
        client.connect(
            settings.hostname,
            settings.port,
            settings.user,
            key_filename=list(settings.identity_files) or None,  # type: ignore[arg-type]  # a list is fine
            look_for_keys=not settings.identities_only,
            allow_agent=True,
            timeout=settings.timeout_s,
            banner_timeout=settings.timeout_s,
            auth_timeout=settings.timeout_s,
            sock=sock,
        )
    except BaseException:
        client.close()
        raise
    return client


class _UnknownKey(paramiko.MissingHostKeyPolicy):
    """Refuses an unknown host key, or records it and goes on."""

    def __init__(self, settings: HostSettings, accept: bool) -> None:
        self._settings, self._accept = settings, accept

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        s = self._settings
        if self._accept:
            path = s.known_hosts[0]
            with _known_hosts_lock, open(path, "a", encoding="utf-8") as file:
                file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")
            return
        port = "" if s.port == 22 else f"-p {s.port} "
        raise NodeError(
            s.alias,
            f"its host key is not known ({key.get_name()} {key.fingerprint}). If it is the right host:\n"
            f"      ssh-keyscan {port}{s.hostname} >> {s.known_hosts[0]}\n"
            "    or give --ssh_accept_new",
        )


def _is_refusal(error: BaseException) -> bool:
    refused = isinstance(error, paramiko.AuthenticationException)
    return refused or "authentication methods" in str(error)


_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_known_hosts_lock = threading.Lock()


def _explain(s: HostSettings, error: BaseException) -> str:
    """Explain what happened in the user's terms."""
    target = f"{s.user}@{s.hostname} port {s.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        name = s.hostname if s.port == 22 else f"[{s.hostname}]:{s.port}"
        return (
            f"its host key has CHANGED: somebody else may be answering. If the host was installed anew:\n"
            f"      ssh-keygen -f {s.known_hosts[0]} -R '{name}'"
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return f"the key for {target} has a passphrase: load it with ssh-add"
    if _is_refusal(error):
        tried = ", ".join(s.identity_files) or "the agent's keys and ~/.ssh"
        return f"{target} refused our keys (tried {tried}): ssh-copy-id -p {s.port} {s.user}@{s.hostname}"
    if isinstance(error, socket.gaierror):
        resolved = "" if s.hostname == s.alias else f": {s.hostname}"  # the alias is in front already
        return f"no such host{resolved} ({error.strerror})"
    if isinstance(error, (TimeoutError, socket.timeout)):
        return f"{target} did not answer within {s.timeout_s:g} s: is it up, is the address right?"
    errors = getattr(error, "errors", {})
    if any(isinstance(e, OSError) and e.errno in _NO_WAY for e in (error, *errors.values())):
        return f"{target}: no route to it: is it up, is the address right?"
    if isinstance(error, ConnectionRefusedError) or "Unable to connect to port" in str(error):
        return f"{target}: connection refused: is sshd running there, is the port right (--ssh_port)?"
    return f"{target}: {error or type(error).__name__}"
