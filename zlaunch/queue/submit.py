"""Submit a run: to zlaunch's own queue, or as a batch script to SLURM's."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import zlaunch
from zlaunch.errors import LaunchError

if TYPE_CHECKING:
    from zlaunch.launchers.base import Launcher
    from zlaunch.slurm.script import BatchScript

QueueName = Literal["local", "slurm"]
_SLOTS = ("num_gpus", "num_nodes", "include", "exclude")


class SubmitRequest(NamedTuple):
    """Holds what a command line of `submit` asks for."""

    queue: QueueName
    command: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """Options of a run that were given: name and word of the command line."""
    given: Mapping[str, Any]
    """All options of a run, as on the command line."""
    about: Mapping[str, Any]
    """The options of the queue: priority, after, limit, retries, preemptible, sbatch."""


def choose_queue(asked: QueueName | None, *, uses_hosts: bool = False) -> QueueName:
    """Return the queue that was asked for, or SLURM's where this machine can submit to it."""
    if asked is not None:
        return asked
    configured = "SLURM_CONF" in os.environ or os.path.exists("/etc/slurm/slurm.conf")
    return "slurm" if configured and not uses_hosts and shutil.which("sbatch") else "local"


# -- zlaunch's own queue ---------------------------------------------------------------------------


def enqueue(request: SubmitRequest, prepare: Callable[[SubmitRequest], Launcher]) -> tuple[int, Path]:
    """Add a run to zlaunch's queue; return the job's number and the run's folder.

    Raises LaunchError, and what `prepare` raises, which makes the launcher of the run.
    """
    from zlaunch.queue.daemon import check_daemon, queue_folder
    from zlaunch.queue.process_settings import ProcessSettings
    from zlaunch.queue.schedule import find_demand
    from zlaunch.queue.store import QueuedJob, Store, Submission
    from zlaunch.slurm.script import time_limit_s
    from zlaunch.supervisor import run_folder
    from zlaunch.supervisor.detach import CONSOLE_LOG
    from zlaunch.supervisor.end import End
    from zlaunch.supervisor.found_runs import find_run, meant
    from zlaunch.supervisor.run_folder import make_run_dir
    from zlaunch.system.processes import python_module_argv, uninterrupted

    _, command, options, given, about = request
    if given["requeue"]:
        raise LaunchError("--requeue needs --queue slurm; zlaunch's queue has --preemptible and --retries")
    known = Store(queue_folder())
    after = tuple(
        found.submission.run_dir
        if run.isdecimal() and isinstance(found := known.find(int(run)), QueuedJob)
        else str(find_run(meant(run)).path.resolve())
        for run in about["after"]
    )
    limit = None if about["limit"] is None else time_limit_s(about["limit"])
    launcher = prepare(request)
    launch = launcher.launch
    demand, names = find_demand(launcher)
    path = Path(launch.run_dir).resolve()
    check_daemon(queue_folder())  # before anything is there that could be started later
    submission = Submission(
        run_id=launch.run_id,
        run_dir=str(path),
        options=tuple(word for name, word in options if name not in (*_SLOTS, "run_dir", "run_id")),
        command=command,
        cwd=os.getcwd(),
        umask=_umask(),
        demand=demand,
        names=names,
        priority=about["priority"],
        after=after,
        time_s=limit,
        retries=about["retries"],
        preemptible=about["preemptible"],
        grace_s=launch.grace_s,
        heartbeat_s=launcher.run.heartbeat_s,
        starter=python_module_argv("zlaunch.cli.queued"),
        path=str(Path(zlaunch.__file__).parent),
        settings=ProcessSettings.of_this_process(),
    )
    per_node = demand.per_node or max(map(len, demand.pool.values()))
    line = [*(word for _, word in options), *command]
    environ = {name: value for name, value in os.environ.items() if name != "ZLAUNCH_RUN_ID"}
    with uninterrupted():  # what is marked as queued is in the queue
        lock = make_run_dir(path)
        assert lock is not None
        if (path / "launcher.json").exists():
            raise LaunchError(
                f"--run_dir {given['run_dir']}: the folder already contains a run: use another one"
            )
        nodes = tuple(demand.pool)[: demand.nodes]
        workers = demand.nodes * per_node
        labels = run_folder.Labels(launch.name, launch.tags)
        run_folder.queued(str(path), launch.run_id, nodes, workers, line, labels)
        (path / CONSOLE_LOG).touch()
        os.close(lock)  # the next to hold it is the run's launcher
        try:
            job = known.add(submission, environ)
        except BaseException:
            run_folder.left_queue(path, End(2, "refused"))
            raise
    return job, path


def _umask() -> int:
    known = os.umask(0o077)
    os.umask(known)
    return known


# -- SLURM ------------------------------------------------------------------------------------------


def check_for_slurm(request: SubmitRequest) -> None:
    """Refuse options that SLURM's queue does not have. Raises LaunchError."""
    given = request.given
    about = request.about
    for name, instead in (
        ("priority", 'SLURM has its own: --sbatch "--nice=N" or --sbatch "--qos=NAME"'),
        ("retries", "--max_restarts N tries again within the job"),
    ):
        if about[name]:
            raise LaunchError(f"--{name} needs --queue local: {instead}")
    for name in ("include", "exclude", "hostfile"):
        if given[name]:
            raise LaunchError(f"--{name} needs --queue local: SLURM chooses the nodes")
    for run in about["after"]:
        if not run.isdecimal():
            raise LaunchError(f"--after {run}: --queue slurm needs a SLURM job ID")


def batch_of(request: SubmitRequest) -> BatchScript:
    """Return the sbatch file of a run. Raises LaunchError."""
    from zlaunch.plan.checks import check_configs
    from zlaunch.plan.world_sizes import possible_world_sizes
    from zlaunch.slurm.commands import UNKNOWN, has_gpus, state
    from zlaunch.slurm.script import BatchScript

    _, command, options, given, about = request
    count = given["num_gpus"]
    nodes = given["num_nodes"] or 1
    # Warnings are rank 0's to say.
    slots = (count,) * nodes if count else ()
    spares = min(given["spares"] or 0, nodes - 1)
    world_sizes = possible_world_sizes(slots, spares, given["min_nodes"]) if slots else ()
    check_configs(command, module=given["module"], folder=given["workdir"], world_sizes=world_sizes)
    gpus = count if count is not None and has_gpus() else None
    words = [
        word for name, word in options if name not in ("num_nodes", "requeue", "num_gpus" if gpus else "")
    ]
    extra = [*about["sbatch"]]
    if about["after"]:
        for job in about["after"]:
            # SLURM takes a job that it does not know for one that has succeeded.
            if state(job) == UNKNOWN:
                raise LaunchError(f"--after {job}: SLURM does not know this job, or no longer")
        extra.append(f"--dependency=afterok:{':'.join(about['after'])}")
        extra.append("--kill-on-invalid-dep=yes")  # after a failure it would be pending for ever
    return BatchScript(
        script=command[0],
        script_args=command[1:],
        zlaunch_args=tuple(words),
        nodes=nodes,
        gpus_per_node=gpus,
        time=about["limit"],
        job_name=given["name"] or Path(command[0]).stem or None,
        python=sys.executable,
        requeue=given["requeue"] or about["preemptible"],
        sbatch=tuple(extra),
    )
