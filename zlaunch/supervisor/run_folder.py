"""Create the folder of a run, lock it against a second launch, and keep the record of its attempts in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from zlaunch.errors import LaunchError
from zlaunch.plan.options import Program
from zlaunch.plan.plan import LOCAL_HOST, Plan
from zlaunch.runtime.trust import Folder, UntrustedError, make_folder
from zlaunch.runtime.world_sizes import FirstBatch
from zlaunch.supervisor.end import End, Slot, read_slots
from zlaunch.supervisor.redact import redact_arguments, secret_values
from zlaunch.system import boot_clock
from zlaunch.system.messages import MadeEngine, Saved
from zlaunch.system.processes import pid_namespace, start_ticks

# -- run record -------------------------------------------------------------------------------------
#
# Keep `launcher.json` in a run's folder: who runs it, for `zlaunch ps`, `stop` and `stacks`.


class Labels(NamedTuple):
    """Holds what the user calls a run."""

    name: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Describes one run, as its launcher has written it down. Times are in seconds since the epoch."""

    run_id: str
    host: str
    pid: int
    start_ticks: int
    """Tells the process from a later one with an equal id."""
    hosts: tuple[str, ...]
    world_size: int
    command: tuple[str, ...]
    started: float
    attempt: int = 0
    ended: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    """Why it ended, see `zlaunch.supervisor.end`. Versions up to 0.2.0 wrote none."""
    why: str = ""
    """Why its queue did not start it; "" where it did, and of a run without a queue."""
    bad_hosts: tuple[str, ...] = ()
    """The hosts that refused to run it."""
    bad_slots: tuple[Slot, ...] = ()
    """The slots that refused to run it."""
    asked: float | None = None
    """When a queue was asked for it."""
    boot: str = ""
    """The boot of the host that `start_ticks` counts from; "" where it is not known."""
    pid_namespace: int = 0
    """The pid namespace that `pid` belongs to; 0 where it is not known."""
    name: str = ""
    """The user's name for it; its folder's name is another one."""
    tags: tuple[str, ...] = ()
    slurm_job: str = ""
    """The SLURM job that the launcher runs in; "" outside of one."""
    slurm_task: str = ""
    """The job as squeue shows it, if it is a task of a job array: 11_1; "" otherwise."""
    slurm_restarts: int = 0
    """Counts the job's requeues before this run, as SLURM_RESTART_COUNT does."""

    @property
    def label(self) -> str:
        """Return its name and tags as people read them."""
        return " ".join((*([self.name] if self.name else ()), *(f"#{tag}" for tag in self.tags)))

    def shown(self, host: str) -> str:
        """Return a node's name for the user: in a SLURM job, the launcher's host instead of localhost."""
        return self.host if host == LOCAL_HOST and self.slurm_job else host

    @property
    def came(self) -> float:
        """Return when its command line was given, which orders runs."""
        return self.started if self.asked is None else self.asked

    @property
    def end(self) -> End | None:
        """Return how it ended; None while nobody has written it down."""
        return End.from_json(asdict(self))

    @property
    def is_of_other_namespace(self) -> bool:
        """Whether the launcher runs in another pid namespace (a container), and its id means nothing here."""
        return self.pid_namespace not in (0, pid_namespace())

    def is_running(self) -> bool:
        """Tell whether the launcher lives; the answer holds in the pid namespace of the launcher only."""
        is_now = self.boot in ("", boot_clock.boot_id())
        return is_now and self.ended is None and start_ticks(self.pid) == self.start_ticks


_FIELDS = frozenset(field.name for field in fields(RunRecord))
CHECKPOINT = "checkpoint.json"
_LARGEST = 1e11
"""Bounds the numbers of a record: a later time in seconds has no date."""
_BATCHES = "batches.json"


