"""Ask SLURM by its own commands: submit, follow and requeue a job, end a step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zlaunch.hostfiles.hostlist import expand
from zlaunch.slurm.environment import Allocation, SlurmError, read, with_gpus

UNKNOWN = "UNKNOWN"
"""The state of a job that SLURM no longer knows."""

FINISHED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT", UNKNOWN}
)
"""The states in which a job has left the queue."""

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
"""The states in which nothing of a job runs, although a requeued one has run before."""

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
_SUBMIT_TIMEOUT_S = 300.0
_QUERY_TIMEOUT_S = 60.0
_LISTING_S = 30.0
"""Seconds for which a list of jobs is kept: who follows a run looks many times a second."""
_LISTING_TIMEOUT_S = 10.0
PATIENCE_S = 600.0
"""Seconds in which SLURM may be silent, as on a busy cluster."""
_CHUNK_BYTES = 1 << 20
_CHUNKS_A_POLL = 64


def submit(path: str | os.PathLike[str], *, unset: Sequence[str] = (), shown: str = "") -> str:
    """Hand a file to sbatch and return the job's id; `unset`: variables that would win over what it says;
    `shown`: what an error calls the file. Raises SlurmError with sbatch's words if it refuses.
    """
    shown = shown or os.fspath(path)
    if shutil.which("sbatch") is None:
        raise SlurmError("sbatch not found on PATH: this machine cannot submit to SLURM")
    command = ["sbatch", "--parsable", os.path.abspath(path)]
    environ = {name: value for name, value in _outside_of_jobs(os.environ).items() if name not in unset}
    result = _run(command, _SUBMIT_TIMEOUT_S, environ)
    if result.returncode != 0 and "timed out" in result.stderr:
        raise SlurmError(f"sbatch {shown}: {_complaint(result)}; the job may already be queued")
    if result.returncode != 0:
        raise SlurmError(f"sbatch rejected {shown}: {_complaint(result)}")
    lines = result.stdout.split()
    match = re.fullmatch(r"(\d+)(;.*)?", lines[-1], re.ASCII) if lines else None
    if match is None:
        raise SlurmError(f"expected a job ID from sbatch, got {result.stdout!r}")
    return match[1]


def state(job_id: str) -> str:
    """Return the job's state in SLURM's words (`PENDING`, `RUNNING`), UNKNOWN when it has forgotten it.

    Raises SlurmError when SLURM does not answer, which on a busy cluster passes.
    """
    failures: list[SlurmError] = []
    for command, pattern in (
        (["squeue", "-h", "-j", job_id, "-o", "%T"], r"\s*(\w+)"),
        (["scontrol", "show", "job", job_id], r"(?s).*?\bJobState=(\w+)"),
    ):
        try:
            found = _ask(command, pattern)
        except SlurmError as error:
            failures.append(error)
        else:
            if found is not None:
                return found
    if len(failures) == 2:
        raise failures[0]
    try:  # the controller has forgotten it: accounting may know how it ended
        found = _ask(["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State"], r"\s*(\w+)")
    except SlurmError:
        found = None
    return found if found in FINISHED else UNKNOWN


def find_output(job_id: str) -> Path | None:
    """Return where the job's output goes, by scontrol; None when SLURM does not say."""
    try:
        result = _run(["scontrol", "show", "job", job_id], _QUERY_TIMEOUT_S)
    except SlurmError:
        return None
    path = re.search(r"^\s*StdOut=(.+)$", result.stdout, re.MULTILINE)
    name = re.search(r"\bJobName=(\S+)", result.stdout)
    if path is None:
        return None
    values = {"j": job_id, "A": job_id, "J": job_id, "x": name[1] if name else "%x", "%": "%"}
    return Path(re.sub(r"%([jAJx%])", lambda match: values[match[1]], path[1].strip()))


