"""Test the flags of the `deepspeed` command: taken, or answered with what to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.helpers import Launch, run
from tests.ports import reserved_port

SAY = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
place = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE")]
print("rank", dist.get_rank(), dist.get_world_size(), *place)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_flags_that_are_taken(tmp_path: Path) -> None:
    flags = [
        "--num_nodes=1",
        "--num_gpus",
        "2",
        "--master_addr",
        "127.0.0.1",
        "--no_ssh_check",
        "--force_multi",
    ]
    flags += ["--log_level", "error", "--bind_cores_to_rank", "--no_local_rank"]
    launch = run(tmp_path, *flags, script=SAY, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert launch.out.split("\n")[0] == "rank 0 2 0 2 0 1" and launch.err == ""


def test_a_log_for_each_rank(tmp_path: Path) -> None:
    logs = tmp_path / "ranks"
    run(tmp_path, "--num_gpus", "2", "--enable_each_rank_log", str(logs), script="print('here')")
    assert [path.read_text() for path in sorted((logs / "logs").glob("rank_*"))] == ["here\n"] * 2


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--launcher", "mpich"], "--launcher mpich: use ssh, slurm or openmpi"),
        (["--launcher", "nonsense"], "--launcher nonsense: expected local, ssh, openssh, slurm or openmpi"),
        (["--launcher", "PDSH"], "--launcher ssh needs a --hostfile"),
        (["--autotuning", "run"], "use `zlaunch tune`"),
        (["--elastic_training"], "use --max_restarts N"),
        (["--min_elastic_nodes", "2"], "use --min_nodes N"),
        (["--venv_script", "x"], "use --venv DIR"),
        (["--launcher_args", "-p"], "--ssh_config"),
        (["--save_pid"], "zlaunch ps"),
        (["--no_ssh"], "--no_ssh and --node_rank N require each other"),
        (["--no_ssh", "--node_rank", "0"], "--no_ssh needs a --hostfile with slots"),
        (
            ["--no_ssh", "--node_rank", "2", "--num_nodes=2", "--num_gpus=1", "--master_addr=x"],
            "there are 2 nodes",
        ),
    ],
)
def test_flags_with_an_answer(tmp_path: Path, flags: list[str], answer: str) -> None:
    launch = run(tmp_path, *flags, script="print('ran')")
    assert launch.process.returncode == 2 and answer in launch.err and launch.out == ""
    assert launch.err.count("\n") == 1


@pytest.mark.exhaustive
def test_each_node_by_hand(tmp_path: Path) -> None:
    """As `accelerate launch` with the nossh launcher starts it: the same command on every node."""
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=1\nsecond slots=2\n")
    common = ["--hostfile", str(hosts), "--no_ssh", "--iface", "lo", "--log_ranks", "all", "--no_local_rank"]
    launches = []
    with reserved_port() as port:
        meet = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        for rank in range(2):
            folder = tmp_path / str(rank)
            folder.mkdir()
            launches.append(Launch(folder, *common, *meet, "--node_rank", str(rank), script=SAY))
        assert [launch.wait() for launch in launches] == [0, 0]
    lines = sorted(line.partition("] ")[2] or line for each in launches for line in each.out.splitlines())
    assert lines == ["rank 0 3 0 1 0 2", "rank 1 3 0 2 1 2", "rank 2 3 1 2 1 2"]
