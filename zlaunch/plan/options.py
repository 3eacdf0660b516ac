"""Hold what a command line asks for."""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zlaunch.errors import LaunchError
from zlaunch.system.user import home

if TYPE_CHECKING:
    from zlaunch.system.cores import Cores

# -- launch -----------------------------------------------------------------------------------------


DEFAULT_HOSTFILE = "/job/hostfile"
COMPAT_CHOICES = ("auto", "deepspeed", "none")
BIND_CHOICES = ("node", "cores", "none")
"""Names the CPU cores of a worker: those near its GPU, its own share of them, or all."""


@dataclass(frozen=True, slots=True)
class Program:
    """Says what every worker runs."""

    mode: Literal["script", "module", "exec"]
    name: str
    args: tuple[str, ...] = ()
    pass_local_rank: bool = True
    """Give `--local_rank=N` to a script that knows it, as DeepSpeed's launcher gives it to all."""
    preload: tuple[str, ...] = ()
    """Modules that the script imports. Workers are forks of a process that has imported them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Holds all that a command line asks for, with defaults and the flags of other launchers resolved.

    `cli/run.py` makes it once; nothing reads the command line after that. Fields have the names of the
    options where the values are the options' own.
    """

    program: Program
    run_id: str
    run_dir: str
    """The folder of the run; empty while the launcher that chooses it is not known."""
    workdir: str
    """The working folder on every node."""
    venv: str | None = None
    remote_python: str | None = None
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
    bind: str = "node"
    """Says how workers are bound to CPU cores, one of BIND_CHOICES."""
    core_list: tuple[int, ...] | None = None
    connect_timeout_s: float = 60.0
    requeue: bool = False
    max_restarts: int = 0
    first_attempt: int = 0
    """The number of the first attempt: earlier ones were a queue's."""
    spares: int = 0
    """The last N hosts replace dead ones."""
    min_nodes: int | None = None
    """Continue without dead nodes as long as N remain; None: all are needed."""
    health: bool = False
    exclude_unhealthy: bool = False
    """Continue without unhealthy nodes as without dead ones; otherwise they end the run."""
    hang_timeout_s: float = 0.0
    quiet: bool = False
    verbose: bool = False
    log_ranks: str = "0"
    """Ranks whose output the console shows, as on the command line."""
    local_ranks: tuple[int, ...] | None = None
    """Local ranks to show instead, on each node."""
    log_bytes: int | None = None
    """Keep the newest bytes of each rank's log; None: all of it."""
    detach: bool = False
    dry_run: bool = False
    as_json: bool = False
    parent: int | None = None
    """The process with which the launcher ends."""
    node_rank: int | None = None
    """With --no_ssh: which of the nodes this is."""
    arrival_run: str | None = None
    """The name of the run where nodes are numbered as they arrive at `master_addr`; None elsewhere."""
    is_meeting_point: bool = False
    """Whether nodes arrive at this machine: `master_addr` is one of its addresses."""
    configs: tuple[str, ...] = ()
    """Configs of other launchers' flags, as arguments of the script that are checked but not passed."""
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
    def python(self) -> str:
        """Return the interpreter on the nodes."""
        return python_there(self.venv, self.remote_python)

    @property
    def checked_command(self) -> tuple[str, ...]:
        """Return the script and all arguments that may name a config."""
        return (self.program.name, *self.configs, *self.program.args)

    @property
    def other_folder(self) -> str | None:
        """Return the working folder if it is another one than this process's."""
        return None if self.workdir == os.getcwd() else self.workdir

    @property
    def checks_health(self) -> bool:
        """Return whether the health of nodes is checked before workers start."""
        return self.health or self.exclude_unhealthy

    @property
    def may_restart(self) -> bool:
        """Return whether the run can restart after a failure."""
        return self.max_restarts > 0 or self.spares > 0 or self.min_nodes is not None

    @property
    def worker_env(self) -> dict[str, str]:
        """Return the variables that the options add to the workers' environment. Raises LaunchError."""
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

    @property
    def shares_cores(self) -> bool:
        """Tell whether workers that are bound to cores may share them."""
        return self.bind == "node" and self.core_list is None

    def bound_cores(
        self, cores: Cores, near: Sequence[Sequence[int]], workers: int, host: str
    ) -> tuple[tuple[int, ...], ...]:
        """Return the CPUs of each worker of a node; none unless they are to be bound. Raises LaunchError.

        ``cores``: the node's physical cores. ``near``: the CPUs near each worker's GPU, none where that is
        unknown; empty for CPU workers.
        """
        from zlaunch.system.cores import flat, split_cores, split_near

        cpus = flat(cores)
        if self.core_list is not None:
            missing = sorted(set(self.core_list) - set(cpus))
            if missing:
                raise LaunchError(
                    f"--bind_core_list: {host} has no core {missing[0]} available; it has {len(cpus)}"
                )
            return split_cores(tuple((cpu,) for cpu in self.core_list), workers)
        is_known = len(near) > 0 and all(near)
        if self.bind == "cores":
            return split_near(cores, near) if is_known else split_cores(cores, workers)
        # Nothing to choose on a machine with a single NUMA node.
        if self.bind == "node" and is_known and any(set(each) != set(cpus) for each in near):
            return tuple(tuple(each) for each in near)
        return ()


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


