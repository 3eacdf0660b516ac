"""Test `zlaunch bundle` on real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, run
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, wait_until

FROM_SHELL, FROM_OPTION, FROM_CONFIG, FROM_SCRIPT = (
    "shellvalue12",
    "optionvalue3",
    "configvalue4",
    "hf_" + "s5" * 17,
)
FAILING = f"""
    import os, zlaunch
    from torch import nn
    print("key of the shell", os.environ["SHELL_KEY"], "and HF_TOKEN=" + os.environ["HF_TOKEN"], flush=True)
    print("token {FROM_SCRIPT} of the script, tokens_per_s=12345678, tokenizer=gpt2", flush=True)
    comet = {{"enabled": False, "api_key": "{FROM_CONFIG}"}}
    config = {{"train_micro_batch_size_per_gpu": 1, "comet": comet}}
    zlaunch.initialize(model=nn.Linear(2, 2), config=config)
    if os.environ["RANK"] == "1":
        raise ValueError("cannot use " + os.environ["SHELL_KEY"] + " with api_key='{FROM_CONFIG}'")
"""
LINES = """
    import os, sys
    print("line of rank", os.environ["RANK"])
    sys.exit(os.environ["RANK"] == os.environ.get("BAD", "none"))
"""
WAITING = """
    import os, time
    print("up with", os.environ["MY_SECRET"], flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
"""


def unpack(path: Path) -> dict[str, bytes]:
    """The files of an archive, by their names in its folder."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None and member.name.startswith("zlaunch-bundle-")
            found[member.name.partition("/")[2]] = file.read()
    return found


@pytest.mark.exhaustive
def test_a_run_that_failed_and_has_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL_KEY", FROM_SHELL)
    arguments = ("--password", FROM_OPTION, f"http://bob:{FROM_OPTION}@host/")
    launch = run(tmp_path, "--num_gpus=2", f"--env=HF_TOKEN={FROM_OPTION}", script=FAILING, args=arguments)
    assert launch.process.returncode == 1 and FROM_CONFIG in launch.log(1)
    listed = zlaunch(tmp_path, "bundle", "run", "--dry_run")
    assert listed.returncode == 0 and not list(tmp_path.glob("*.gz")), listed.stderr

    done = zlaunch(tmp_path, "bundle", "run")
    path = tmp_path / f"zlaunch-bundle-{launch.run_id}.tar.gz"
    assert done.returncode == 0 and not done.stderr and path.name in done.stdout.splitlines()[-1]
    assert path.stat().st_mode & 0o777 == 0o600
    files = unpack(path)
    for secret in (FROM_SHELL, FROM_OPTION, FROM_CONFIG, FROM_SCRIPT):
        assert not [name for name, data in files.items() if secret.encode() in data]
        assert secret not in done.stdout
    logs = {f"logs/rank_0000{rank}.log" for rank in (0, 1)}
    described = {"contents.txt", "environment.json", "doctor.json", "failures.txt", "events.jsonl"}
    assert files.keys() == {*described, "launcher.json", "plan.json", "config.effective.json", *logs}
    for name, data in files.items():
        assert name in done.stdout and name in listed.stdout
        assert name == "contents.txt" or f" {len(data)} " in files["contents.txt"].decode()
        if name.endswith(".json"):
            json.loads(data)
    assert "checkpoint.json" in done.stdout and "not in it: there is none" in done.stdout
    log = files["logs/rank_00001.log"].decode()
    assert "key of the shell (not shown) and HF_TOKEN=(not shown)\n" in log
    assert "tokens_per_s=12345678, tokenizer=gpt2\n" in log
    assert "ValueError: cannot use (not shown) with api_key='(not shown)'" in files["failures.txt"].decode()
    # a machine under load may have stopped the rank before it had exited
    failures = files["failures.txt"].decode()
    assert any(f"rank 1 on localhost: {end}" in failures for end in ("exit code 1", "killed by SIGTERM"))
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    assert [event["type"] for event in events][:3] == ["start", "agent", "spawn"]
    assert json.loads(files["environment.json"])["packages"]["torch"]
    assert json.loads(files["doctor.json"])["hosts"][0]["host"] == "localhost"


def test_a_run_that_is_going_on(tmp_path: Path) -> None:
    """Take out the values of the run's own variables, which the shell of the command has not."""
    launch = Launch(tmp_path, "--num_gpus=1", "--env=MY_SECRET=onlythere123", script=WAITING)
    try:
        wait_until(lambda: "up with" in launch.out, "the rank is up")
        done = zlaunch(tmp_path, "bundle", "run", "-o", "a.tgz")
        assert done.returncode == 0 and "running" in done.stdout, done.stderr
        files = unpack(tmp_path / "a.tgz")
        assert files["logs/rank_00000.log"] == b"up with (not shown)\n"
        assert not [name for name, data in files.items() if b"onlythere123" in data]
        assert launch.process.poll() is None
    finally:
        (tmp_path / "go").touch()
        assert launch.wait() == 0


@pytest.mark.exhaustive
def test_a_run_with_many_ranks(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus=20", "--env=BAD=9", script=LINES)
    assert launch.process.returncode == 1
    for node in range(10, 30):  # what agents on other nodes leave
        (launch.run_dir / "logs" / f"agent_node{node}.log").write_text("password=abc of an agent")
    done = zlaunch(tmp_path, "bundle", "run")
    [path] = tmp_path.glob("*.tar.gz")
    files = unpack(path)
    ranks = [int(name[len("logs/rank_") : -len(".log")]) for name in files if name.startswith("logs/rank")]
    assert ranks == [*range(8), 9, *range(13, 20)]
    assert "left out: ranks 8, 10-12" in done.stdout
    agents = [name for name in files if name.startswith("logs/agent")]
    assert len(agents) == 16 and files[agents[0]] == b"password=(not shown) of an agent"
    assert "left out: 4 agents: node18, node19, node20, node21" in done.stdout


@pytest.mark.needs("setpriv")
def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus=3", script=LINES)
    outside = tmp_path / "outside"
    outside.write_text("of somebody else")
    logs = [launch.run_dir / "logs" / f"rank_0000{rank}.log" for rank in range(3)]
    for path in logs[:2]:
        path.unlink()
    os.mkfifo(logs[0])
    logs[1].symlink_to(outside)
    logs[2].chmod(0)
    (launch.run_dir / "plan.json").unlink()
    (launch.run_dir / "plan.json").symlink_to("plan.json")
    # root may read all files: it is to have no such rights here
    fewer = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    done = subprocess.run(
        [*fewer, sys.executable, "-m", "zlaunch", "bundle", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    [path] = tmp_path.glob("*.tar.gz")
    files = unpack(path)
    assert not [name for name in files if name.startswith("logs") or name == "plan.json"]
    contents = files["contents.txt"].decode()
    for why in ("it is no plain file", "it is a link to outside of the run's folder", "Permission denied"):
        assert f"not in it: {why}" in contents
    assert "plan.json" in contents and "Too many levels of symbolic links" in contents
    assert b"of somebody else" not in b"".join(files.values())


def test_logs_that_are_a_link_to_elsewhere(tmp_path: Path) -> None:
    launch = run(tmp_path, "--num_gpus=1", script=LINES)
    (launch.run_dir / "logs").rename(tmp_path / "elsewhere")
    (launch.run_dir / "logs").symlink_to(tmp_path / "elsewhere")
    (launch.run_dir / "events.jsonl").unlink()
    done = zlaunch(tmp_path, "bundle", "run", "--dry_run")
    assert done.returncode == 0 and "a link to outside of the run's folder" in done.stdout
    assert "line of rank" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "no run 'nothing'"),
        (
            ["run", "-o", "here"],
            "here already exists: name another file with -o, or replace it with --force",
        ),
        (["run", "-o", "."], "is a folder: name a file with -o"),
        (["run", "-o", "no/where"], "cannot write no/where: No such file or directory"),
    ],
)
def test_mistakes(arguments: list[str], text: str, tmp_path: Path) -> None:
    run(tmp_path, "--num_gpus=1", script=LINES)
    (tmp_path / "here").write_text("mine")
    before = sorted(tmp_path.iterdir())
    done = zlaunch(tmp_path, "bundle", *arguments)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "here").read_text() == "mine"


