"""Start the agent on another host by the `ssh` program, where the configuration asks for OpenSSH."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zlaunch.transports.local import LocalTransport, open_program

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
