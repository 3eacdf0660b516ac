"""Test the plan as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from zlaunch.cli.main import main
from zlaunch.plan.options import Launch, Program
from zlaunch.plan.plan import NodeSpec, NodeSubset, Plan, RunFacts, is_secret, make_plan, without_secrets
from zlaunch.runtime.mesh import MeshShape
from zlaunch.system.events import encode
from zlaunch.view.plan_table import plan_table


def plan(*nodes: NodeSpec, target: Program | None = None, environ: Mapping[str, str] | None = None) -> Plan:
    run = RunFacts(
        launch=Launch(
            program=target or Program("script", "train.py", ("--lr", "1e-3")),
            run_id="id",
            run_dir="/runs/id",
            workdir="/work",
            grace_s=3.0,
        ),
        bootstrap=("python", "-m", "boot"),
        environ=environ or {},
    )
    return make_plan(run, nodes, master_addr="127.0.0.1", master_port=29500)


def test_two_cpu_workers() -> None:
    worker = plan(NodeSpec("localhost", workers=2, cores=5)).nodes[0].workers[1]
    assert worker.argv == ("python", "-m", "boot", "train.py", "--lr", "1e-3")
    assert worker.env == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ZLAUNCH_RUN_ID": "id",
        "ZLAUNCH_RUN_DIR": "/runs/id",
        "ZLAUNCH_RESTART_COUNT": "0",
        "ZLAUNCH_PASSES_LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "id",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/runs/id/logs/error_00001.json",
    }


def test_the_users_own_settings_stay() -> None:
    environ = {"OMP_NUM_THREADS": "7", "GLIBC_TUNABLES": "", "GLOO_SOCKET_IFNAME": "eth0", "RANK": "9"}
    env = plan(NodeSpec("localhost", workers=1, cores=1), environ=environ).nodes[0].workers[0].env
    assert not {"OMP_NUM_THREADS", "GLIBC_TUNABLES", "GLOO_SOCKET_IFNAME"} & set(env)
    assert env["RANK"] == "0"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_settings_win_under_either_name(name: str) -> None:
    node = NodeSpec("localhost", workers=1, cores=1, devices=("0",))
    for found in (
        plan(node, environ={name: "backend:native"}),
        plan(replace(node, env={name: "backend:native"})),
    ):
        assert found.nodes[0].workers[0].env.get("PYTORCH_CUDA_ALLOC_CONF") != "expandable_segments:True"


def test_cpu_workers_get_no_allocator_settings() -> None:
    env = plan(NodeSpec("localhost", workers=2, cores=2)).nodes[0].workers[0].env
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env)


def test_unequal_gpu_nodes() -> None:
    nodes = plan(NodeSpec("a", 1, 4, devices=("3",)), NodeSpec("b", 2, 4, devices=("0", "2"))).nodes
    workers = [worker for node in nodes for worker in node.workers]
    assert [worker.rank for worker in workers] == [0, 1, 2]
    assert [worker.local_rank for worker in workers] == [0, 0, 1]
    keys = ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "WORLD_SIZE")
    assert [tuple(worker.env[key] for key in keys) for worker in workers] == [
        ("3", "1", "0", "2", "3"),
        ("0,2", "2", "1", "2", "3"),
        ("0,2", "2", "1", "2", "3"),
    ]
    assert all("GLIBC_TUNABLES" not in w.env and "GLOO_SOCKET_IFNAME" not in w.env for w in workers)
    assert all(w.env["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1" for w in workers)
    assert all(w.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" for w in workers)


def test_targets() -> None:
    node = NodeSpec("localhost", 1, 1)
    module = plan(node, target=Program("module", "pkg.mod", ("x",)))
    assert module.nodes[0].workers[0].argv[3:] == ("--module", "pkg.mod", "x")
    program = plan(node, target=Program("exec", "bash", ("-c", "true"), pass_local_rank=False))
    assert program.nodes[0].workers[0].argv[3:] == ("--exec", "bash", "-c", "true")


def test_json_round_trip_with_any_argument() -> None:
    args = ("", "a b", "q\"'$x", "line\nline", "ünï", "\udcff", "\U0001f680")
    whole = plan(NodeSpec("a", 2, 2), NodeSpec("b", 1, 2), target=Program("script", "t.py", args))
    text = encode(asdict(whole))
    assert text.isascii()
    assert Plan.from_dict(json.loads(text)) == whole
    part = whole.for_node(1)
    assert [node.host for node in part.nodes] == ["b"]
    assert part.nodes[0].workers[0].rank == 2
    assert asdict(part)["grace_s"] == 3.0


def test_table_shows_every_rank_and_shared_settings_once() -> None:
    out = StringIO()
    Console(file=out, width=140).print(plan_table(plan(NodeSpec("localhost", 2, 2))))
    text = out.getvalue()
    assert text.count("WORLD_SIZE=2") == 2  # also in LOCAL_WORLD_SIZE
    assert "ranks 0-1" not in text, "a short table needs no summary"
    assert "LOCAL_RANK=1" in text and "127.0.0.1:29500" in text and "train.py" in text


def test_the_table_of_one_node_counts_those_of_other_launchers() -> None:
    run = RunFacts(
        launch=Launch(
            program=Program("script", "train.py"),
            run_id="id",
            run_dir="/runs/id",
            workdir="/work",
            grace_s=3.0,
        ),
        bootstrap=("boot",),
        environ={},
    )
    part = NodeSubset(first_rank=2, world_size=4, first_node=1, node_count=2)
    made = make_plan(run, [NodeSpec("b", 2, 2)], master_addr="a", master_port=1, part=part)
    assert Plan.from_dict(json.loads(encode(asdict(made)))) == made
    out = StringIO()
    Console(file=out, width=140).print(plan_table(made, MeshShape(2, tensor=2)))
    text = " ".join(out.getvalue().split())
    assert "workers 4 on 2 node(s), grace" in text and "this node 1 of 0-1, with 2 worker(s)" in text
    assert "rank 0 on another node" in text and "rank 3 on b" in text


def test_a_long_table_shows_its_ends() -> None:
    out = StringIO()
    nodes = [NodeSpec(f"n{number}", 8, 8) for number in range(20)]
    Console(file=out, width=140).print(plan_table(plan(*nodes)))
    text = out.getvalue()
    assert "96 more workers: --json shows all" in text
    assert "".join(text.splitlines()[:4]).startswith("n0: ranks 0-7, n1: ranks 8-15, ")
    assert text.count(" train.py") == 64 and "RANK=159\n" in text.replace(" ", "\n")


@pytest.mark.parametrize(
    ("mesh", "drawn", "warnings"),
    [
        (
            MeshShape(2, sequence=2),
            ["sequence 0 sequence 1", "data 0 rank 0 on a rank 1 on a", "data 1 rank 2 on b rank 3 on b"],
            [],
        ),
        (
            MeshShape(1, sequence=2, tensor=2),
            [
                "sequence 0, tensor 0 sequence 0, tensor 1 sequence 1, tensor 0 sequence 1, tensor 1",
                "data 0 rank 0 on a rank 1 on a rank 2 on b rank 3 on b",
            ],
            ["each attention waits for the network between nodes at data 0, tensor 0; data 0, tensor 1"],
        ),
        (
            MeshShape(1, expert=2, sequence=2),
            ["data 0, expert 0 rank 0 on a rank 1 on a", "data 0, expert 1 rank 2 on b rank 3 on b"],
            ["tokens travel between nodes to their experts at data 0, sequence 0; data 0, sequence 1"],
        ),
    ],
    ids=["sequence", "tensor", "expert"],
)
def test_the_table_draws_the_mesh(mesh: MeshShape, drawn: list[str], warnings: list[str]) -> None:
    out = StringIO()
    whole = plan_table(plan(NodeSpec("a", 2, 2), NodeSpec("b", 2, 2)), mesh)
    Console(file=out, width=200).print(whole)
    lines = [" ".join(re.sub("[\u2500-\u257f]", " ", line).split()) for line in out.getvalue().splitlines()]
    assert all(line in lines for line in drawn), lines
    assert [line.partition("warning: ")[2] for line in lines if "warning: " in line] == warnings


def test_a_dry_run_shows_spares_and_the_fewest_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("".join(f"node{number} slots=1\n" for number in range(4)))
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    words = ["--dry_run", "--hostfile=hosts", "train.py"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert "\nspares " not in plain and "min_nodes" not in plain
    assert main(["--spares=2", "--min_nodes=1", *words]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "spares      node2, node3" in lines
    assert "min_nodes   1: continue without dead nodes" in lines


def test_names_of_secrets() -> None:
    secret = ("HF_TOKEN", "api_key", "Proxy-Authorization", "PGPASSWORD", "auth", "GITHUB_PAT")
    plain = ("tokenizer", "tokens_per_s", "author", "XAUTHORITY", "PATH", "keyword", "passes")
    assert [name for name in (*secret, *plain) if is_secret(name)] == [*secret]


def test_a_very_long_argument_is_looked_through_at_once() -> None:
    """The test would not end if this took the square of the length."""
    arguments = ("a" * 10**6, "b" * 10**6 + "_key=abc")
    assert without_secrets(arguments) == (arguments[0], "b" * 10**6 + "_key=(not shown)")


def test_values_of_secret_options_are_not_shown() -> None:
    given = ("--api_key", "abc", "--lr", "0.1", "--hf_token=def", "ghi", "--auth", "--verbose", "jkl")
    shown = ("--api_key", "(not shown)", "--lr", "0.1", "--hf_token=(not shown)", "ghi")
    assert without_secrets(given) == (*shown, "--auth", "--verbose", "jkl")


def test_a_plan_takes_the_place_of_a_longer_one(tmp_path: Path) -> None:
    """An attempt with fewer nodes writes its plan where the one before has."""
    path = tmp_path / "plan.json"
    plan(NodeSpec("a", 2, 2), NodeSpec("b", 2, 2)).write(path)
    plan(NodeSpec("a", 1, 1)).write(path)
    assert [node["host"] for node in json.loads(path.read_text())["nodes"]] == ["a"]
