"""Test that a Launch has all that a command line asks for."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from zlaunch.cli.run import launch_of, run
from zlaunch.errors import LaunchError
from zlaunch.launchers import registry
from zlaunch.launchers.arrival import Arrival
from zlaunch.plan.options import Launch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def asked(*words: str) -> Launch:
    with run.make_context("zlaunch", [*words, "train.py", "--lr", "1"]) as context:
        given = dict(context.params)
    return launch_of(given.pop("command"), given, None)


def test_defaults(folder: Path) -> None:
    launch = asked()
    assert (launch.program.mode, launch.program.name, launch.program.args) == (
        "script",
        "train.py",
        ("--lr", "1"),
    )
    assert launch.run_dir == "" and launch.run_id, "the launcher chooses the folder"
    assert (launch.workdir, launch.other_folder) == (str(folder), None)
    assert (launch.log_ranks, launch.grace_s, launch.log_bytes, launch.spares) == ("0", 3.0, None, 0)
    assert not (launch.may_restart or launch.checks_health or launch.detach or launch.dry_run)
    assert Arrival.of(launch) is None


def test_values_that_follow_from_options(folder: Path) -> None:
    assert asked("--requeue").grace_s == 25.0
    assert asked("--log_max_mb", "2").log_bytes == 2_000_000
    assert asked("--exclude_unhealthy", "--spares", "1").checks_health
    assert asked("--min_nodes", "1").may_restart and asked("--max_restarts", "1").may_restart
    assert asked("--hang_timeout", "9").hang_timeout_s == 9.0
    assert asked("--hang_timeout", "9", "--debug", "0").hang_timeout_s == 0.0
    assert asked("--run_dir", "a").run_dir == str(folder / "a")
    assert asked("--run_dir", "None", "--hostfile", "None").run_dir == ""
    assert asked("--log_level", "error").quiet
    assert asked("--venv", "/v").python == "/v/bin/python" and asked("--remote_python", "p").python == "p"
    (folder / "sub").mkdir()
    (folder / "sub" / "train.py").write_text("")
    assert asked("--workdir", "sub").other_folder == "sub"
    with pytest.raises(LaunchError, match="--venv and --remote_python"):
        asked("--venv", "/v", "--remote_python", "p")


def test_flags_of_other_launchers() -> None:
    words = ("--nnodes", "2", "--nproc_per_node", "3", "--rdzv_backend", "c10d", "--rdzv_id", "7")
    launch = asked(*words, "--rdzv_endpoint", "127.0.0.1:29411", "--local_ranks_filter", "0,2")
    assert Arrival.of(launch) == Arrival("127.0.0.1", 29411, True, nodes=2, workers=3, run="7")
    assert (launch.node_rank, launch.num_nodes, launch.num_gpus) == (0, 2, 3)
    assert launch.local_ranks == (0, 2) and not launch.program.pass_local_rank
    config = asked("--deepspeed_config_file", "ds.json")
    assert config.checked_command == ("train.py", "--deepspeed_config", "ds.json", "--lr", "1")


def test_a_launch_has_the_options_that_launchers_refuse() -> None:
    names = {field.name for field in fields(Launch)}
    for name in (*registry.NAMED, *registry._IMPLIED):
        assert set(registry.load(name).refuses) <= names


def test_a_queue_s_options_are_taken() -> None:
    launch = asked("--run_id", "x", "--first_attempt", "2", "--parent", str(os.getpid()))
    assert (launch.run_id, launch.first_attempt, launch.parent) == ("x", 2, os.getpid())
