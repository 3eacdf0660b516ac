"""Hold what the command line says about where and how to run."""

from __future__ import annotations

import os
import socket
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from zlaunch.errors import LaunchError
from zlaunch.plan.plan import Program

DEFAULT_HOSTFILE = "/job/hostfile"
COMPAT_CHOICES = ("auto", "deepspeed", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Holds what the command line says about where and how to run."""

    program: Program
    run_id: str
    run_dir: str
    python: str
    workdir: str
    hostfile: str | None = None
    launcher: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    master_addr: str | None = None
    master_port: int = 0
    iface: str | None = None
    grace_s: float = 0.0
    heartbeat_s: float = 0.0
    env: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_config: str | None = None
    ssh_accept_new: bool = False
    bind_cores: bool = False
    core_list: tuple[int, ...] | None = None
    connect_timeout_s: float = 60.0
    requeue: bool = False
    max_restarts: int = 0
    spares: int = 0
    """The last so many hosts take part only when others are gone."""
    min_nodes: int | None = None
    """Go on without failed nodes while so many are left; None: all are needed."""
    quiet: bool = False
    verbose: bool = False
    node_rank: int | None = None
    """With --no_ssh: which of the nodes this is."""
    pod: bool = False
    """Tells whether the place among the nodes comes from the variables of a pod."""
    profile: str | None = None
    """Steps of which rank 0 writes a trace."""
    debug_rank: int | None = None
    """The rank that waits for a debugger before its script runs."""
    virtual_local_rank: bool = False
    """Each worker has LOCAL_RANK 0, and its GPU alone."""
    name: str = ""
    """Name of the run, from --name."""
    tags: tuple[str, ...] = ()
    compat: str | None = None
    """What `import deepspeed` is in the workers; None leaves it to their environment."""

    @property
    def worker_env(self) -> dict[str, str]:
        """Return the variables that the options add to the workers' environment. Raises LaunchError."""
        from zlaunch.plan.forwarded_env import requested_env

        env = requested_env(os.environ, self.env)
        if self.requeue:
            env["ZLAUNCH_TERM_SAVES"] = "1"
        if self.profile is not None:
            env["ZLAUNCH_PROFILE"] = self.profile
        if self.quiet:
            env["ZLAUNCH_QUIET"] = "1"
        if self.verbose:
            env["ZLAUNCH_VERBOSE"] = "1"
        if self.compat is not None:
            env["ZLAUNCH_COMPAT"] = self.compat
        compat = env.get("ZLAUNCH_COMPAT") or os.environ.get("ZLAUNCH_COMPAT") or "auto"
        if compat not in COMPAT_CHOICES:
            raise LaunchError(f"ZLAUNCH_COMPAT={compat}: expected {', '.join(COMPAT_CHOICES)}")
        return env

    def bound_cores(self, cores: Sequence[int], workers: int, host: str) -> tuple[tuple[int, ...], ...]:
        """Return the CPUs of each worker of a node; none unless they are to be bound. Raises LaunchError."""
        from zlaunch.system.devices import split_cores

        if not self.bind_cores and self.core_list is None:
            return ()
        if self.core_list is not None:
            missing = sorted(set(self.core_list) - set(cores))
            if missing:
                raise LaunchError(
                    f"--bind_core_list: {host} has no core {missing[0]} available; it has {len(cores)}"
                )
            cores = self.core_list
        return split_cores(cores, workers)


def python_there(venv: str | None, remote_python: str | None) -> str:
    """Return the interpreter on the nodes. Raises LaunchError."""
    if venv is not None and remote_python is not None:
        raise LaunchError("--venv and --remote_python cannot be used together")
    return remote_python or (f"{venv}/bin/python" if venv else sys.executable)


def own_names() -> set[str]:
    """Return the names of this machine for itself."""
    name = socket.gethostname()
    return {"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]}


def agreed_port(seed: str) -> int:
    """Return a port that follows from the seed alone, below those that systems hand out by themselves."""
    return 20000 + zlib.crc32(seed.encode()) % 12000
