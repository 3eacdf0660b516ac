"""`--no_ssh --node_rank N`: the user, accelerate or Kubernetes starts the same command on every node."""

from __future__ import annotations

import os

import click

from zlaunch.launch.run_record import resume_folder
from zlaunch.launchers.cluster import cluster
from zlaunch.plan.options import Options, bound_cores
from zlaunch.plan.plan import NodeSpec, Plan, make_plan
from zlaunch.system.devices import discover
from zlaunch.system.processes import python_module_argv

PORT = 29500
"""Where all meet without --master_port, as in DeepSpeed: nobody can tell the others of a free one."""


def hand_plan(options: Options, node_rank: int, attempt: int = 0) -> Plan:
    """This node's part; every node comes to the same numbers from the same command line. Raises
    click.UsageError.
    """
    from zlaunch.system.facts import cores_by_numa

    slots = _slots(options)
    if not 0 <= node_rank < len(slots):
        raise click.UsageError(
            f"--node_rank {node_rank}: there are {len(slots)} nodes, 0 to {len(slots) - 1}"
        )
    own, tokens, cores = slots[node_rank][1], discover(os.environ).tokens, cores_by_numa()
    if tokens and own[-1] >= len(tokens):
        raise click.UsageError(f"slot {own[-1]} was asked for, but this node has {len(tokens)} GPU(s)")
    env = dict(options.worker_env)
    if options.iface:
        env |= {"GLOO_SOCKET_IFNAME": options.iface, "NCCL_SOCKET_IFNAME": options.iface}
    host = slots[node_rank][0]
    spec = NodeSpec(
        host,
        workers=len(own),
        cores=len(cores),
        devices=tuple(tokens[slot] for slot in own) if tokens else (),
        bound=bound_cores(options, cores, len(own), host),
        env=env,
    )
    counts = [len(chosen) for _, chosen in slots]
    return make_plan(
        options.target,
        [spec],
        run_id=options.run_id,
        run_dir=options.run_dir,
        master_addr=options.master_addr or slots[0][0],
        master_port=options.master_port or PORT,
        cwd=options.workdir,
        grace_s=options.grace_s,
        bootstrap=python_module_argv("zlaunch.node.bootstrap"),
        environ=os.environ,
        first_rank=sum(counts[:node_rank]),
        world_size=sum(counts),
        first_node=node_rank,
        node_count=len(counts),
        restart_count=attempt,
        resume_dir=resume_folder(options.run_dir, options.run_id, attempt, options.target, os.environ),
    )


def _slots(options: Options) -> list[tuple[str, tuple[int, ...]]]:
    """Every node's slots, in order."""
    if options.hostfile is None:
        if options.num_nodes is None or options.master_addr is None:
            raise click.UsageError("--no_ssh needs a --hostfile with slots, or --num_nodes and --master_addr")
        # Every node has as many as this one: with other numbers the ranks would not fit together.
        count = options.num_gpus or len(discover(os.environ).tokens) or 1
        return [(f"node{index}", tuple(range(count))) for index in range(options.num_nodes)]
    chosen = cluster(options, "ssh", None).chosen
    if chosen is None:
        raise click.UsageError(f"--no_ssh: {options.hostfile} must say slots=N for every host")
    return [(host, tuple(slots)) for host, slots in chosen.items()]
