"""Run functions on workers, from Python: ``job = zlaunch.launch(function, num_gpus=2)``, ``job.result()``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from zlaunch.errors import LaunchError, ZlaunchError
from zlaunch.node.function_call import CALL, ERROR, PATH, RESULT
from zlaunch.runtime.trust import Folder, UntrustedError, check_folder, make_folder

if TYPE_CHECKING:
    from zlaunch.supervisor.found_runs import FoundRun

_ABOUT = "job.json"
_POLL_S = 0.05
_ASK_SLURM_S = 5.0
_TAIL_BYTES = 4000
_NOT_HERE = ("__detach", "__dry_run")
_starters: dict[int, ThreadPoolExecutor] = {}
"""By process, for a forked child has no thread of its parent's."""


def _starter() -> ThreadPoolExecutor:
    """Return what starts processes that end with this one: the kernel ends them with the thread that has
    started them, and this one lives as long as the process.
    """
    return _starters.setdefault(os.getpid(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="zlaunch"))


class JobFailedError(ZlaunchError, RuntimeError):
    """Says how a run of a function has failed, where it is not by a rank's exception; else quotes that."""


def launch(
    function: Callable[..., Any],
    *args: Any,
    num_gpus: int | None = None,
    num_nodes: int | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    queue: Literal["local", "slurm"] | None = None,
    slurm: Mapping[str, str | int] | None = None,
    detach: bool = False,
    options: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionJob:
    """Start ``function(*args, **kwargs)`` on fresh workers and return the job, whose ``result()`` waits.

    The function may be one that the calling program itself defines: it is sent by value, with what it refers
    to, so that this process need not be forked (it may use a GPU already). ``num_gpus``, ``num_nodes`` and
    ``hostfile`` are the command's options, ``options`` are further ones: ``["--max_restarts", "2"]``. The run
    ends with this process; with ``detach`` it goes on. ``queue="local"`` has it wait in zlaunch's queue;
    ``slurm={"time": "1:00:00", "partition": "gpu"}``, names and values of sbatch's options, in SLURM's. Over
    several nodes the working folder has to be one that all of them have.

    Raises TypeError for something that cannot be sent, LaunchError where nothing could be started.
    """
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    if slurm is not None and queue == "local":
        raise LaunchError('zlaunch.launch: queue="local" and slurm=... cannot be used together')
    for option in options:
        if option.partition("=")[0].replace("-", "_") in _NOT_HERE:
            raise LaunchError(f"zlaunch.launch: unknown option {option}; did you mean detach=True?")
    queue = "slurm" if slurm is not None else queue
    try:
        call = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        raise TypeError(f"{function!r} and its arguments cannot be sent to the workers: {error}") from None
    folder = Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}").absolute()
    own = _call_folder(folder)
    try:
        make_folder(folder)
        own.mkdir(mode=0o700)
        (own / PATH).write_text(json.dumps([os.path.abspath(entry) for entry in sys.path]))
        (own / CALL).write_bytes(call)
    except OSError as error:
        raise LaunchError(f"{error.filename}: {error.strerror}") from None
    words = ["-q"] if queue is None and not detach else []
    words += ["--run_dir", str(folder), "--run_id", folder.name, "--no_local_rank"]
    hosts = None if hostfile is None else os.fspath(hostfile)
    for option, value in (("--num_gpus", num_gpus), ("--num_nodes", num_nodes), ("--hostfile", hosts)):
        words += [] if value is None else [option, str(value)]
    words += [*options, "--module", "zlaunch.node.function_call", str(own)]
    job = FunctionJob(folder)
    if queue is not None:
        asked = [f"--sbatch=--{name.replace('_', '-')}={value}" for name, value in (slurm or {}).items()]
        said = _call(["submit", f"--queue={queue}", *asked, *words])
        job._note(said.strip() if queue == "slurm" else None)
    elif detach:
        _call(["--detach", *words])
        job._note()
    else:
        job._start(words)
    return job


def _popen(command: Sequence[str], console: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
    )


def _call_folder(run_dir: Path) -> Path:
    return run_dir / "call"


