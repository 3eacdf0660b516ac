"""Decide who may see the pages: the token, the cookie, and the names in the Host header. Pure.

Note [Who may see the pages]
Any program of this machine can connect to the port, and any web page that the user opens can have the browser
ask it. So every request needs the token: in the address at first, in a cookie from then on. A page of another
site whose name points to this address (DNS rebinding) would be of the cookie's site only under its own name,
and such names in the Host header are refused before the token is looked at. No page has an action; who looks
settles the queue, as in `zlaunch ps` (Note [Who settles]).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d+)?")


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Holds what a request needs."""

    port: int
    host: str = "127.0.0.1"
    """The address that the server listens at."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def cookie(self) -> str:
        """Return the cookie's name. Browsers send cookies to all ports of a host, so it has the port."""
        return f"zlaunch_ui_{self.port}"

    def holds(self, given: str) -> bool:
        """Return whether this is the token, in a time that does not depend on it."""
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def knows(self, header: str) -> bool:
        """Return whether a Host header names this machine. Its port may differ: `ssh -L` forwards others."""
        match = _HOST.fullmatch(header)
        if match is None:
            return False
        name = (match[1] or match[2]).lower().rstrip(".")
        own = {"localhost", self.host.lower()}
        if not is_loopback(self.host):
            own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        return name in own or _is_address(name)  # a name can be pointed anywhere, an address cannot


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
