"""Test the command lines of torchrun and `accelerate launch`, with zlaunch in their place."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.helpers import Launch, run
from tests.limits import wait_until
from tests.ports import reserved_port

SAY = """
import argparse, os, torch.distributed as dist
argparse.ArgumentParser().parse_args()  # torchrun passes no --local_rank
dist.init_process_group("gloo")
place = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
print("rank", dist.get_rank(), dist.get_world_size(), *place)
dist.barrier()
dist.destroy_process_group()
"""
ENV = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "flags",
    [
        ("--standalone", "--nproc-per-node=2", "--tee", "3"),
        ("--nnodes=1", "--node_rank=0", "--master_addr=localhost", "--nproc_per_node", "2", "-t", "3"),
        ("--num_processes", "2", "--num_machines", "1", "--machine_rank", "0", "--log_ranks", "all"),
    ],
    ids=["standalone", "torchrun", "accelerate"],
)  # fmt: skip
def test_one_machine(tmp_path: Path, flags: tuple[str, ...]) -> None:
    launch = run(tmp_path, *flags, "-q", script=SAY, env=ENV)
    assert launch.process.returncode == 0, launch.err
    assert sorted(launch.out.splitlines()) == ["[rank 0] rank 0 2 0 2", "[rank 1] rank 1 2 1 2"]


@pytest.mark.exhaustive
def test_names_and_devices_of_torchruns_workers(tmp_path: Path) -> None:
    script = """
        import os
        from zlaunch.runtime.environment import read_environment
        index = read_environment().index_on_node
        print(os.environ["ROLE_NAME"], os.environ["LOCAL_RANK"], index, os.environ["CUDA_VISIBLE_DEVICES"])
    """
    flags = ("--nproc_per_node=3", "--role=trainer", "--virtual_local_rank", "--local_ranks_filter=1,2", "-q")
    launch = run(tmp_path, *flags, script=script, env=ENV)
    assert launch.process.returncode == 0, launch.err
    assert sorted(launch.out.splitlines()) == [f"[trainer {rank}] trainer 0 {rank} " for rank in (1, 2)]
    launch = run(tmp_path, "--nproc_per_node=3", "--local_ranks_filter=3", script=script, env=ENV)
    assert launch.process.returncode == 2
    assert "--local_ranks_filter: no node has a local rank 3; the last is 2" in launch.err


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "numbers", [(0, 1), pytest.param((None, None), marks=pytest.mark.exhaustive)], ids=["given", "by arrival"]
)
def test_two_nodes_each_by_its_own_command(tmp_path: Path, numbers: tuple[int | None, ...]) -> None:
    where = ["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:29714", "--rdzv_id=7"]
    launches = []
    for index, number in enumerate(numbers):
        (tmp_path / str(index)).mkdir()
        own = [f"--node_rank={number}"] if number is not None else []
        flags = [*where, *own, "--nproc_per_node=1", "--iface=lo", "--tee=3"]
        launches.append(Launch(tmp_path / str(index), *flags, script=SAY, env=ENV))
    assert [launch.wait() for launch in launches] == [0, 0], [launch.err for launch in launches]
    lines = sorted(line.rpartition("] ")[2] for each in launches for line in each.out.splitlines())
    assert lines == ["rank 0 2 0 1", "rank 1 2 0 1"]


def test_a_signal_ends_the_wait_for_other_nodes(tmp_path: Path) -> None:
    where = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    with reserved_port() as port:
        launch = Launch(tmp_path, *where, f"--rdzv_endpoint=127.0.0.1:{port}", script="print('ran')", env=ENV)
        wait_until(lambda: "waiting for all 2 nodes" in launch.err, lambda: launch.err)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 143
    assert launch.err.endswith("zlaunch: stopped by SIGTERM\n") and launch.out == ""


@pytest.mark.exhaustive
def test_accelerates_plugin_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}'
    )
    script = """
        import torch
        from accelerate import Accelerator, InitProcessGroupKwargs
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
        model = torch.nn.Linear(8, 1)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        accelerator.print(type(model).__name__, model.zero_optimization_stage(), accelerator.mixed_precision)
    """
    flags = (
        "--num_processes=2",
        "--use_deepspeed",
        "--deepspeed_config_file=ds.json",
        "--mixed_precision=bf16",
    )
    launch = run(tmp_path, *flags, script=script, env=ENV)
    assert launch.process.returncode == 0, launch.err
    assert "DeepSpeedEngine 1 bf16" in launch.out
    assert (
        "handed on to accelerate, where the script uses it: --mixed_precision, --use_deepspeed" in launch.err
    )


def test_the_config_of_the_plugin_is_checked_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stag": 1}}')
    flags = ("--use_deepspeed", "--deepspeed_config_file", "ds.json")
    launch = run(tmp_path, *flags, script="print('ran')", env=ENV)
    assert launch.process.returncode == 2 and launch.out == ""
    assert "ds.json: zero_optimization.stag: unknown key, did you mean stage?" in launch.err


def test_a_flag_that_cannot_work_is_one_line(tmp_path: Path) -> None:
    launch = run(tmp_path, "--nnodes", "1:4", script="print('ran')")
    assert launch.process.returncode == 2 and launch.out == ""
    assert launch.err.startswith("zlaunch: error: --nnodes 1:4: ") and launch.err.count("\n") == 1


@pytest.mark.exhaustive
def test_a_script_without_accelerate_reads_its_config_file_too(tmp_path: Path) -> None:
    """`initialize` without a config takes what --deepspeed_config_file has named."""
    script = """
        import torch, zlaunch
        engine, *_ = zlaunch.initialize(model=torch.nn.Linear(4, 4))
        print("stage", engine.effective_config.zero_optimization.stage)
    """
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    config = {"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    flags = ("--num_processes=1", "--use_deepspeed", "--deepspeed_config_file=ds.json")
    launch = run(tmp_path, *flags, script=script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert launch.process.returncode == 0 and "stage 2" in launch.out, launch.err


@pytest.mark.exhaustive
def test_a_script_finds_itself_under_torchrun(tmp_path: Path) -> None:
    launch = run(
        tmp_path,
        "--num_gpus=2",
        "--max_restarts=1",
        script="""
            import os, sys
            import torch.distributed as dist
            from torch.distributed.elastic.multiprocessing.errors import record

            @record
            def main():
                assert dist.is_torchelastic_launched()
                names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
                names += ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
                print(*(os.environ[name] for name in names), flush=True)
                dist.init_process_group("gloo")
                dist.barrier()
                if os.environ["RANK"] == "1":
                    raise ValueError("as it is recorded")
                dist.barrier()

            main()
        """,
    )
    assert launch.process.returncode == 1
    for rank in (0, 1):
        places = [line for line in launch.log(rank).splitlines() if line.endswith(" 1")]
        assert places == [f"0 1 {rank} 2 default {attempt} 1" for attempt in (0, 1)]
    recorded = json.loads((launch.run_dir / "logs" / "error_00001.json").read_text())
    assert recorded["message"]["message"] == "ValueError: as it is recorded"
    assert "ValueError: as it is recorded" in launch.err
