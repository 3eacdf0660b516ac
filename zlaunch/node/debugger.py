"""Let a debugger attach to a worker before its script runs, and the other ranks wait: `--debug RANK`.

A rank at a breakpoint answers no collective, so no rank may give up on it: all groups of torch.distributed
get a timeout of weeks, whatever the script asks for. torch has no variable for that.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

from zlaunch.plan.plan import LOCAL_HOST
from zlaunch.system.import_watch import when_imported

_USUAL_PORT = 5678
"""The port of debugpy's examples: one launch.json then fits every run."""
_LIMIT = timedelta(days=20)
"""Longest time that fits into an int of milliseconds, as poll takes it."""
_MODULE = "torch.distributed.distributed_c10d"
_MAKES_GROUPS = ("init_process_group", "new_group", "split_group")


def await_client(host: str, event_fd: int) -> None:
    """Listen on this node's address, report it to the launcher, and return when a client has attached.

    `host` is this node's name for the launcher; localhost: the launcher is on this node.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about Python's own modules
    import debugpy

    address = "127.0.0.1" if host == LOCAL_HOST else _own_address(host)
    try:
        address, port = debugpy.listen((address, _free_port(address)))
    except (OSError, RuntimeError) as error:
        print(f"zlaunch: --debug: cannot listen on {address}: {error}", file=sys.stderr)
        sys.exit(1)
    _report(event_fd, address=address, port=port, attached=False)
    debugpy.wait_for_client()
    _report(event_fd, address=address, port=port, attached=True)


def _report(event_fd: int, **about: Any) -> None:
    event = {"type": "debugger", "rank": int(os.environ["RANK"]), "time": time.time(), **about}
    with suppress(OSError):  # the agent is gone, so there is no one to tell
        os.write(event_fd, json.dumps(event).encode() + b"\n")


def _own_address(host: str) -> str:
    """Return the address of this node that the launcher uses: where sshd was asked, or one of its name."""
    from zlaunch.system.network import interface_addresses

    own = [address for addresses in interface_addresses().values() for address in addresses]
    asked = os.environ.get("SSH_CONNECTION", "").split()[2:3]  # with srun, that of another machine
    named: list[str] = []
    with suppress(OSError, UnicodeError):
        named = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    found = [address for address in (*asked, *named) if address in own]
    return (found or own or ["127.0.0.1"])[0]


def _free_port(address: str) -> int:
    """Return the usual port, or 0 for a free one where another process has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, _USUAL_PORT))
        except OSError:
            return 0
    return _USUAL_PORT


def lift_timeouts() -> None:
    """Lengthen the timeouts of torch.distributed's groups, as soon as it is imported."""
    when_imported(_MODULE, _adapt)


def _adapt(module: ModuleType) -> None:
    for function in _MAKES_GROUPS:
        setattr(module, function, _without_limit(getattr(module, function)))


def _without_limit(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        # Scripts pass the timeout by name or by position.
        given = signature.bind(*args, **options)
        given.arguments["timeout"] = _LIMIT
        return original(*given.args, **given.kwargs)

    return make
