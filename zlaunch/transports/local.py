"""Start the agent as a child process of the launcher, with pipes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from zlaunch.errors import NodeError
from zlaunch.system.events import AgentStream, Event, Output, encode
from zlaunch.system.pipes import widen
from zlaunch.system.processes import kill_leftovers, python_module_argv

# -- local ------------------------------------------------------------------------------------------


_DIAGNOSTICS_BYTES = 4096
_CHUNK_BYTES = 1 << 18
_NOT_INHERITED = (
    "ZLAUNCH_RUN_ID",
    "ZLAUNCH_RESUME_DIR",
    "ZLAUNCH_STDIN_FD",
    "ZLAUNCH_WORLD_SIZES",
    "ZLAUNCH_FIRST_BATCHES",
)
_KILL_S = 2.0


class LocalTransport:
    """Starts the agent in its own session, so that Ctrl-C in the terminal reaches the launcher alone."""

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        stderr_path: Path,
        *,
        local: bool = True,
        without: Collection[str] = (),
    ) -> None:
        """Start the agent, without these variables. `local`: the process is the agent's watchdog itself, and
        not a starter such as srun.
        """
        self.host = host
        self.local = local
        self._stderr_path = stderr_path
        user_input = _user_input() if local else None
        # An agent inside another run is the inner run's: the outer one reaches it through its launcher.
        env = {key: value for key, value in os.environ.items() if key not in (*_NOT_INHERITED, *without)}
        if user_input is not None:
            env["ZLAUNCH_STDIN_FD"] = str(user_input)
        stderr_path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed since
        with open(stderr_path, "wb") as stderr:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env=env,
                pass_fds=() if user_input is None else (user_input,),
            )
        if user_input is not None:
            os.close(user_input)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        widen(self._stdout.fileno())

    def send(self, message: Event) -> None:
        """Write straight to the descriptor: a buffered writer could be entered twice by a signal handler."""
        data = memoryview(encode(message))
        with suppress(OSError, ValueError):  # it is gone; its reader sees that too
            while data:
                data = data[os.write(self._stdin.fileno(), data) :]

    def events(self) -> Iterator[Event | Output]:
        """Yield events until the agent's stdout ends."""
        stream = AgentStream()
        with self._stdout:
            while not stream.damaged and (chunk := os.read(self._stdout.fileno(), _CHUNK_BYTES)):
                yield from stream.feed(chunk)

    def close(self, timeout_s: float) -> int | None:
        """Close stdin, which tells a living agent to stop, and wait."""
        with suppress(OSError):
            self._stdin.close()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if not self.diagnostics():
            with suppress(OSError):  # the run's folder may be gone, or a file in its place
                self._stderr_path.unlink()
        return code

    def kill(self) -> None:
        """Kill the agent, all that it has started, and its watchdog, in whatever state they are."""
        if self.local and self._process.poll() is None:
            kill_leftovers(ancestor=self._process.pid, timeout_s=_KILL_S)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel may hold it
            self._process.wait(_KILL_S)
        with suppress(OSError):
            self._stdin.close()

    def diagnostics(self) -> str:
        """Return the end of the agent's stderr."""
        try:
            return self._stderr_path.read_bytes()[-_DIAGNOSTICS_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            return ""


def open_local(host: str, stderr_path: Path) -> LocalTransport:
    """Start the agent on this machine. Raises NodeError."""
    try:
        return LocalTransport(host, python_module_argv("zlaunch.node.agent"), stderr_path)
    except OSError as error:
        raise NodeError(host, f"cannot start an agent: {error}") from None


def open_program(
    host: str, argv: Sequence[str], stderr_path: Path, *, advice: str = "", without: Collection[str] = ()
) -> LocalTransport:
    """Start the agent of a host by a program that carries its lines. Raises NodeError."""
    if shutil.which(argv[0]) is None:
        raise NodeError(host, f"there is no {argv[0]} on PATH{advice}")
    try:
        return LocalTransport(host, argv, stderr_path, local=False, without=without)
    except OSError as error:
        raise NodeError(host, f"cannot start {argv[0]}: {error.strerror}") from None


def _user_input() -> int | None:
    """Return a copy of this process's stdin, for rank 0; None where there is none.

    A launcher in the background of its terminal keeps it from rank 0, which would take what is typed there.
    """
    try:
        if stat.S_ISDIR(os.fstat(0).st_mode) or (os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()):
            return None
        fd = os.dup(0)
    except OSError:
        return None
    os.set_inheritable(fd, True)
    return fd


# -- command ----------------------------------------------------------------------------------------
#
# Start agents by srun or mpirun, one such command a node, with pipes through it.


_PER_TASK = (
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"),
    *("SLURM_GPUS_PER_SOCKET", "SLURM_TRES_BIND"),
)
"""What the job asked for each task; `srun` would apply it to the agent, which is to have everything."""


def srun_prefix(host: str, cpus: int | None) -> tuple[str, ...]:
    """Return the srun that starts one unbound task on a node of this allocation, beside what runs there."""
    return (
        "srun",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        *((f"--cpus-per-task={cpus}",) if cpus else ()),
        "--overlap",
        "--mpi=none",
        "--cpu-bind=none",
        "--unbuffered",
        "--quiet",
    )


def mpirun_prefix(host: str) -> tuple[str, ...]:
    """Return the mpirun that starts one unbound process on a node."""
    return ("mpirun", "--allow-run-as-root", "-np", "1", "-host", host, "--bind-to", "none")


def open_command(host: str, prefix: Sequence[str], python: str, stderr_path: Path) -> LocalTransport:
    """Start the agent with a Python of the node. Raises NodeError when the starter is not there."""
    argv = (*prefix, python, *python_module_argv("zlaunch.node.agent")[1:])
    return open_program(host, argv, stderr_path, without=_PER_TASK)