def _path(run_dir: str | Path) -> Path:
    return Path(run_dir) / "launcher.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a run; return {} where there is none.

    Return {} also where the folder is not trusted: see Note [Trust by owner] in runtime/trust.py.
    """
    try:
        with Folder(path.parent) as folder, folder.open(path.name) as file:
            content = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a run's folder. A failure prints a warning, and does not end the run."""
    data = (json.dumps(content, indent=1) + "\n").encode()
    try:
        with Folder(path.parent) as folder:
            try:
                folder.write(path.name, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                _write_over(folder.path / path.name, data)
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}: what it says of the run is old"
        print(f"zlaunch: warning: {text}", file=sys.stderr, flush=True)


def _write_over(path: Path, data: bytes) -> None:
    """Write JSON into the blocks that a file has: a full disk has no others. Spaces cover the rest."""
    with open(path, "r+b") as file:
        before = os.fstat(file.fileno()).st_size
        file.write(data + b" " * max(0, before - len(data)))


def _shown(command: Sequence[str]) -> tuple[str, ...]:
    return redact_arguments(command, secret_values(os.environ))


def started(plan: Plan, attempt: int) -> None:
    """Record that an attempt begins."""
    hosts = tuple(node.host for node in plan.nodes)
    begun(plan.run_dir, plan.run_id, hosts, plan.world_size, attempt)


def begun(
    run_dir: str,
    run_id: str,
    hosts: Sequence[str],
    world_size: int,
    attempt: int = 0,
    *,
    labels: Labels | None = None,
) -> None:
    """Record that this process runs a launch, whose nodes may have to be reached yet. Without ``labels``, it
    keeps those of the record.
    """
    known = read(run_dir)
    known = known if known is not None and known.run_id == run_id else None
    asked = known if known is not None and known.asked is not None else None
    if labels is None:
        labels = Labels() if known is None else Labels(known.name, known.tags)
    record = RunRecord(
        run_id=run_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        hosts=tuple(hosts),
        world_size=world_size,
        command=_shown(sys.argv[1:]) if asked is None else asked.command,
        # of the run: a restart by the same launcher is no other one
        started=known.started if known is not None and known.pid == os.getpid() else time.time(),
        attempt=attempt,
        asked=None if asked is None else asked.asked,
        boot=boot_clock.boot_id(),
        pid_namespace=pid_namespace(),
        slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        slurm_task=_array_task(os.environ),
        slurm_restarts=_restarts(os.environ),
        **labels._asdict(),
    )
    _write(_path(run_dir), asdict(record))


def _array_task(environ: Mapping[str, str]) -> str:
    array = environ.get("SLURM_ARRAY_JOB_ID", "")
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if environ.get("SLURM_JOB_ID") and array and task else ""


def _restarts(environ: Mapping[str, str]) -> int:
    count = environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if environ.get("SLURM_JOB_ID") and count.isdecimal() else 0


def ended(run_dir: str, end: End) -> None:
    """Record how a run ended, if it had begun."""
    record = read(run_dir)
    if record is not None and record.pid == os.getpid():
        _write(_path(run_dir), {**asdict(record), **end.as_json(), "ended": time.time()})


def own_end(run_dir: str, exit_code: int) -> End:
    """Return the end that this process has recorded for a run, or what its exit code says where it has not: a
    launch that was refused before the run began.
    """
    record = read(run_dir)
    end = record.end if record is not None and record.pid == os.getpid() else None
    return end or End.of_code(exit_code)


# -- runs that wait in a queue

QUEUE_FOLDER = ".queue"
"""In a run's folder: what its queue keeps there."""


def queued(
    run_dir: str,
    run_id: str,
    hosts: Sequence[str],
    world_size: int,
    command: Sequence[str],
    labels: Labels | None = None,
) -> None:
    """Record a run that waits until its queue starts it. Raises OSError."""
    with Folder(Path(run_dir)) as folder:
        (folder.path / QUEUE_FOLDER).mkdir(exist_ok=True)
        _queued_mark(folder.path).touch()
    record = RunRecord(
        run_id=run_id,
        host=socket.gethostname(),
        pid=0,
        start_ticks=0,
        hosts=tuple(hosts),
        world_size=world_size,
        command=_shown(command),
        started=(now := time.time()),
        asked=now,
        **(labels or Labels())._asdict(),
    )
    _write(_path(run_dir), asdict(record))


