"""Test torchrun's and accelerate's flags as the options that zlaunch has for them."""

from __future__ import annotations

from typing import Any

import click
import pytest

from zlaunch.cli.run import run
from zlaunch.cli.torchrun_flags import Surroundings, take_flags

HERE = Surroundings(gpus=4, cores=16, knows_hosts=False)
CPU = Surroundings(gpus=0, cores=16, knows_hosts=False)
JOB = Surroundings(gpus=4, cores=16, knows_hosts=True)
STEP = Surroundings(gpus=4, cores=16, knows_hosts=True, step_nodes=2)


def given(text: str) -> dict[str, Any]:
    """What click makes of a command line, before anything looks at it."""
    with run.make_context("zlaunch", [*text.split(), "train.py"]) as context:
        found = dict(context.params)
    found.pop("command")
    return found


def settled(text: str, around: Surroundings = HERE) -> dict[str, Any]:
    """The options that differ from those of an empty command line."""
    usual = take_flags(given(""), lambda: around)
    found = take_flags(given(text), lambda: around)
    assert found.keys() == usual.keys()
    return {name: value for name, value in found.items() if value != usual[name]}


ALONE = {"no_local_rank": True}
HAND = {**ALONE, "no_ssh": True}


@pytest.mark.parametrize(
    ("text", "around", "expected"),
    [
        ("--nproc_per_node 2", HERE, {"num_gpus": 2}),
        ("--nproc-per-node=2 --standalone", HERE, {"num_gpus": 2, "num_nodes": 1, "launcher": "local"}),
        ("--nproc_per_node gpu", HERE, {}),
        ("--nproc_per_node auto", CPU, {}),
        ("--nproc_per_node gpu --hostfile h", CPU, {"hostfile": "h"}),
        ("--nproc_per_node cpu", CPU, {"num_gpus": 16}),
        ("--nnodes 1 --node_rank 0 --master_port 29501", HERE, {"num_nodes": 1, "master_port": 29501}),
        ("--nnodes 1:1 --run_path --rdzv_id 7 --monitor_interval 1", HERE, {"num_nodes": 1}),
        (
            "--rdzv_backend c10d --rdzv_endpoint localhost:0 --nproc_per_node 2",
            HERE,
            {"num_gpus": 2, "master_addr": "localhost"},
        ),
        ("--nnodes 2 --hostfile h", HERE, {"num_nodes": 2, "hostfile": "h"}),
        ("--nnodes 2", JOB, {"num_nodes": 2}),
        ("--nnodes 2 --rdzv_endpoint n1:29500", STEP, {"master_addr": "n1", "master_port": 29500}),
        ("--standalone --nproc_per_node 2", STEP, {"num_nodes": 1, "launcher": "local", "num_gpus": 2}),
        ("--log_dir logs --nproc_per_node 1", HERE, {"run_dir": "logs", "num_gpus": 1}),
        ("--log_dir logs -r 3 -t 3", HERE, {"run_dir": "logs", "log_ranks": "all"}),
        ("--nproc_per_node 2 -t 0:3,1:0 --log_ranks 1", HERE, {"num_gpus": 2, "log_ranks": "1"}),
        ("--use_env -m", HERE, {"module": True}),
        ("--multi_gpu --num_processes 4 --main_process_port 0", HERE, {"num_gpus": 4}),
        ("--num_processes 8 --num_machines 2", JOB, {"num_gpus": 4, "num_nodes": 2}),
        ("--num_machines 2 --deepspeed_hostfile h", HERE, {"num_nodes": 2, "hostfile": "h"}),
    ],
)  # fmt: skip
def test_flags_that_are_taken(text: str, around: Surroundings, expected: dict[str, Any]) -> None:
    assert settled(text, around) == {**ALONE, **expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "--nnodes 2 --node_rank 1 --master_addr n1 --master_port 29501 --nproc_per_node 3",
            {"master_port": 29501, "num_gpus": 3},
        ),
        ("--nnodes 2 --node-rank 1 --master-addr n1", {"num_gpus": 4}),
        ("--nnodes 2 --node_rank 1 --rdzv_endpoint n1", {"num_gpus": 4}),
        ("--nnodes 2 --node_rank 1 --rdzv_endpoint n1:29501", {"num_gpus": 4, "master_port": 29501}),
        (
            "--num_machines 2 --machine_rank 1 --main_process_ip n1 --main_process_port 29501 "
            "--num_processes 6",
            {"num_gpus": 3, "master_port": 29501},
        ),
    ],
)
def test_nodes_that_are_started_by_hand(text: str, expected: dict[str, Any]) -> None:
    by_hand = {**HAND, "num_nodes": 2, "node_rank": 1, "master_addr": "n1"}
    assert settled(text) == {**by_hand, **expected}
    assert settled(text, STEP) == {**by_hand, **expected}


