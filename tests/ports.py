"""Hand out ports of this machine that nobody else gets.

Note [Reserved ports]
A port that was free when somebody looked can be another process's a moment later. A socket that stays bound
but does not listen keeps it: the kernel gives a port with a bound socket to no `bind` to port 0 and to no
`connect`. With SO_REUSEADDR on both, a server that names the port (a TCPStore, zlaunch, torchrun) still
binds it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for a server that is started in the block, on any of this machine's addresses.

    See Note [Reserved ports].
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]