@pytest.mark.exhaustive
def test_an_existing_archive_is_replaced_on_demand_only(tmp_path: Path) -> None:
    run(tmp_path, "--num_gpus=1", script=LINES)
    assert zlaunch(tmp_path, "bundle", "run").returncode == 0
    [path] = tmp_path.glob("*.tar.gz")
    path.write_text("old")
    again = zlaunch(tmp_path, "bundle", "run")
    assert again.returncode == 2 and "--force" in again.stderr and path.read_text() == "old"
    assert zlaunch(tmp_path, "bundle", "run", "--force").returncode == 0
    assert "contents.txt" in unpack(path)


def test_no_runs(tmp_path: Path) -> None:
    done = zlaunch(tmp_path, "bundle")
    assert done.returncode == 2 and "last: no runs in" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    run(tmp_path, "--num_gpus=1", script="import os\nprint(os.urandom(40_000).hex())")
    done = zlaunch(tmp_path, "bundle", "run", "-o", "small/a.tar.gz")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        "cannot write small/a.tar.gz: No space left on device: free some, or write elsewhere" in done.stderr
    )
    assert not list(small_disk.iterdir())


def test_torch_is_not_imported(tmp_path: Path) -> None:
    run(tmp_path, "--num_gpus=1", script=LINES)
    code = "import sys, zlaunch.cli.main as cli; cli.main(['bundle', 'run']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.endswith("False\n") and list(tmp_path.glob("*.tar.gz")), done.stderr