def follow(
    job_id: str,
    output_path: str | os.PathLike[str],
    write: Callable[[bytes], object],
    *,
    say: Callable[[str], object] = lambda text: None,
    poll_s: float = 1.0,
    ask_s: float = 10.0,
) -> str:
    """Hand on the output file as it grows until the job has left the queue; returns its last state.

    The file is looked at every ``poll_s``, SLURM is asked every ``ask_s``; SlurmError when it is silent
    for ten minutes. A requeued job is followed further. ``say`` gets SLURM's reason for a pending job, and
    each change of it.
    """
    position = 0
    told = ""
    last = ""
    answered = time.monotonic()
    next_question = answered
    while True:
        now = time.monotonic()
        if now >= next_question:
            next_question = now + ask_s
            try:
                found = state(job_id)
            except SlurmError:
                if now - answered > PATIENCE_S:
                    raise
            else:
                # Between a preemption and the requeue a job looks finished: the second such answer counts.
                if found in FINISHED and last in FINISHED:
                    _hand_on(output_path, position, write)
                    return last if found == UNKNOWN else found
                if found in FINISHED:
                    next_question = now + 2 * poll_s
                answered = now
                last = found
                if found == "PENDING" and (why := reason(job_id)) not in ("", told):
                    told = why
                    say(f"job {job_id} is pending: {why}")
        position = _hand_on(output_path, position, write)
        time.sleep(poll_s)


def reason(job_id: str) -> str:
    """Return SLURM's word for why a job waits or has failed, such as Priority or JobLaunchFailure; "" if it
    has none.
    """
    try:
        found = _ask(["scontrol", "show", "job", job_id], r"(?s).*?\bReason=(\w+)") or ""
    except SlurmError:
        return ""
    return "" if found == "None" else found


def has_started(job_id: str) -> bool:
    """Tell whether a job has ever had nodes, as far as SLURM still knows."""
    try:
        # A job that is cancelled while it waits has a StartTime, too.
        nodes = _ask(["scontrol", "show", "job", job_id], r"(?s).*?\bNodeList=(\S*)")
    except SlurmError:
        return True
    return nodes not in ("", "(null)")


def work_folder(job_id: str) -> str:
    """Return the folder that a job starts in; "" where SLURM does not say."""
    try:
        return _ask(["scontrol", "show", "job", job_id], r"(?s).*?\bWorkDir=([^\n]+)") or ""
    except SlurmError:
        return ""


def is_batch(job_id: str) -> bool:
    """Tell whether sbatch has started a job; a job of salloc is a user's shell. Raises SlurmError."""
    return _ask(["scontrol", "show", "job", job_id], r"(?s).*?\bBatchFlag=(\d)") == "1"


def job_state(text: str) -> str:
    """Return the state of the job whose id a word may be; "" where SLURM knows no such job or is not here."""
    if not re.fullmatch(r"\d+(_\d+)?", text, re.ASCII) or shutil.which("squeue") is None:
        return ""
    try:
        found = state(text)
    except SlurmError:
        return ""
    return "" if found == UNKNOWN else found


def describe(job_id: str, found: str) -> str:
    """Say how a job stands: "is pending (Priority)", "has ended (CANCELLED)"."""
    if found in FINISHED:
        if has_started(job_id):
            return f"has ended ({found})"
        why = reason(job_id)
        return f"has ended ({found}), and has never started" + (f" ({why})" if why else "")
    why = reason(job_id) if found == "PENDING" else ""
    return f"is {found.lower()}" + (f" ({why})" if why else "")


def _hand_on(path: str | os.PathLike[str], position: int, write: Callable[[bytes], object]) -> int:
    """Write what is new since ``position``, in bytes; a file that became shorter is read from its start."""
    for _ in range(_CHUNKS_A_POLL):
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < position:
                    position = 0
                file.seek(position)
                chunk = file.read(_CHUNK_BYTES)
        except OSError:  # not there yet, or a file system that hesitates
            break
        if not chunk:
            break
        write(chunk)
        position += len(chunk)
    return position