# -- forwarded env ----------------------------------------------------------------------------------
#
# Choose which of the launching machine's variables go to the other nodes.


_PREFIXES = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "MV2_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "CUPY_"),
    *("PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "DS_"),
    *("WANDB_", "MLFLOW_", "COMET_", "TENSORBOARD_"),
)
"""Variables for communication, torch and its compilers, Python and its threads, libraries, trackers."""
_NAMES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "TZ", "LANG", "LC_ALL"),
    *("ZLAUNCH_SHARED_MEMORY", "ZLAUNCH_DEBUG_FREE", "ZLAUNCH_QUIET", "ZLAUNCH_VERBOSE"),
)
_NEVER = ("CUDA_VISIBLE_DEVICES",)
"""Variables that each node sets for itself."""

OWN = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        *("CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    )
)
ENV_FILES = (".deepspeed_env", ".zlaunch_env")
"""Looked for in the home folder and then in the current one; later ones win."""

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class EnvError(LaunchError, ValueError):
    """Names a variable that cannot be exported; the text is for the user."""


def forwarded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to the other nodes without being asked for: an allow-list."""
    return {
        key: value
        for key, value in environ.items()
        if (key.startswith(_PREFIXES) or key in _NAMES) and key not in _NEVER
    }


def requested_env(
    environ: Mapping[str, str], given: Iterable[str] = (), folders: Iterable[Path] | None = None
) -> dict[str, str]:
    """Return the variables of the env files and then of `--env KEY[=VALUE]`, for workers anywhere.

    Raises EnvError, also for a variable that each worker gets from the launcher.
    """
    chosen: dict[str, str] = {}
    if folders is None:
        folders = [folder for folder in (home(), Path.cwd()) if folder is not None]
    for folder in folders:
        for name in ENV_FILES:
            chosen |= read_env_file(folder / name)
    for item in given:
        key, equals, value = item.partition("=")
        if not _KEY.fullmatch(key):
            raise EnvError(f"--env {item!r}: {key!r} is not a variable's name")
        if key in OWN:
            raise EnvError(f"--env {key}: zlaunch sets this variable for every worker")
        if key in _NEVER:
            raise EnvError(f"--env {key}: zlaunch sets it on each node: choose GPUs with --include HOST:0,1")
        if not equals and key not in environ:
            raise EnvError(f"--env {key}: not set in this environment; write --env {key}=VALUE")
        chosen[key] = value if equals else environ[key]
    return chosen


def read_env_file(path: Path) -> dict[str, str]:
    """Read KEY=VALUE lines; `#` comments, blank lines, a leading `export` and quotes are fine.

    A file that is not there has no variables. Raises EnvError naming file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"{path}: cannot be read: {error}") from None
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        key = key.strip()
        value = value.strip()
        if not equals or not _KEY.fullmatch(key):
            raise EnvError(f"{path}:{number}: {line!r} is not KEY=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found[key] = value
    return found
