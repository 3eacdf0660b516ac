"""Write down the environment variables of each worker."""

from __future__ import annotations

from zlaunch.plan.facts import NodeSpec, RunFacts
from zlaunch.plan.plan import LOCAL_HOST, Part
from zlaunch.runtime.world_sizes import write_world_sizes
from zlaunch.system.devices import visible_for_workers


def common_env(
    run: RunFacts,
    node: NodeSpec,
    part: Part,
    node_rank: int,
    rendezvous: tuple[str, int],
    attempt: int,
    resume_dir: str | None,
) -> dict[str, str]:
    """Return what all workers of a node have in common. `rendezvous`: rank 0's address and port."""
    local_world = node.workers if node.local_world is None else node.local_world
    env = {
        "ROLE_NAME": "default",  # the user's own is in the node's
        **node.env,
        "WORLD_SIZE": str(part.world_size),
        "LOCAL_WORLD_SIZE": str(local_world),
        "LOCAL_SIZE": str(local_world),
        "CROSS_RANK": str(node_rank),
        "CROSS_SIZE": str(part.node_count),
        "MASTER_ADDR": rendezvous[0],
        "MASTER_PORT": str(rendezvous[1]),
        "PYTHONUNBUFFERED": "1",
        "ZLAUNCH_RUN_ID": run.run_id,
        "ZLAUNCH_RUN_DIR": run.run_dir,
        "ZLAUNCH_RESTART_COUNT": str(attempt),
        # torchrun's, for scripts and libraries that ask for them
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(part.node_count),
        "ROLE_WORLD_SIZE": str(part.world_size),
        "TORCHELASTIC_RUN_ID": run.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(run.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if run.debug_rank is not None:
        env["ZLAUNCH_NO_TIMEOUTS"] = "1"
    if resume_dir is not None:
        env["ZLAUNCH_RESUME_DIR"] = resume_dir
    if len(run.world_sizes) > 1:
        env["ZLAUNCH_WORLD_SIZES"] = write_world_sizes(run.world_sizes)
        env["ZLAUNCH_FIRST_BATCHES"] = " ".join(map(str, run.first_batches))
    given = run.environ.keys() | node.env.keys()
    usual = _default_env(node, single_node=part.node_count == 1, is_debugged=run.debug_rank is not None)
    for key, value in usual.items():
        if given.isdisjoint((key, *_SAME.get(key, ()))):
            env[key] = value
    return env


def worker_env(run: RunFacts, node: NodeSpec, rank: int, index: int) -> dict[str, str]:
    """Return what the node's worker number `index` has of its own."""
    local_rank = node.first_local + index
    env = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)}
    if rank == run.debug_rank:
        env["ZLAUNCH_DEBUG"] = LOCAL_HOST if node.is_local else node.host
    if run.virtual_local_rank:
        env |= {"LOCAL_RANK": "0", "ZLAUNCH_LOCAL_RANK": str(local_rank)}
    if node.host == "localhost":  # elsewhere the folder may not be there: the bootstrap offers another
        env["TORCHELASTIC_ERROR_FILE"] = f"{run.run_dir}/logs/error_{rank:05d}.json"
    if node.bound:
        cpus = node.bound[index]
        env["ZLAUNCH_CPUS"] = ",".join(map(str, cpus))
        if "OMP_NUM_THREADS" not in run.environ:
            env["OMP_NUM_THREADS"] = str(len(cpus))
    if visible := visible_for_workers(node.devices, alone=run.virtual_local_rank):
        env["CUDA_VISIBLE_DEVICES"] = visible[index]
    return env


_SAME = {"PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF",)}
"""Maps a variable to its other names: what the user says under any of them counts."""


def _default_env(node: NodeSpec, *, single_node: bool, is_debugged: bool) -> dict[str, str]:
    """Return the settings that give way to the user's own."""
    env = {"OMP_NUM_THREADS": str(max(1, node.cores // (node.local_world or node.workers)))}
    if not node.devices:
        # Training on CPU is bound by page faults; huge pages in malloc take a quarter off a step.
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    else:
        # Gathers and reductions have a communicator each; without a common order two kernels could wait for
        # each other's place on the device.
        env["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        # The memory of units is given back and taken again all the time, in sizes that differ.
        # The newer name, PYTORCH_ALLOC_CONF, is unknown to torch 2.6, and in 2.9 this value has no effect
        # under it.
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if is_debugged:
        # It ends a process whose watchdog thread stands still, as at a breakpoint that stops all threads.
        env["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    if single_node:
        # Gloo otherwise takes the address of the host name, which may not resolve to this machine.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