def test_an_address_of_version_6() -> None:
    found = settled("--nnodes 2 --node_rank 0 --rdzv_endpoint [fe80::1]:29500")
    assert (found["master_addr"], found["master_port"]) == ("fe80::1", 29500)


def test_what_accelerate_reads_is_handed_on() -> None:
    found = take_flags(
        given(
            "--env A=1 --use_deepspeed --deepspeed_config_file ds.json --mixed_precision bf16 "
            "--gradient_accumulation_steps 2 --num_cpu_threads_per_process 3"
        ),
        lambda: HERE,
    )
    assert found["env"] == (
        "ACCELERATE_MIXED_PRECISION=bf16",
        "ACCELERATE_USE_DEEPSPEED=true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2",
        "OMP_NUM_THREADS=3",
        "A=1",
    )
    assert found["configs"] == ("--deepspeed_config", "ds.json")
    assert "--use_deepspeed" in found["notes"][0] and "accelerate" in found["notes"][0]


def test_without_them_nothing_changes() -> None:
    def never() -> Surroundings:
        raise AssertionError("nothing was asked for")

    before = given("--num_gpus 2 --log_ranks all --no_ssh --node_rank 0")
    after = take_flags(before, never)
    assert {name: after[name] for name in after if name in before} == {
        name: value for name, value in before.items() if name in after
    }


@pytest.mark.parametrize(
    ("text", "around", "answer"),
    [
        ("--nnodes 1:4", HERE, "--nnodes 1:4: the number of nodes is fixed"),
        ("--nnodes many", HERE, "--nnodes many: expected a number of nodes"),
        ("--nnodes 0", HERE, "--nnodes 0: expected a number of nodes"),
        ("--nnodes 2", HERE, "--rdzv_endpoint, or list all hosts with --hostfile"),
        ("--nnodes 2 --rdzv_endpoint n1:1", HERE, "--node_rank R"),
        ("--nnodes 3", STEP, "--nnodes 3: srun has started this on 2 node(s)"),
        ("--nnodes 2 --node_rank 0", HERE, "give node 0's address with --master_addr"),
        ("--machine_rank 1", HERE, "give the number of nodes with --nnodes N"),
        ("--standalone --nnodes 2", HERE, "--standalone means this machine only"),
        ("--standalone --hostfile h", HERE, "--standalone means this machine only"),
        ("--nproc_per_node gpu", CPU, "this machine has no GPU"),
        ("--nproc_per_node cpu", HERE, "this machine has GPUs"),
        ("--nproc_per_node xpu", HERE, "expected a number, gpu, cpu or auto"),
        ("--nproc_per_node 0", HERE, "expected a number, gpu, cpu or auto"),
        ("--nproc_per_node 2 --num_gpus 3", HERE, "2 and --num_gpus 3 contradict each other"),
        ("--rdzv_endpoint a:1 --master_addr b", HERE, "--rdzv_endpoint a:1 and --master_addr b contradict"),
        ("--rdzv_endpoint a:b", HERE, "expected HOST:PORT"),
        ("--rdzv_backend etcd-v2", HERE, "use c10d or static"),
        ("--num_processes 3 --num_machines 2 --hostfile h", HERE, "cannot be divided evenly among 2 nodes"),
        ("--num_processes 3 --hostfile h", HERE, "use --num_gpus N, the workers of each"),
        ("--tee 4", HERE, "--tee 4: write 0, 1, 2, 3 or 0:3,1:1"),
        ("-r all", HERE, "--redirects all: write"),
        ("--config_file x.yaml", HERE, "zlaunch reads no file of accelerate's"),
        ("--rdzv_conf a=b", HERE, "--rdzv_conf is not zlaunch's: use --node_rank R"),
        ("--use_fsdp", HERE, "zero_optimization.stage of the config"),
        ("--fsdp_offload_params true", HERE, "offload_param and offload_optimizer"),
        ("--zero_stage 3", HERE, "--deepspeed_config_file"),
        ("--local-addr x", HERE, "use --iface NAME"),
        ("--mixed_precision fp8", HERE, "'fp8' is not one of"),
    ],
)  # fmt: skip
def test_flags_with_an_answer(text: str, around: Surroundings, answer: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        take_flags(given(text), lambda: around)
    assert answer in caught.value.format_message() and "\n" not in caught.value.format_message()
