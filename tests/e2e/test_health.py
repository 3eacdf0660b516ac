"""Test that a run with `--health` starts on healthy machines alone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.helpers import ROOT, Launch

FULL_DISK = """
import shutil, sys
shutil.disk_usage = lambda path: type("Usage", (), {"free": 5 << 20})
"""


def test_a_healthy_machine_reports_and_runs(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "--num_gpus=1", "--no_local_rank", "--health", script="print('ran')")
    assert launch.wait() == 0, launch.err
    assert "zlaunch: health of localhost: " in launch.err and "of disk free" in launch.err
    assert "ran" in launch.out


def test_a_machine_with_a_full_disk_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    launch = Launch(
        tmp_path,
        "--hostfile=hosts",
        "--no_local_rank",
        "--health",
        script="print('ran')",
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert launch.wait() == 2 and "ran" not in launch.out
    assert f"localhost: it is not healthy: 5 MiB free in {tmp_path}: make room" in launch.err
    assert "2 of 2 nodes cannot take part; nothing was started" in launch.err
    record = json.loads((launch.run_dir / "launcher.json").read_text())
    assert (record["cause"], record["bad_hosts"]) == ("host refused", ["localhost", "127.0.0.1"])


def test_excluding_needs_nodes_to_continue_with(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    launch = Launch(tmp_path, "--hostfile=hosts", "--exclude_unhealthy", script="print('ran')")
    assert launch.wait() == 2 and "--exclude_unhealthy needs --min_nodes N or --spares N" in launch.err
