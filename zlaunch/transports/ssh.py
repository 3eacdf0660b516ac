"""Start the agent on another host, by paramiko or by the `ssh` program; an ssh channel carries its lines."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import queue
import random
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paramiko

from zlaunch.errors import NodeError
from zlaunch.system.events import AgentStream, Event, Output, encode
from zlaunch.system.user import user_name
from zlaunch.transports.local import LocalTransport, open_program

# -- openssh ----------------------------------------------------------------------------------------
#
# Start the agent on another host by the `ssh` program, where the configuration asks for OpenSSH.


Asked = Mapping[str, Sequence[str]]
"""What `ssh -G` says: option in small letters -> its values."""

_OFF = ("", "no", "none", "false")
_ANY_VALUE = (
    *("proxycommand", "hostkeyalias", "certificatefile", "controlmaster", "controlpath"),
    *("pkcs11provider", "knownhostscommand"),
)
_CERT_AUTHORITY = b"@cert-authority"


def reason_for_openssh(asked: Asked) -> str:
    """Return the option that only the `ssh` program can honour; empty when there is none."""
    for name in _ANY_VALUE:
        if any(value.lower() not in _OFF for value in asked.get(name, ())):
            return name
    agent = asked.get("identityagent", [""])[0]
    if agent.lower() not in (*_OFF, "ssh_auth_sock", "$ssh_auth_sock"):
        return "identityagent"
    for path in asked.get("identityfile", ()):
        if "%" in path or "${" in path:
            return "identityfile with tokens"
        expanded = Path(os.path.expanduser(path))
        if Path(f"{expanded}-cert.pub").is_file():
            return "a certificate beside the identityfile"
        if expanded.is_file() and _has_line(Path(f"{expanded}.pub"), b"sk-"):
            return "an identityfile on a security key"
    for name in ("userknownhostsfile", "globalknownhostsfile"):
        for path in (word for value in asked.get(name, ()) for word in value.split()):
            if _has_line(Path(os.path.expanduser(path)), _CERT_AUTHORITY):
                return "@cert-authority in known_hosts"
    return ""


def _has_line(path: Path, start: bytes) -> bool:
    try:
        return any(line.startswith(start) for line in path.read_bytes().splitlines())
    except OSError:
        return False


def open_openssh(
    host: str,
    command: str,
    stderr_path: Path,
    *,
    user: str | None,
    port: int | None,
    config: str | None,
    accept_new: bool,
    timeout_s: float,
) -> LocalTransport:
    """Start the agent by `command` on a host. Raises NodeError when there is no `ssh` here.

    A host's refusal shows when the agent is asked who it is: `ssh` says why and ends with 255.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={max(1, round(timeout_s))}"]
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3", "RequestTTY=no", "LogLevel=ERROR"]
    if accept_new:
        options.append("StrictHostKeyChecking=accept-new")
    argv = ["ssh", *(word for option in options for word in ("-o", option))]
    argv += ["-F", config] if config else []
    argv += ["-l", user] if user else []
    argv += ["-p", str(port)] if port else []
    advice = ": install OpenSSH's client, or use --launcher ssh"
    return open_program(host, (*argv, "--", host, command), stderr_path, advice=advice)


# -- ssh config -------------------------------------------------------------------------------------
#
# Read what the user's ssh configuration says about a host.
#
# OpenSSH itself is asked (`ssh -G`), which knows Include, Match and defaults; without it, paramiko's reader
# has
# to do.


_CONNECT_TIMEOUT_S = 15.0
_ASK_S = 30.0
_NO_USER = "No user exists for uid"
"""What OpenSSH says to users who are not in /etc/passwd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Says how to reach one host."""

    alias: str
    """The host as the user wrote it."""
    hostname: str
    user: str
    port: int
    identity_files: tuple[str, ...]
    identities_only: bool
    known_hosts: tuple[str, ...]
    """Files of known hosts; new keys are written to the first."""
    accept_new: bool
    timeout_s: float
    jump: HostSettings | None = None
    needs_openssh: str = ""
    """The option, of this host or of a jump host, that only the `ssh` program can honour."""
    gssapi: bool = False
    """Whether the `ssh` program would also try Kerberos."""


