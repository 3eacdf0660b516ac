"""What the command line says, and which way of starting agents follows from it."""

from __future__ import annotations

import os
import socket
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from zlaunch.plan.plan import Target

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation

Launcher = Literal["local", "ssh", "openssh", "slurm", "openmpi", "step", "hand"]
ALONE = ("local", "step", "hand")
"""Those that start nothing on other nodes."""
DEFAULT_HOSTFILE = "/job/hostfile"
COMPAT_CHOICES = ("auto", "deepspeed", "none")


_REACH = (
    click.option("--ssh_port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of sshd."),
    click.option("--ssh_config", metavar="FILE", help="Instead of ~/.ssh/config."),
    click.option(
        "--ssh_accept_new", is_flag=True, help="Trust host keys that are not known yet, and remember them."
    ),
    click.option(
        "--remote_python", metavar="PATH", help="Python on the nodes.  [default: the path of this one]"
    ),
    click.option("--venv", metavar="DIR", help="Virtual environment on the nodes; its Python is taken."),
    click.option("--iface", metavar="NAME", help="Network interface for rendezvous and traffic."),
)


def reach_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a click command with the options for getting to other nodes."""
    for option in reversed(_REACH):
        command = option(command)
    return command


def python_there(venv: str | None, remote_python: str | None) -> str:
    """The interpreter on the nodes. Raises click.UsageError."""
    if venv is not None and remote_python is not None:
        raise click.UsageError("--venv and --remote_python exclude each other")
    return remote_python or (f"{venv}/bin/python" if venv else sys.executable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says about where and how to run."""

    target: Target
    run_id: str
    run_dir: str
    hostfile: str | None
    launcher: str | None
    include: str | None
    exclude: str | None
    num_nodes: int | None
    num_gpus: int | None
    master_addr: str | None
    master_port: int
    iface: str | None
    grace_s: float
    heartbeat_s: float
    env: tuple[str, ...]
    ssh_port: int | None
    ssh_config: str | None
    ssh_accept_new: bool
    python: str
    workdir: str
    bind_cores: bool
    core_list: tuple[int, ...] | None
    connect_timeout_s: float
    requeue: bool = False
    quiet: bool = False
    node_rank: int | None = None
    """With --no_ssh: which of the nodes this is."""
    pod: bool = False
    """The variables of a pod have said so."""
    compat: str | None = None
    """What `import deepspeed` is in the workers; None leaves it to their environment."""

    @property
    def worker_env(self) -> dict[str, str]:
        """What the workers are told beside the usual. Raises click.UsageError."""
        from zlaunch.plan.env import ExportError, asked_for

        try:
            env = asked_for(os.environ, self.env)
        except ExportError as error:
            raise click.UsageError(str(error)) from None
        if self.requeue:
            env["ZLAUNCH_TERM_SAVES"] = "1"
        if self.quiet:
            env["ZLAUNCH_QUIET"] = "1"
        if self.compat is not None:
            env["ZLAUNCH_COMPAT"] = self.compat
        compat = env.get("ZLAUNCH_COMPAT") or os.environ.get("ZLAUNCH_COMPAT") or "auto"
        if compat not in COMPAT_CHOICES:
            raise click.UsageError(f"ZLAUNCH_COMPAT={compat}: expected {', '.join(COMPAT_CHOICES)}")
        return env


def choose_launcher(options: Options, allocation: Allocation | None) -> tuple[Launcher, str]:
    """The way to start agents, and why it is this one."""
    if options.node_rank is not None:
        why = f"the environment says that this is node {options.node_rank} of {options.num_nodes}"
        return "hand", why if options.pod else "--no_ssh"
    inside = allocation is not None and allocation.inside_step
    by_slurm = options.launcher == "slurm" or (options.launcher is None and options.hostfile is None)
    if allocation is not None and allocation.het_size > 1 and by_slurm:
        raise click.UsageError(
            f"job {allocation.job_id} is heterogeneous ({allocation.het_size} components), which is not "
            "supported: give a --hostfile with the hosts of all, or --launcher local"
        )
    if options.launcher in ("local", "ssh", "openssh", "openmpi"):
        chosen: Launcher = options.launcher  # type: ignore[assignment]
        return chosen, f"--launcher {chosen}"
    if options.launcher == "slurm":
        if allocation is None:
            raise click.UsageError(
                "--launcher slurm: this is not inside a SLURM job (no SLURM_JOB_ID); use sbatch or salloc"
            )
        return ("step" if inside else "slurm"), "--launcher slurm"
    if options.hostfile is not None:
        return "ssh", f"--hostfile {options.hostfile}"
    if inside:
        assert allocation is not None
        if allocation.ntasks == 1 and len(allocation.nodes) == 1:
            return "local", f"a single task of SLURM job {allocation.job_id}"
        return "step", f"started by srun in SLURM job {allocation.job_id}"
    if allocation is not None:
        if len(allocation.nodes) == 1 and allocation.nodes[0].host in own_names():
            return "local", f"SLURM job {allocation.job_id} has this node alone"
        return "slurm", f"SLURM job {allocation.job_id}"
    if os.path.isfile(DEFAULT_HOSTFILE):
        return "ssh", f"there is a {DEFAULT_HOSTFILE}"
    return "local", "no hostfile and no SLURM job"


def own_names() -> set[str]:
    """Names of this machine for itself."""
    name = socket.gethostname()
    return {"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]}


def bound_cores(
    options: Options, cores: Sequence[int], workers: int, host: str
) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each worker of a node, if they are to be bound. Raises click.UsageError."""
    from zlaunch.system.devices import split_cores

    if not options.bind_cores and options.core_list is None:
        return ()
    if options.core_list is not None:
        missing = sorted(set(options.core_list) - set(cores))
        if missing:
            raise click.UsageError(
                f"--bind_core_list: {host} has no core {missing[0]} for us; it has {len(cores)}"
            )
        cores = options.core_list
    return split_cores(cores, workers)


def quiet_port(seed: str) -> int:
    """A port that all who know the seed agree on, below those that systems hand out by themselves."""
    return 20000 + zlib.crc32(seed.encode()) % 12000


def has_terminal() -> bool:
    """Tell whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
