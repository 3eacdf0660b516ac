"""Test on real runs what is recorded of them, and `zlaunch rerun`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import ROOT, exists
from tests.limits import LIMIT_S, wait_until
from tests.unit.supervisor.test_git_state import git

PENDING = "not recorded: the run ended first"
SCRIPT = """
import json, os, sys, time
from pathlib import Path
if sys.argv[-1] == "wait":
    def is_known(name):
        return json.loads(Path("runs/latest/provenance.json").read_text())[name].get("why") != PENDING
    while not (is_known("git") and is_known("packages")):
        time.sleep(0.1)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
""".replace("PENDING", repr(PENDING))


def zlaunch(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a folder, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "zlaunch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def read(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "provenance.json").read_text())
    return content


@pytest.mark.rotated
def test_a_run_is_recorded_and_started_again(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("runs\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    options = ("--num_gpus=2", "--no_local_rank", "--name=base", "--tag=small")
    done = zlaunch(tmp_path, *options, "train.py", "--seed=3", "wait")
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "runs" / "latest").resolve()
    about = read(first)
    assert about["command"] == [*options, "train.py", "--seed=3", "wait"] and about["seed"] == "3"
    assert about["git"]["commit"] == git(tmp_path, "rev-parse", "HEAD") and about["git"]["dirty"] is False
    packages = (first / "packages.txt").read_text().splitlines()
    assert about["packages"]["count"] == len(packages) > 10 and f"torch=={about['torch']}" in packages
    assert (first / "script_copy.py").read_text() == SCRIPT
    record = json.loads((first / "launcher.json").read_text())
    assert (record["name"], record["tags"]) == ("base", ["small"])

    again = zlaunch(tmp_path, "rerun", "base", "--lr=1")
    assert again.returncode == 0 and "warning" not in again.stderr, again.stderr
    assert "rank 0 of 2 --seed=3 wait --lr=1" in again.stdout
    second = (tmp_path / "runs" / "latest").resolve()
    assert second != first
    assert read(second)["command"] == [*about["command"], "--lr=1"]
    listed = zlaunch(tmp_path, "ps", "--all").stdout
    assert listed.count("base #small") == 2

    (tmp_path / "train.py").write_text("# edited\n" + SCRIPT)
    shown = zlaunch(tmp_path, "rerun", "--dry_run", str(first))
    assert shown.stdout == f"cd {tmp_path}\nzlaunch {' '.join(about['command'])}\n"
    assert shown.stderr.splitlines() == [
        f"zlaunch: warning: the script {tmp_path}/train.py has changed since the run; its copy is "
        f"{first}/script_copy.py",
        f"zlaunch: warning: the uncommitted changes differ from {first}/git.diff",
    ]


@pytest.mark.exhaustive
def test_a_git_that_hangs_does_not_delay_a_run(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/asked\nsleep 600\n")
    fake.chmod(0o755)
    script = "import os, time\nwhile not os.path.exists('asked'): time.sleep(0.05)\n"
    (tmp_path / "train.py").write_text(script)
    done = zlaunch(tmp_path, "--no_local_rank", "train.py", PATH=f"{fake.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "ended" not in done.stderr, "git is nothing that the script has left running"
    assert read(tmp_path / "runs" / "latest")["git"]["why"] == PENDING
    pid = int((tmp_path / "asked").read_text())
    wait_until(lambda: not exists(pid), "git is gone with its run")
