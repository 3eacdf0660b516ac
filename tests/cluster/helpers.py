"""Launch runs on the testbed, by ssh or in a SLURM job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch
from tests.limits import wait_until

SILENT = """
    import os, time
    print("ready", os.environ["RANK"], flush=True)
    time.sleep(600)
"""

BUSY = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1000)
    dist.all_reduce(x)
    print("ready", os.environ["RANK"], flush=True)
    while True:
        dist.all_reduce(x)
        x.fill_(1)
"""


def start(cluster: Testbed, folder: Path, *options: str, by: str = "ssh", **more: Any) -> Launch:
    """A launch on all nodes, two workers on each."""
    if by == "ssh":
        own = (f"--hostfile={cluster.hostfile}", f"--ssh_config={cluster.ssh_config}")
        return Launch(folder, *own, "--no_local_rank", *options, **more)
    prefix = ("salloc", "--quiet", f"-N{len(cluster.hosts)}", f"--gres=gpu:{cluster.slots}")
    return Launch(folder, "--no_local_rank", *options, prefix=prefix, env=cluster.env(), **more)


def await_ready(launch: Launch, ranks: int = 6) -> None:
    """Every rank has said so in its log."""

    def ready() -> bool:
        if launch.process.poll() is not None:
            raise AssertionError(f"ended with {launch.process.returncode}: {launch.err}")
        try:
            return all("ready" in launch.log(rank) for rank in range(ranks))
        except OSError:
            return False

    wait_until(ready, "all ranks ready")


def pid_of(launch: Launch, rank: int) -> tuple[str, int]:
    """Host and process id, as the node counts, of a rank."""
    event = next(e for e in launch.events("spawn") if e["rank"] == rank)
    return event["host"], event["pid"]


def agent_of(launch: Launch, host: str) -> int:
    """Process id, as the node counts, of a node's agent."""
    return int(next(e for e in launch.events("agent") if e["host"] == host)["pid"])
