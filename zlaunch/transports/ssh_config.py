"""Read what the user's ssh configuration says about a host.

OpenSSH itself is asked (`ssh -G`), which knows Include, Match and defaults; without it, paramiko's reader has
to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Any

from zlaunch.errors import NodeError
from zlaunch.system.user import user_name
from zlaunch.transports.openssh import reason_for_openssh

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