def is_queued(run_dir: str | Path) -> bool:
    """Tell whether a queue will start, or may start again, a run."""
    return _queued_mark(run_dir).exists()


def left_queue(run_dir: str | Path, end: End, why: str = "") -> None:
    """Record that the queue has done with a run, how it ended, and `why` where it was not started."""
    if (record := read(run_dir)) is not None:
        ended = time.time() if record.ended is None else record.ended
        _write(_path(run_dir), {**asdict(record), **end.as_json(), "ended": ended, "why": why})
    try:
        with Folder(Path(run_dir)) as folder:
            _queued_mark(folder.path).unlink(missing_ok=True)
    except OSError:  # a folder that nobody can write any more
        pass


def _queued_mark(run_dir: str | Path) -> Path:
    return Path(run_dir, QUEUE_FOLDER, "queued")


# -- what a later attempt goes on from


def saved(plan: Plan, event: Saved) -> None:
    """Record where the run has saved, in `checkpoint.json`."""
    content = {
        "folder": event.folder,
        "tag": event.tag,
        "step": event.step,
        "run_id": plan.run_id,
        "argv": plan.nodes[0].workers[0].argv,
        "job": os.environ.get("SLURM_JOB_ID"),
        "time": time.time() if event.time is None else event.time,
    }
    _write(Path(plan.run_dir) / CHECKPOINT, content)


def made_engine(plan: Plan, attempt: int, event: MadeEngine) -> None:
    """Record an engine of the run's first attempt that has any, in `batches.json`."""
    batch = _read_batch([event.train_batch_size, event.micro_batch_size, plan.run_world_size])
    path = Path(plan.run_dir) / _BATCHES
    if batch is None:
        return
    own = {"run_id": plan.run_id, "attempt": attempt}
    known = read_json(path)
    if known.get("run_id") != plan.run_id:
        _write(path, {**own, "engines": [batch]})
    elif known.get("attempt") == attempt and isinstance(known.get("engines"), list):
        _write(path, {**known, "engines": [*known["engines"], batch]})


def first_batches(run_dir: str, run_id: str, attempt: int) -> tuple[FirstBatch, ...]:
    """Return the engines of the run's first attempt, in their order; none before it."""
    known = read_json(Path(run_dir) / _BATCHES)
    engines = known.get("engines")
    earlier = known.get("run_id") == run_id and known.get("attempt") != attempt
    found = [_read_batch(each) for each in engines] if earlier and isinstance(engines, list) else []
    return tuple(batch for batch in found if batch is not None)


def _read_batch(numbers: object) -> FirstBatch | None:
    match numbers:
        case [int(size), int(micro), int(ranks)] if min(size, micro, ranks) >= 1:
            return FirstBatch(size, micro, ranks)
    return None


def resume_folder(
    run_dir: str, run_id: str, attempt: int, program: Program, environ: Mapping[str, str]
) -> str | None:
    """Return the folder where an earlier attempt of this run has saved, or an earlier start of this requeued
    SLURM job (whose run folders stand side by side); None for a run that begins. ``program`` tells a job's
    runs apart.
    """
    found: list[tuple[float, str]] = []
    job = environ.get("SLURM_JOB_ID") if environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0") else None
    paths = {Path(run_dir) / CHECKPOINT}
    if job:
        paths |= set(Path(run_dir).parent.glob(f"*/{CHECKPOINT}"))
    for path in paths:
        content = read_json(path)
        try:
            mine = attempt > 0 and content["run_id"] == run_id
            argv = list(content["argv"])
            same = program.name in argv and argv[len(argv) - len(program.args) :] == list(program.args)
            if mine or (job is not None and content["job"] == job and same):
                found.append((float(content["time"]), str(content["folder"])))
        except (ValueError, TypeError, KeyError):
            continue
    return max(found)[1] if found else None


