"""Test torchrun's and accelerate's flags as the options that zlaunch has for them."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import click
import pytest

from zlaunch.cli.flags import Surroundings, take_flags
from zlaunch.cli.main import main
from zlaunch.cli.run import run
from zlaunch.errors import LaunchError
from zlaunch.launchers.arrival import Arrival


def interface_of(address: str) -> str:
    return {"10.0.0.5": "eth1", "127.0.0.1": "lo"}.get(address, "")


HERE = Surroundings(gpus=4, cores=16, knows_hosts=False, interface_of=interface_of)
CPU = Surroundings(gpus=0, cores=16, knows_hosts=False)
JOB = Surroundings(gpus=4, cores=16, knows_hosts=True, interface_of=interface_of)
STEP = Surroundings(gpus=4, cores=16, knows_hosts=True, step_nodes=2, interface_of=interface_of)


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
        ("--nproc_per_node auto", CPU, {"num_gpus": CPU.cores}),
        ("--nproc_per_node gpu --hostfile h", CPU, {"hostfile": "h"}),
        ("--nproc_per_node cpu", CPU, {"num_gpus": 16}),
        ("--nnodes 1 --node_rank 0 --master_port 29501", HERE, {"num_nodes": 1, "master_port": 29501}),
        ("--machine_rank 0", HERE, {}),
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
        ("--role trainer --env A=1", HERE, {"env": ("ROLE_NAME=trainer", "A=1")}),
        ("--rdzv_conf timeout=900", HERE, {"connect_timeout": 900.0}),
        ("--rdzv-conf=join_timeout=600,timeout=30", HERE, {"connect_timeout": 600.0}),
        (
            "--rdzv_conf is_host=1,keep_alive_interval=9",
            HERE,
            {"notes": ["--rdzv_conf: no effect: is_host, keep_alive_interval (use --heartbeat SECONDS)"]},
        ),
        ("--virtual_local_rank", HERE, {"virtual_local_rank": True}),
        ("--local_ranks_filter 2,0 -t 3", HERE, {"local_ranks": [0, 2], "log_ranks": "all"}),
        ("--local-addr 10.0.0.5", HERE, {"master_addr": "10.0.0.5"}),
        ("--local_addr 10.0.0.5 --rdzv_endpoint localhost:0", HERE, {"master_addr": "localhost"}),
        ("--deepspeed_multinode_launcher pdsh", HERE, {}),
        (
            "--deepspeed_multinode_launcher pdsh --num_machines 2 --machine_rank 0 --main_process_ip n1 "
            "--deepspeed_hostfile h --deepspeed_exclusion_filter n3",
            HERE,
            {"launcher": "ssh", "num_nodes": 2, "hostfile": "h", "exclude": "n3"},
        ),
        ("--nnode=1 --nproc-per 2 --stand", HERE, {"num_nodes": 1, "num_gpus": 2, "launcher": "local"}),
        ("--rdzv_e localhost:0", HERE, {"master_addr": "localhost"}),
        ("--fsdp_version 2", HERE, {"notes": ["no effect without --use_fsdp: --fsdp_version"]}),
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
        (
            "--deepspeed_multinode_launcher standard --num_machines 2 --machine_rank 1 --main_process_ip n1",
            {"num_gpus": 4},
        ),
        ("--nnodes 2 --node_rank 1 --master_addr n1 --local_addr 10.0.0.5", {"num_gpus": 4, "iface": "eth1"}),
    ],
)
def test_nodes_that_are_started_by_hand(text: str, expected: dict[str, Any]) -> None:
    by_hand = {**HAND, "num_nodes": 2, "node_rank": 1, "master_addr": "n1"}
    assert settled(text) == {**by_hand, **expected}
    assert settled(text, STEP) == {**by_hand, **expected}


@pytest.mark.parametrize(
    "flags",
    [
        "--fsdp_offload_params True --fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_version 2",
        "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block,Head "
        "--fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_backward_prefetch BACKWARD_PRE "
        "--fsdp_min_num_params 7 --fsdp_reshard_after_forward FULL_SHARD --fsdp_forward_prefetch true "
        "--fsdp_use_orig_params False --fsdp_sync_module_states true --fsdp_activation_checkpointing true",
    ],
)
def test_the_variables_of_fsdp_are_those_of_accelerates_launcher(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    line = (
        f"--use_fsdp --mixed_precision bf16 --num_processes 2 --num_machines 1 --main_process_port 0 {flags}"
    )
    args = launch_command_parser().parse_args([*line.split(), "--dynamo_backend", "no", "train.py"])
    args.num_machines = 1
    theirs = prepare_multi_gpu_env(args)
    ours = dict(pair.split("=", 1) for pair in take_flags(given(line), lambda: HERE)["env"])
    variables = [name for name in theirs if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]
    assert len(variables) > 10
    assert {name: ours.get(name) for name in variables} == {name: theirs[name] for name in variables}


def test_accelerates_options_of_fsdp_are_all_known() -> None:
    from accelerate.commands.launch import launch_command_parser

    given("--use_fsdp")  # adds the flags of other launchers
    ours = {name for each in run.params for name in each.opts}
    theirs = {name for each in launch_command_parser()._actions for name in each.option_strings}
    theirs = {"--" + name[2:].replace("-", "_") for name in theirs}
    assert {name for name in theirs if name.startswith(("--fsdp", "--use_fsdp"))} <= ours


@pytest.mark.parametrize(
    ("text", "port", "is_own", "run", "limit_s"),
    [
        ("--rdzv_endpoint 10.0.0.5:29500 --rdzv_id 7 --nproc_per_node 3", 29500, True, "7", 600.0),
        ("--rdzv_endpoint n1 --num_gpus 3 --rdzv_conf join_timeout=900", 29400, False, "", 900.0),
    ],
)
def test_nodes_that_number_themselves(text: str, port: int, is_own: bool, run: str, limit_s: float) -> None:
    found = settled(f"--nnodes 2 --rdzv_backend c10d {text}")
    host = found["master_addr"]
    assert found["arrival"] == Arrival(host, port, is_own, nodes=2, workers=3, run=run)
    assert (found["node_rank"], found["no_ssh"], found["master_port"]) == (0, True, port)
    assert found["connect_timeout"] == limit_s
    assert "arrival" not in settled(f"--nnodes 2 --node_rank 1 --rdzv_backend c10d {text}")
    assert "arrival" not in settled(f"--nnodes 2 --rdzv_backend c10d {text}", STEP)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("--run_dir afile/x", "--run_dir {folder}/afile/x: cannot write there"),
        ("--log_ranks 9", "--log_ranks '9': there is no rank 9"),
        ("--debug 1", "--debug needs debugpy: pip install 'zlaunch[debug]'"),
    ],
)
def test_a_node_takes_no_number_if_its_launch_is_refused(
    options: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other nodes would wait for it in init_process_group."""
    (tmp_path / "afile").write_text("")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zlaunch.launchers.this_node.has_debugpy", lambda: False)
    taken: list[Arrival] = []

    def number(arrival: Arrival, *limits: object) -> int:
        taken.append(arrival)
        return 1

    monkeypatch.setattr(Arrival, "number", number)
    words = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:29400 {options}"
    assert main([*words.split(), "train.py"]) == 2
    assert answer.format(folder=tmp_path) in capsys.readouterr().err
    assert taken == []


