"""Define a launcher: it starts an agent on each node, plans for those that answer, and ends the run.

`zlaunch/launchers/registry.py` lists all launchers and chooses one for a command line.
"""

from __future__ import annotations

import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from zlaunch.errors import LaunchError
from zlaunch.hostfiles import filters
from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.plan.options import Launch
from zlaunch.plan.plan import NodePlan, NodeSpec, NodeSubset, Plan, RunFacts, make_plan
from zlaunch.supervisor.job import Job
from zlaunch.supervisor.run_folder import first_batches, resume_folder
from zlaunch.system.processes import python_module_argv

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation
    from zlaunch.supervisor.end import End
    from zlaunch.supervisor.verdict import Outcome


# -- base -------------------------------------------------------------------------------------------


FOR_SSH = ("ssh_port", "ssh_config", "ssh_accept_new")
FOR_SEVERAL_NODES = (*FOR_SSH, "iface", "remote_python", "venv", "min_nodes", "spares", "exclude_unhealthy")
NEEDS_NODES = "it needs a --hostfile or a SLURM job of several nodes"
NEEDS_DEBUGPY = "--debug needs debugpy: pip install 'zlaunch[debug]'"
_CLOCKS_S = 5.0
"""Seconds by which the clocks of SLURM's machines may differ."""


ASK_FOR_MORE = "ask salloc or sbatch for more"


def check_granted(launch: Launch, granted: int | None, visible: Sequence[str]) -> None:
    """Raise LaunchError where a run asks for more GPUs than SLURM gave this node, and none is visible. A job
    without GPUs has CPU workers.
    """
    if granted and not visible and launch.num_gpus and launch.num_gpus > granted:
        gave = f"SLURM gave this node {granted} GPU{'s' * (granted != 1)}"
        raise LaunchError(f"--num_gpus {launch.num_gpus}: {gave}; {ASK_FOR_MORE}")


def unseen_gpus(count: object) -> str:
    """Return the warning for a job whose ``count`` GPUs from SLURM are not visible."""
    return f"SLURM gave {count} GPU(s), but none is visible: the workers use the CPU"


class Launcher(Job):
    """Starts the agents of one run and makes its plans; `zlaunch.supervisor.job` does the rest."""

    name: ClassVar[str]
    """The name that the user gives or reads."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Option -> why it would do nothing with this launcher."""
    spans_nodes: ClassVar[bool] = False
    """Agents are started on other nodes too, and only these can tell all that a plan needs."""
    shares_run_dir: ClassVar[bool] = False
    """Launchers of other nodes of the run may use its folder."""
    in_step: ClassVar[bool] = False
    """Every task of a SLURM step runs this launcher; they tell each other when one has failed."""

    def __init__(
        self, launch: Launch, allocation: Allocation | None, environ: Mapping[str, str] = os.environ
    ) -> None:
        """Take the options; `environ` has the variables that the nodes see. Raises LaunchError."""
        self.launch = launch
        self.allocation = allocation
        self.environ = environ
        self.run = RunFacts(
            launch=launch,
            bootstrap=python_module_argv("zlaunch.node.bootstrap"),
            environ=environ,
            has_leases=self.spans_nodes,
            in_step=self.in_step,
        )

    @staticmethod
    def default_run_dir(run_id: str, allocation: Allocation | None) -> Path:
        """Return the folder of a run where the user has named none."""
        return Path("runs", run_id)

    @property
    @abstractmethod
    def where(self) -> str:
        """Return where the run takes place, for the user."""

    @property
    def spare_hosts(self) -> tuple[str, ...]:
        """Return the hosts that replace dead ones: the last ones."""
        return self.hosts[len(self.hosts) - self.launch.spares :]

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Return all numbers of workers that the run may have, the one without a failure first; empty while
        they are not known.
        """
        plan = self.known_plan()
        return () if plan is None else (plan.run_world_size,)

    @abstractmethod
    def known_plan(self) -> Plan | None:
        """Return the plan as far as it is known before any node has answered; None if it is not."""

    def on_end(self, outcome: Outcome, say: Callable[[str], None]) -> int:
        """Do what the end of the run asks for, and return the command's exit code."""
        if self.is_requeued(outcome):
            from zlaunch.slurm.commands import requeue

            requeue(os.environ, say)
        return outcome.code

    def end_of(self, outcome: Outcome) -> End:
        """Return the end of a run. SIGTERM at the end of the SLURM job's time is its time limit. A run that
        saves at SIGTERM, because it is requeued, has saved.
        """
        end = outcome.end
        if self.is_requeued(outcome) and outcome.saved:
            return replace(end, cause="saved")
        allocation = self.allocation
        ends_at = None if allocation is None else allocation.ends_at
        is_late = ends_at is not None and time.time() >= ends_at - _CLOCKS_S
        return replace(end, cause="timed out") if is_late and end.code == 128 + signal.SIGTERM else end

    def is_requeued(self, outcome: Outcome) -> bool:
        """Tell whether the SLURM job is to be put back into the queue: its run was stopped, or lost a node.

        SLURM requeues a job when it has itself noticed that a node is down: after minutes (SlurmdTimeout).
        The run has ended before, and SLURM may never notice a node that has rebooted meanwhile.
        """
        lost_node = bool(outcome.lost and outcome.code and not outcome.signum)
        return self.launch.requeue and (outcome.save_asked or outcome.signum == signal.SIGTERM or lost_node)

    def make_plan(
        self,
        nodes: Sequence[NodeSpec],
        address: str,
        port: int,
        attempt: int,
        *,
        part: NodeSubset | None = None,
        run: RunFacts | None = None,
    ) -> Plan:
        """Make the plan of an attempt on these nodes."""
        launch = self.launch
        batches = first_batches(launch.run_dir, launch.run_id, attempt) if attempt else ()
        return make_plan(
            replace(run or self.run, first_batches=batches),
            nodes,
            master_addr=address,
            master_port=port,
            attempt=attempt,
            resume_dir=resume_folder(launch.run_dir, launch.run_id, attempt, launch.program, os.environ),
            part=part,
        )

    def lacks_debugger(self, node: NodePlan, *, is_there: bool) -> bool:
        """Tell whether --debug asks for debugpy on a node that does not have it."""
        return not is_there and any(worker.rank == self.launch.debug_rank for worker in node.workers)

    def agent_log(self, host: str) -> Path:
        """Return the file for the stderr of a host's agent."""
        return Path(self.launch.run_dir, "logs", f"agent_{host}.log")


