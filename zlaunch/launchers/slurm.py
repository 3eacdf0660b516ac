"""Run on the nodes of a SLURM allocation: each reached by srun, or as a task of a step of the user's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zlaunch.errors import LaunchError
from zlaunch.hostfiles.grammar import HostEntry
from zlaunch.launchers.base import (
    ASK_FOR_MORE,
    FOR_SEVERAL_NODES,
    FOR_SSH,
    NEEDS_NODES,
    check_granted,
    unseen_gpus,
)
from zlaunch.launchers.cluster import ClusterLauncher
from zlaunch.launchers.this_node import ThisNodeLauncher
from zlaunch.plan.options import agreed_port
from zlaunch.plan.plan import NodeSpec, NodeSubset, Plan

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation
    from zlaunch.supervisor.end import End
    from zlaunch.supervisor.nodes import Node
    from zlaunch.supervisor.verdict import Outcome
    from zlaunch.transports import Transport


# -- slurm ------------------------------------------------------------------------------------------


class SlurmLauncher(ClusterLauncher):
    """Starts one srun for each node, from inside the job."""

    name = "slurm"
    refuses = dict.fromkeys(FOR_SSH, NEEDS_NODES)
    advice = ASK_FOR_MORE

    def entries(self) -> list[HostEntry]:
        """Return the nodes of the job."""
        assert self.allocation is not None
        return [HostEntry(n.host, slots=n.gpus or self.launch.num_gpus) for n in self.allocation.nodes]

    def find_surprises(self, nodes: Sequence[Node]) -> Sequence[str]:
        """Say where SLURM gave GPUs that no worker will see."""
        assert self.allocation is not None
        granted = {node.host: node.gpus or 0 for node in self.allocation.nodes}
        unseen = {node.host: granted[node.host] for node in nodes if not node.facts.devices}
        blind = [host for host, count in unseen.items() if count]
        if not blind:
            return ()
        counts = sorted({unseen[host] for host in blind})
        return (f"{', '.join(blind)}: {unseen_gpus(' or '.join(map(str, counts)))}",)

    def open_transport(self, host: str) -> Transport:
        """Start the agent of a node. Raises NodeError."""
        from zlaunch.transports.local import open_command, srun_prefix

        assert self.allocation is not None
        (cpus,) = (node.cpus for node in self.allocation.nodes if node.host == host)
        prefix = srun_prefix(host, cpus)
        return open_command(host, prefix, self.launch.python, self.agent_log(host))


# -- srun task --------------------------------------------------------------------------------------
#
# Run as one task of a step that the user started with srun; all tasks together are the run.


_SRUN_DECIDES = "srun has started this task and decides; start zlaunch by sbatch or salloc for it"


class SrunTaskLauncher(ThisNodeLauncher):
    """Runs this task's part of a step; every task computes equal numbers by itself."""

    name = "step"
    refuses = dict.fromkeys(
        (*FOR_SEVERAL_NODES, "include", "exclude", "num_nodes", "max_restarts"), _SRUN_DECIDES
    )
    shares_run_dir = True
    in_step = True

    @staticmethod
    def default_run_dir(run_id: str, allocation: Allocation | None) -> Path:
        """Return the default run folder of this task, named after its SLURM job and step."""
        # A requeued job numbers its steps from 0 again.
        assert allocation is not None
        restart = f"-restart_{allocation.restart_count}" if allocation.restart_count else ""
        step = f"slurm-{allocation.job_id}.{allocation.step_id}{restart}"
        return Path("runs", step, f"task_{allocation.procid:05d}")

    def own_plan(self, attempt: int) -> Plan:
        """Make this task's part of the step's plan. Raises LaunchError."""
        from zlaunch.slurm.environment import in_step_place
        from zlaunch.system.cores import flat, usable_cores
        from zlaunch.system.machine import discover

        launch = self.launch
        allocation = self.allocation
        assert allocation is not None
        place = in_step_place(allocation)
        host = allocation.nodes[place.rank_of_node].host
        # The launchers of a step tell each other of a failure by a signal that reaches all its processes.
        env = {**launch.worker_env, "ZLAUNCH_IGNORE_HUP": "1"}
        tokens = discover(os.environ).tokens
        if place.one_per_node:
            counts = [launch.num_gpus or node.gpus or len(tokens) or 1 for node in allocation.nodes]
            here = counts[place.rank_of_node]
            check_granted(launch, allocation.nodes[place.rank_of_node].gpus, tokens)
            if tokens and here > len(tokens):
                raise LaunchError(
                    f"{here} workers were asked for, but this task of the step sees {len(tokens)} GPU(s)"
                )
            node = self.spec(host, range(here), tokens, env)
            first = sum(counts[: place.rank_of_node])
            world = sum(counts)
        else:
            node = NodeSpec(
                host,
                workers=1,
                cores=len(flat(usable_cores())),
                env=env,
                devices=(tokens[place.local_task % len(tokens)],) if tokens else (),
                slots=(place.local_task % len(tokens),) if tokens else (),
                first_local=place.local_task,
                local_world=place.tasks_here,
            )
            assert allocation.procid is not None and allocation.ntasks is not None
            first = allocation.procid
            world = allocation.ntasks
        seed = f"{allocation.job_id}.{allocation.step_id}.{allocation.restart_count}.{attempt}"
        return self.make_plan(
            [node],
            launch.master_addr or allocation.nodes[0].host,
            launch.master_port or agreed_port(seed),
            attempt,
            part=NodeSubset(first, world, place.rank_of_node, place.nodes),
        )

    def end_of(self, outcome: Outcome) -> End:
        """Return the end of a run. SIGHUP says that another task of the step has failed."""
        end = super().end_of(outcome)
        return replace(end, cause="failed") if outcome.signum == signal.SIGHUP else end

    def on_end(self, outcome: Outcome, say: Callable[[str], None]) -> int:
        """Tell the other tasks of a failure here; after one there, end with code 0: theirs is the step's."""
        if not self.is_requeued(outcome):
            if outcome.signum == signal.SIGHUP:
                say("another task of the step has failed")
                return 0
            if outcome.code and not outcome.signum:
                from zlaunch.slurm.commands import cancel_step

                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                cancel_step(os.environ)  # the other tasks would wait for this one for ever
        return super().on_end(outcome, say)