def test_a_node_whose_wait_ends_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that the user has named may be another node's too, and stays."""

    def number(arrival: Arrival, *limits: object) -> int:
        raise LaunchError("not all nodes came")

    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Arrival, "number", number)
    where = "--rdzv_endpoint=127.0.0.1:29400"
    words = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", where]
    assert main([*words, "train.py"]) == 2
    assert list((tmp_path / "runs").iterdir()) == []
    assert main([*words, "--run_dir=named", "train.py"]) == 2
    assert (tmp_path / "named").is_dir()


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
        ("--nnodes 2", HERE, "--node_rank R with --master_addr HOST, or list all hosts with --hostfile"),
        ("--nnodes 2 --rdzv_endpoint n1:1", HERE, "add --rdzv_backend c10d --rdzv_endpoint HOST:PORT"),
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
        ("--rdzv_endpoint a..b:29400", HERE, "--rdzv_endpoint a..b:29400: 'a..b' is no host name"),
        (f"--rdzv_endpoint {'a' * 64}", HERE, "is no host name"),
        ("--rdzv_backend etcd-v2", HERE, "use c10d or static"),
        ("--num_processes 3 --num_machines 2 --hostfile h", HERE, "cannot be divided evenly among 2 nodes"),
        ("--num_processes 3 --hostfile h", HERE, "use --num_gpus N, the workers of each"),
        ("--tee 4", HERE, "--tee 4: write 0, 1, 2, 3 or 0:3,1:1"),
        ("-r all", HERE, "--redirects all: write"),
        ("--config_file x.yaml", HERE, "zlaunch reads no file of accelerate's"),
        ("--rdzv_conf timeout", HERE, "--rdzv_conf timeout: expected KEY=VALUE"),
        ("--rdzv_conf timeout=1m", HERE, "--rdzv_conf timeout=1m: expected a whole number of seconds"),
        ("--rdzv_conf timeout=5 --connect_timeout 9", HERE, "and --connect_timeout 9.0 contradict"),
        ("--local_ranks_filter 0 --log_ranks 1", HERE, "0 and --log_ranks 1 contradict each other"),
        ("--role=", HERE, "--role: expected a name"),
        ("--local_addr 10.0.0.6", HERE, "--local_addr 10.0.0.6: this machine has no such address"),
        ("--local_addr 10.0.0.5", STEP, "inside srun: --env NCCL_SOCKET_IFNAME=NAME"),
        ("--local_addr 10.0.0.5 --hostfile h", HERE, "use --iface NAME, the interface on every node"),
        ("--nnodes 2 --deepspeed_multinode_launcher mpich", HERE, "use ssh, slurm or openmpi"),
        ("--nnodes 2 --deepspeed_multinode_launcher x", HERE, "--deepspeed_multinode_launcher x: expected"),
        ("--n 2", HERE, "No such option"),
        ("--rdzv 2", HERE, "No such option"),
        ("--zero_stage 3", HERE, "--deepspeed_config_file"),
        ("--mixed_precision fp8", HERE, "'fp8' is not one of"),
    ],
)  # fmt: skip
def test_flags_with_an_answer(text: str, around: Surroundings, answer: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        take_flags(given(text), lambda: around)
    assert answer in caught.value.format_message() and "\n" not in caught.value.format_message()


def test_a_node_that_is_started_by_hand_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A made-up one, such as node1, could be another machine's."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    where = ("--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "node1:29500", "--nproc_per_node", "2")
    assert main([*where, "--dry_run", "--json", "train.py"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [node["host"] for node in shown["nodes"]] == [socket.gethostname()]
