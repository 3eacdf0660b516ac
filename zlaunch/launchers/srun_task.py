"""One task of a step that the user started with srun: it runs its own part, all tasks together the job."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import click

from zlaunch.launch.run_record import resume_folder
from zlaunch.plan.options import Options, bound_cores, quiet_port
from zlaunch.plan.plan import NodeSpec, Plan, make_plan
from zlaunch.system.processes import python_module_argv

if TYPE_CHECKING:
    from zlaunch.slurm.environment import Allocation


def step_plan(options: Options, allocation: Allocation, attempt: int = 0) -> Plan:
    """This task's part of a step that the user started with srun; every task comes to the same numbers."""
    from zlaunch.slurm.environment import SlurmError, in_step_place
    from zlaunch.system.devices import discover
    from zlaunch.system.facts import cores_by_numa

    try:
        place = in_step_place(allocation)
    except SlurmError as error:
        raise click.UsageError(str(error)) from None
    # The launchers of a step tell each other of a failure by a signal that SLURM sends to all its processes.
    env = {**options.worker_env, "ZLAUNCH_IGNORE_HUP": "1"}
    tokens = discover(os.environ).tokens
    cores = cores_by_numa()
    if place.layout == "one_per_node":
        counts = [options.num_gpus or node.gpus or len(tokens) or 1 for node in allocation.nodes]
        here = counts[place.rank_of_node]
        if tokens and here > len(tokens):
            raise click.UsageError(
                f"{here} workers were asked for, but this task of the step sees {len(tokens)} GPU(s)"
            )
        spec = NodeSpec(
            allocation.nodes[place.rank_of_node].host,
            workers=here,
            cores=len(cores),
            env=env,
            devices=tokens[:here],
            bound=bound_cores(options, cores, here, socket.gethostname()),
        )
        first, world = sum(counts[: place.rank_of_node]), sum(counts)
    else:
        device = tokens[place.local_task % len(tokens)] if tokens else None
        spec = NodeSpec(
            allocation.nodes[place.rank_of_node].host,
            workers=1,
            cores=len(cores),
            env=env,
            devices=(device,) if device is not None else (),
            first_local=place.local_task,
            local_world=place.tasks_here,
        )
        assert allocation.procid is not None and allocation.ntasks is not None
        first, world = allocation.procid, allocation.ntasks
    seed = f"{allocation.job_id}.{allocation.step_id}.{allocation.restart_count}.{attempt}"
    return make_plan(
        options.target,
        [spec],
        run_id=options.run_id,
        run_dir=options.run_dir,
        master_addr=options.master_addr or allocation.nodes[0].host,
        master_port=options.master_port or quiet_port(seed),
        cwd=options.workdir,
        grace_s=options.grace_s,
        bootstrap=python_module_argv("zlaunch.node.bootstrap"),
        environ=os.environ,
        first_rank=first,
        world_size=world,
        first_node=place.rank_of_node,
        node_count=place.nodes,
        in_step=True,
        restart_count=attempt,
        resume_dir=resume_folder(options.run_dir, options.run_id, attempt, options.target, os.environ),
    )