def resolve(
    host: str, *, user: str | None = None, port: int | None = None, config: str | None = None
) -> HostSettings:
    """Return the settings for a host; `user` and `port` win over the configuration. Raises NodeError."""
    return _resolve(host, user, port, config, depth=0)


def _resolve(host: str, user: str | None, port: int | None, config: str | None, depth: int) -> HostSettings:
    if depth > 5:
        raise NodeError(host, "ProxyJump goes in circles in the ssh configuration")
    options = _ask_openssh(host, user, port, config) if shutil.which("ssh") else _read_file(host, config)

    def first(name: str, default: str) -> str:
        return options.get(name, [default])[0]

    jump: HostSettings | None = None
    for hop in first("proxyjump", "none").split(","):  # a,b: through a to b
        if hop in ("", "none"):
            continue
        hop_user, _, rest = hop.removeprefix("ssh://").rpartition("@")
        name, _, hop_port = rest.partition(":") if rest.count(":") == 1 else (rest, "", "")
        reached = _resolve(name, hop_user or None, int(hop_port) if hop_port else None, config, depth + 1)
        if jump is not None:
            needs_openssh = reached.needs_openssh or jump.needs_openssh
            reached = replace(reached, jump=jump, needs_openssh=needs_openssh)
        jump = reached
    timeout = first("connecttimeout", "none")
    known_hosts = first("userknownhostsfile", "~/.ssh/known_hosts").split()
    known_hosts += first("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split()
    identities = map(os.path.expanduser, options.get("identityfile", []))
    return HostSettings(
        alias=host,
        hostname=first("hostname", host),
        user=user or first("user", user_name()),
        port=port or int(first("port", "22")),
        identity_files=tuple(path for path in identities if os.path.isfile(path)),
        identities_only=first("identitiesonly", "no") == "yes",
        known_hosts=tuple(map(os.path.expanduser, known_hosts)),
        accept_new=first("stricthostkeychecking", "ask") in ("accept-new", "no", "off", "false"),
        timeout_s=float(timeout) if timeout.isdigit() and int(timeout) else _CONNECT_TIMEOUT_S,
        jump=jump,
        needs_openssh=reason_for_openssh(options) or (jump.needs_openssh if jump is not None else ""),
        gssapi=first("gssapiauthentication", "no") == "yes",
    )


def _ask_openssh(host: str, user: str | None, port: int | None, config: str | None) -> dict[str, list[str]]:
    command = ["ssh", "-G", *(["-F", config] if config else []), *(["-p", str(port)] if port else [])]
    command += [f"{user}@{host}" if user else host]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired:  # a Match exec that hangs
        raise NodeError(host, f"ssh -G has not answered within {_ASK_S:g} s") from None
    if answer.returncode:
        said = answer.stderr.strip()
        if _NO_USER in said:
            raise NodeError(host, f"ssh needs an entry for you in /etc/passwd: {said}")
        raise NodeError(host, f"ssh -G does not accept it: {said}")
    options: dict[str, list[str]] = {}
    for line in answer.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _read_file(host: str, config: str | None) -> dict[str, list[str]]:
    import paramiko

    path = os.path.expanduser(config or "~/.ssh/config")
    if not os.path.isfile(path):
        return {}
    found: dict[str, Any] = dict(paramiko.SSHConfig.from_path(path).lookup(host))
    return {key: value if isinstance(value, list) else [str(value)] for key, value in found.items()}


# -- ssh --------------------------------------------------------------------------------------------


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
        self._client = client
        self._jumps = jumps
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

    def events(self) -> Iterator[Event | Output]:
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
        self._settings = settings
        self._accept = accept

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