def read(run_dir: str | Path) -> RunRecord | None:
    """Read the record of a run's folder; None where there is none, or the folder is not trusted."""
    data = read_json(_path(run_dir))
    try:
        lists = {name: tuple(data[name]) for name in ("hosts", "command")}
        lists |= {name: tuple(data.get(name, ())) for name in ("bad_hosts", "tags")}
        lists["bad_slots"] = read_slots(data.get("bad_slots"))
        mine = {name: data[name] for name in _FIELDS & data.keys()}  # a later version may have more
        record = RunRecord(**{**mine, **lists})
    except (TypeError, KeyError):
        return None
    cause = () if record.cause is None else (record.cause,)
    own = (record.run_id, record.host, record.boot, record.name, record.slurm_job, record.slurm_task, *cause)
    texts = (*own, *record.hosts, *record.command, *record.bad_hosts, *record.tags)
    numbers: tuple[int | float, ...] = (
        *(record.pid, record.start_ticks, record.pid_namespace),
        *(record.world_size, record.attempt, record.started),
    )
    known = all(isinstance(text, str) for text in texts)
    numbers += tuple(n for n in (record.ended, record.exit_code, record.asked) if n is not None)
    known = known and all(isinstance(number, (int, float)) and abs(number) < _LARGEST for number in numbers)
    return record if known else None


# -- run folder -------------------------------------------------------------------------------------


_PROBE_BYTES = 1 << 16
_ENDING_S = 2.0
"""How long a launcher that has ended may still hold the folder."""


def make_run_dir(path: Path, *, shared: bool = False) -> int | None:
    """Create the folder for logs and prove that it takes files. The returned descriptor keeps other launches
    out while it is open.

    `shared`: launchers of other nodes, which are parts of this run, may use it too (and two pods may have one
    host's name), and they are not kept out. Raises LaunchError.
    """
    known = None if shared else read(path)
    if known is not None and known.host == socket.gethostname() and known.is_running():
        raise LaunchError(f"--run_dir {path}: a job is running there (process {known.pid})")
    try:
        make_folder(path)
        (path / "logs").mkdir(exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))  # an empty file can be made on a full disk
        finally:
            probe.unlink(missing_ok=True)
    except UntrustedError as error:
        raise LaunchError(f"--run_dir {error}; or use another folder") from None
    except OSError as error:
        raise LaunchError(f"--run_dir {path}: cannot write there: {error.strerror}") from None
    if shared:
        return _lock(path, fcntl.LOCK_SH)
    # A launcher that ends closes its files one by one: its queue may start the next attempt in between.
    until = time.monotonic() + _ENDING_S
    while (lock := _lock(path)) is None:
        if time.monotonic() >= until:
            raise LaunchError(f"--run_dir {path}: another launch has just started there")
        time.sleep(0.02)
    return lock


def drop_unused(path: Path) -> None:
    """Remove a run's folder that no other launch uses, if nothing was written there."""
    with suppress(OSError):
        (path / "logs").rmdir()
        path.rmdir()


def name_of(path: Path) -> str:
    """Return what a run is called here: its folder's name, or the way to it where it is not under `runs`."""
    return path.name if path.parent == Path("runs").absolute() else os.path.relpath(path)


def point_latest(path: Path) -> None:
    """Let `latest`, beside a run's folder, be a link to it. Where that cannot be, it is not."""
    link = path.parent / "latest"
    new = path.parent / f".latest-{os.getpid()}"
    try:
        if link.is_symlink() or not link.exists():
            new.symlink_to(path.name, target_is_directory=True)
            new.replace(link)
    except OSError:
        new.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Tell whether a launch holds a run's folder."""
    fd = _lock(path)
    if fd is not None:
        os.close(fd)
    return fd is None


def _lock(path: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """Lock a run's folder while the returned descriptor is open; None where another launch has locked it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a file system without locks
        pass
    return fd