def _outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what describes our job: sbatch would pass it on to the new one."""
    if not environ.get("SLURM_JOB_ID"):
        return dict(environ)
    ours = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
    return {name: value for name, value in environ.items() if name in _KEPT or not name.startswith(ours)}


def _ask(command: Sequence[str], pattern: str) -> str | None:
    """Return what the pattern's group matches at the start of the answer; None if SLURM has no such job."""
    result = _run(command, _QUERY_TIMEOUT_S)
    if result.returncode != 0 and "invalid job id" not in result.stderr.lower():
        raise SlurmError(f"{command[0]}: {_complaint(result)}")
    match = re.match(pattern, result.stdout)
    return match[1] if match else None


def _run(
    command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {timeout_s:.0f} s") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise SlurmError(f"{command[0]}: {getattr(error, 'strerror', None) or error}") from None


def _complaint(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"exit code {result.returncode}"


def requeue(environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Put this job back into the queue; ``say`` tells the user.

    The message comes before the job is requeued: SLURM may end this process before the answer is here.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job or shutil.which("scontrol") is None:
        say("--requeue: not inside a SLURM job; nothing to requeue")
        return
    try:
        shown = _run(["scontrol", "show", "job", job], _QUERY_TIMEOUT_S, environ).stdout
        if has_restarted(shown, environ):
            say(f"SLURM has requeued job {job}")
            return
        if was_cancelled(shown):
            say(f"job {job} was cancelled and is not requeued")
            return
    except SlurmError as error:
        say(f"--requeue: {error}")
    say(f"requeueing job {job}")
    result = _run(["scontrol", "requeue", job], _QUERY_TIMEOUT_S, environ)
    if result.returncode:
        say(f"scontrol requeue {job}: {_complaint(result)}")


def has_restarted(text: str, environ: Mapping[str, str]) -> bool:
    """Tell from `scontrol show job` whether SLURM itself has requeued this process's job, as at the end of a
    preemption and after `scontrol requeue`. The job counts one restart more than this process then.
    """
    restarts = re.search(r"\bRestarts=(\d+)", text)
    own = environ.get("SLURM_RESTART_COUNT", "0")
    return restarts is not None and int(restarts[1]) > int(own if own.isdecimal() else 0)


def was_cancelled(text: str) -> bool:
    """Tell from `scontrol show job` whether a job is ending because a user has cancelled it.

    One that is preempted still runs while it is asked to stop; one that has met its time limit has run for so
    long. SLURM itself does not say while processes are left: both are COMPLETING then.
    """
    found = dict(re.findall(r"\b(JobState|RunTime|TimeLimit)=(\S+)", text))
    if found.get("JobState") not in ("COMPLETING", "CANCELLED"):
        return False
    limit_s = _seconds(found.get("TimeLimit", ""))
    run_s = _seconds(found.get("RunTime", ""))
    return limit_s is None or run_s is None or run_s < limit_s


def _seconds(text: str) -> int | None:
    """Read `1-02:03:04`; None for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@cache
def has_gpus() -> bool:
    """Tell whether the cluster has GPUs that a job can ask for. Raises SlurmError."""
    result = _run(["sinfo", "-h", "-o", "%G"], _QUERY_TIMEOUT_S)
    if result.returncode:
        raise SlurmError(f"sinfo: {_complaint(result)}")
    return re.search(r"\bgpu\b", result.stdout) is not None


def node_sizes(partition: str | None) -> list[tuple[int, int]]:
    """Return the CPU cores and the GPUs of each kind of node in a partition, the default one for None.

    The list is empty where sinfo does not answer: on a machine that is not part of a cluster.
    """
    return read_node_sizes(_ask_sinfo(partition, "%P|%c|%G"), default_only=partition is None)


def count_nodes(partition: str | None) -> int | None:
    """Return the number of nodes of a partition, the default one for None; None if sinfo does not tell."""
    rows = [line.strip().split("|") for line in _ask_sinfo(partition, "%P|%D").splitlines()]
    counts = [
        int(row[1])
        for row in rows
        if len(row) == 2 and row[1].isdecimal() and (partition is not None or row[0].endswith("*"))
    ]
    return sum(counts) if counts else None


def partitions() -> list[str]:
    """Return the names of the partitions; none where sinfo does not answer."""
    return [line.strip().rstrip("*") for line in _ask_sinfo(None, "%P").splitlines() if line.strip()]


def _ask_sinfo(partition: str | None, columns: str) -> str:
    """Return sinfo's lines of a partition, or of all for None; "" where it does not answer."""
    if shutil.which("sinfo") is None:
        return ""
    chosen = ["-p", partition] if partition is not None else []
    try:
        return _run(["sinfo", "-h", *chosen, "-o", columns], _QUERY_TIMEOUT_S).stdout
    except SlurmError:
        return ""


def read_node_sizes(text: str, *, default_only: bool) -> list[tuple[int, int]]:
    """Read lines such as `gpu*|64+|gpu:a100:8(S:0-1),nic:1`; the default partition has the asterisk."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|", 2)
        if len(fields) < 3:
            continue
        name, cores, gres = fields
        match = re.match(r"\d+", cores)
        if match is None or (default_only and not name.endswith("*")):
            continue
        gpus = re.findall(r"(?:^|,)gpu(?::[^:(),]+)?:(\d+)", gres)
        found.append((int(match[0]), sum(map(int, gpus))))
    return found


def own_jobs() -> list[dict[str, str]]:
    """Return this user's jobs in SLURM's queue, as SLURM shows them. Raises SlurmError."""
    names = ("id", "name", "state", "nodes", "limit", "elapsed", "why")
    result = _run(["squeue", "-h", "--me", "-o", "%i|%j|%T|%D|%l|%M|%R"], _QUERY_TIMEOUT_S)
    if result.returncode:
        raise SlurmError(f"squeue: {_complaint(result)}")
    rows = (line.strip().split("|") for line in result.stdout.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


class Listing(NamedTuple):
    """Holds what SLURM's queue had at one time."""

    jobs: dict[str, float] | None
    """This user's started jobs that have not ended, with the time of their start in seconds since the epoch;
    None where squeue did not answer. A requeued job is pending until its next start.
    """
    asked: float
    """When it was asked for, in seconds since the epoch."""


_listing: Listing | None = None


def list_living() -> Listing:
    """Return this user's started jobs that have not ended. squeue runs at most twice a minute."""
    global _listing
    now = time.time()
    if _listing is None or not 0.0 <= now - _listing.asked < _LISTING_S:
        _listing = Listing(_ask_living(), now)
    return _listing


def _ask_living() -> dict[str, float] | None:
    rows = _own_jobs("%A|%T|%S", ["-t", "all"])
    if rows is None:
        return None
    return {job: _moment(start) for job, state, start in rows if state not in (*FINISHED, *_WAITING)}


def newest_job_of(folder: Path, after: float) -> str:
    """Return this user's newest batch job that starts in a folder and was submitted after a time, in seconds
    since the epoch, and has not ended; "" if there is none. Job arrays do not count.
    """
    rows = _own_jobs("%A|%K|%V|%Z", []) or []
    found = [
        (_moment(submitted), job)
        for job, index, submitted, where in rows
        if index == "N/A" and os.path.realpath(where) == os.path.realpath(folder)
    ]
    submitted, job = max(found, default=(0.0, ""))
    return job if submitted > after and is_batch(job) else ""


def _own_jobs(columns: str, more: Sequence[str]) -> list[list[str]] | None:
    """Ask squeue for this user's jobs; None where it is not here or does not answer."""
    if shutil.which("squeue") is None:
        return None
    formats = ("SQUEUE_", "SLURM_TIME_FORMAT")
    everything = {name: value for name, value in os.environ.items() if not name.startswith(formats)}
    try:
        result = _run(["squeue", "-h", "-a", "--me", *more, "-o", columns], _LISTING_TIMEOUT_S, everything)
    except SlurmError:
        return None
    if result.returncode:
        return None
    rows = [line.strip().split("|") for line in result.stdout.splitlines()]
    return [row for row in rows if len(row) == columns.count("|") + 1]


def _moment(text: str) -> float:
    """Read a time of squeue, in this machine's time zone; 0 for one that is not known."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A
        return 0.0


def own_tasks(comment: str) -> list[tuple[str, str]]:
    """Return this user's array tasks in SLURM's queue that have a comment: id, such as 12_3, and state.

    Raises SlurmError.
    """
    everything = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    result = _run(["squeue", "-h", "-a", "-r", "--me", "-o", "%i|%T|%k"], _QUERY_TIMEOUT_S, everything)
    if result.returncode:
        raise SlurmError(f"squeue: {_complaint(result)}")
    rows = [line.strip().split("|", 2) for line in result.stdout.splitlines()]
    return [(row[0], row[1]) for row in rows if len(row) == 3 and row[2].strip() == comment and "_" in row[0]]


def cancel(job_id: str) -> None:
    """End a job, or take it out of the queue. Raises SlurmError, also where there is no such job any more."""
    if (found := state(job_id)) in FINISHED:
        gone = "unknown to SLURM" if found == UNKNOWN else f"already ended: {found}"
        raise SlurmError(f"job {job_id}: {gone}")
    result = _run(["scancel", job_id], _QUERY_TIMEOUT_S)
    if result.returncode or result.stderr.strip():
        raise SlurmError(f"scancel {job_id}: {_complaint(result)}")


def cancel_step(environ: Mapping[str, str]) -> None:
    """Tell all tasks of this process's step that the run has failed.

    They get SIGHUP, not SLURM's SIGKILL: the other launchers stop their workers with the usual grace, and
    know that the failure, and the step's exit code with it, is another task's.
    """
    job = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", "")
    if job and step and shutil.which("scancel") is not None:
        _run(["scancel", "--signal=HUP", f"{job}.{step}"], _QUERY_TIMEOUT_S, environ)


def own_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job or step that this process is part of, with its GPUs as far as SLURM tells them."""
    if "SLURM_JOB_ID" not in environ:
        return None
    allocation = read(environ, has_terminal=_has_terminal())
    if allocation is None or all(node.gpus is not None for node in allocation.nodes):
        return allocation
    return with_gpus(allocation, granted_gpus(allocation.job_id))


def _has_terminal() -> bool:
    """Tell whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def granted_gpus(job_id: str) -> dict[str, int]:
    """Return the GPUs that the job has on each host, by the controller; empty where it cannot be asked."""
    if shutil.which("scontrol") is None:
        return {}
    try:
        result = _run(["scontrol", "show", "job", "-d", job_id], _QUERY_TIMEOUT_S)
    except SlurmError:
        return {}
    return read_granted(result.stdout) if result.returncode == 0 else {}


def read_granted(text: str) -> dict[str, int]:
    """Read lines such as `Nodes=node[1-3] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1),nic:1`."""
    found: dict[str, int] = {}
    for nodes, gres in re.findall(r"^\s+Nodes=(\S+) .*\bGRES=(\S*)", text, re.MULTILINE):
        # commas inside the brackets of IDX belong to one item
        items = re.split(r",(?![^(]*\))", gres)
        counts = [re.fullmatch(r"gpu(?::[^:()]+)?:(\d+)(?:\(.*\))?", item) for item in items]
        for host in expand(nodes):
            found[host] = found.get(host, 0) + sum(int(match[1]) for match in counts if match)
    return found