def _call(words: Sequence[str]) -> str:
    """Return what a command of zlaunch prints. Raises LaunchError with its words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "zlaunch", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise LaunchError(done.stderr.strip() or f"zlaunch {words[0]} ended with exit code {done.returncode}")
    return done.stdout


def _attempt_of(path: Path) -> int:
    return int(path.stem.split("_")[1])


class FunctionJob:
    """Stands for a function that runs, as a future does. ``FunctionJob("runs/NAME")`` finds one again."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Take the folder of a run that ``launch`` has started."""
        self.folder = Path(folder).resolve()
        try:
            check_folder(_call_folder(self.folder))
        except FileNotFoundError:
            raise LaunchError(f"{self.folder}: zlaunch.launch did not start a function there") from None
        except UntrustedError as error:
            raise LaunchError(str(error)) from None
        except OSError as error:
            raise LaunchError(f"{error.filename}: {error.strerror}") from None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._slurm: str | None = self._about().get("slurm")
        self._asked_at = 0.0
        self._slurm_ended = False
        if not (_call_folder(self.folder) / CALL).exists():
            raise LaunchError(f"{self.folder}: zlaunch.launch did not start a function there")

    def __repr__(self) -> str:
        return f"<zlaunch job {self.name}>"

    @property
    def name(self) -> str:
        """Return the run's name, for `zlaunch ps`, `logs` and `stop`."""
        return self.folder.name

    def _note(self, slurm: str | None = None, pid: int | None = None) -> None:
        from zlaunch.system.processes import start_ticks

        self._slurm = slurm
        about = {"slurm": slurm, "pid": pid, "start_ticks": None if pid is None else start_ticks(pid)}
        (_call_folder(self.folder) / _ABOUT).write_text(json.dumps(about))

    def _start(self, words: Sequence[str]) -> None:
        from zlaunch.supervisor.detach import CONSOLE_LOG

        command = [sys.executable, "-m", "zlaunch", "--parent", str(os.getpid()), *words]
        with open(self.folder / CONSOLE_LOG, "ab") as console:
            self._process = _starter().submit(_popen, command, console).result()
        self._note(pid=self._process.pid)

    # -- how it stands

    def done(self) -> bool:
        """Tell whether it has ended."""
        from zlaunch.system.processes import start_ticks

        if (process := self._child()) is not None:
            return process.poll() is not None
        found = self._found()
        if found is not None:
            return found.has_ended
        known = self._about()
        if known.get("slurm"):
            self._slurm = known["slurm"]
            return self._has_left_slurm()
        return known.get("pid") is None or start_ticks(known["pid"]) != known["start_ticks"]

    def _child(self) -> subprocess.Popen[bytes] | None:
        """Return the launcher, if this process has started it: only a parent can wait for it, and no fork of
        the parent.
        """
        return self._process if self._owner == os.getpid() else None

    def _about(self) -> dict[str, Any]:
        """Return what is known of how it was started; nothing while it is being started."""
        path = _call_folder(self.folder) / _ABOUT
        return json.loads(path.read_text()) if path.exists() else {}

    def running(self) -> bool:
        """Tell whether it runs now: it does not wait in a queue, and has not ended."""
        found = self._found()
        return found is not None and found.state == "running" and not self.done()

    def _found(self) -> FoundRun | None:
        from zlaunch.queue.daemon import settle
        from zlaunch.supervisor import run_folder
        from zlaunch.supervisor.found_runs import FoundRun

        known = run_folder.read(self.folder)
        return None if known is None else settle(FoundRun(self.name, self.folder, known))

    def _has_left_slurm(self) -> bool:
        """Ask SLURM, from time to time, about a job whose launcher has written nothing yet, or elsewhere."""
        from zlaunch.slurm.commands import FINISHED, state
        from zlaunch.slurm.environment import SlurmError

        assert self._slurm is not None
        if not self._slurm_ended and time.monotonic() - self._asked_at >= _ASK_SLURM_S:
            self._asked_at = time.monotonic()
            try:
                self._slurm_ended = state(self._slurm) in FINISHED
            except SlurmError:
                pass  # a busy controller; it is asked again
        return self._slurm_ended

    # -- what came of it

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return what the function gave back on each rank, by rank; wait for it, ``timeout`` seconds at most.

        Raises the exception of the rank that failed first, with that rank's traceback as its cause;
        JobFailedError where the run ended otherwise; TimeoutError.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._loaded(RESULT)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that ``result`` raises; None where all has gone well."""
        self.wait(timeout)
        errors = self._loaded(ERROR)
        if errors:
            first = min(errors, key=lambda about: about["time"])
            said = JobFailedError(f"rank {first['rank']} of {self.name}:\n\n{first['traceback']}")
            if first["error"] is None:
                return said
            import cloudpickle

            error: BaseException = cloudpickle.loads(first["error"])
            error.__cause__ = said
            return error
        code = self._exit_code()
        missing = self._missing()
        if code == 0 and not missing:
            return None
        what = f"ended with exit code {code}" if code else f"rank {missing[0]} has left no result"
        return JobFailedError(f"{self.name} {what}; {self.folder}\n{self._console_tail()}".rstrip())

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end, ``timeout`` seconds at most. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} has not ended within {timeout:g} s")
            time.sleep(_POLL_S)

    def _files(self, pattern: str) -> list[Path]:
        """Return the files of the last attempt, by rank."""
        last = max((_attempt_of(path) for kind in (RESULT, ERROR) for path in self._all(kind)), default=0)
        return [path for path in self._all(pattern) if _attempt_of(path) == last]

    def _all(self, pattern: str) -> list[Path]:
        return sorted(_call_folder(self.folder).glob(pattern))

    def _loaded(self, pattern: str) -> list[Any]:
        """Load files of the last attempt, by rank: see Note [Trust by owner] in runtime/trust.py."""
        import cloudpickle

        names = [path.name for path in self._files(pattern)]
        with Folder(_call_folder(self.folder)) as folder:
            return [cloudpickle.loads((folder.path / name).read_bytes()) for name in names]

    def _exit_code(self) -> int:
        if (process := self._child()) is not None:
            return process.wait()
        found = self._found()
        code = None if found is None else found.record.exit_code
        return 1 if code is None else code

    def _missing(self) -> list[int]:
        found = self._found()
        world = 0 if found is None else found.record.world_size
        there = {int(path.stem.split("_")[2]) for path in self._files(RESULT)}
        return [rank for rank in range(world) if rank not in there]

    def _console_tail(self) -> str:
        from zlaunch.supervisor.detach import CONSOLE_LOG

        for path in (self.folder / CONSOLE_LOG, Path(f"slurm-{self._slurm}.out")):
            if path.exists():
                return path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return ""

    def logs(self, rank: int = 0) -> str:
        """Return what a rank has printed so far."""
        from zlaunch.supervisor.run_files import log_path

        path = log_path(self.folder, rank)
        return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""

    def cancel(self) -> bool:
        """End it, or take it out of its queue, and wait for that; False where it had ended already."""
        if self.done():
            return False
        if (process := self._child()) is not None:
            process.send_signal(signal.SIGTERM)
        elif self._slurm is not None:
            from zlaunch.slurm.commands import cancel

            cancel(self._slurm)
        elif not self._cancelled_in_queue():
            found = self._found()
            if found is not None:
                from zlaunch.system.processes import Process, kill

                kill(Process(found.record.pid, found.record.start_ticks), signal.SIGTERM)
        self.wait()
        return True

    def _cancelled_in_queue(self) -> bool:
        from zlaunch.queue.daemon import cancel_job, ensure_daemon, queue_folder
        from zlaunch.queue.store import Store

        folder = queue_folder()
        store = Store(folder)
        job = store.of_run(self.folder)
        if job is None or job.state == "ended":
            return False
        cancel_job(store, job)
        ensure_daemon(folder)
        return True

    def follow(self) -> None:
        """Write what it shows to ``sys.stdout``, which a notebook shows, until it has ended."""
        from zlaunch.supervisor.detach import CONSOLE_LOG

        with open(self.folder / CONSOLE_LOG, "rb") as console:
            while True:
                has_ended = self.done()  # asked first: what comes afterwards is still read
                sys.stdout.write(console.read().decode("utf-8", "replace"))
                sys.stdout.flush()
                if has_ended:
                    return
                time.sleep(_POLL_S)