# -- selection --------------------------------------------------------------------------------------
#
# Choose hosts and slots: what a hostfile or an allocation names, less what the filters leave out.


class HostSelection:
    """Holds the hosts that were named, and the slots chosen on them as soon as these are known."""

    def __init__(self, launch: Launch, entries: Sequence[HostEntry], advice: str = "") -> None:
        """Choose the slots if the entries say how many there are. `advice`: how to get more hosts and slots,
        for errors. Raises LaunchError.
        """
        self.launch = launch
        self._advice = f"; {advice}" if advice else ""
        if launch.num_gpus is not None:  # CPU workers: as many as asked for
            entries = [entry if entry.slots else replace(entry, slots=launch.num_gpus) for entry in entries]
        self.entries = {entry.host: entry for entry in entries}
        self.chosen: filters.Pool | None = None
        """Host -> slots; None while some hosts' slots have to be asked for."""
        self.apply_filters()

    def hosts(self) -> tuple[str, ...]:
        """Return the hosts to connect to."""
        return tuple(self.chosen if self.chosen is not None else self._left_hosts())

    def _left_hosts(self) -> list[str]:
        """Return the hosts that the filters leave, whatever their slots."""
        launch = self.launch
        names = list(self.entries)
        if launch.include is not None:
            with _naming("--include", launch.include):
                wanted = _known(launch.include, names)
            names = [host for host in names if host in wanted]
        if launch.exclude is not None:
            with _naming("--exclude", launch.exclude):
                unwanted = _known(launch.exclude, names)
            names = [host for host in names if unwanted.get(host, frozenset()) is not None]
        if launch.num_nodes is not None:
            if launch.num_nodes > len(names):
                there = "there is 1 host" if len(names) == 1 else f"there are {len(names)} hosts"
                raise LaunchError(f"--num_nodes {launch.num_nodes}: {there}{self._advice}")
            names = names[: launch.num_nodes]
        return names

    def apply_filters(self, found: Mapping[str, int] = {}) -> None:
        """Choose the slots if every host's number is known: from its entry, or as found there."""
        pool: filters.Pool = {}
        for host in self._left_hosts():
            slots = self.entries[host].slots if self.entries[host].slots is not None else found.get(host)
            if slots is None:
                return
            pool[host] = tuple(range(slots))
        launch = self.launch
        if launch.include is not None:
            with _naming("--include", launch.include):
                pool = filters.include(pool, filters.parse(launch.include))
        elif launch.exclude is not None:
            with _naming("--exclude", launch.exclude):
                kept = {host: slots for host, slots in filters.parse(launch.exclude).items() if host in pool}
                pool = filters.exclude(pool, kept)
        try:
            self.chosen = filters.limit(pool, launch.num_gpus)
        except filters.FilterError as error:
            raise LaunchError(f"{error}{self._advice}") from None


@contextmanager
def _naming(option: str, text: str) -> Iterator[None]:
    """Add the option to the text of a filter's error."""
    try:
        yield
    except filters.FilterError as error:
        raise LaunchError(f"{option} {text!r}: {error}") from None


def _known(text: str, names: Sequence[str]) -> filters.Selection:
    """Read a filter whose hosts are all among these. Raises FilterError."""
    selection = filters.parse(text)
    filters.include(dict.fromkeys(names, (0,)), dict.fromkeys(selection))
    return selection
