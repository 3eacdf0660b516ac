"""Test runs that go on without their terminal: `--detach`, `attach`, `wait`, and the names of runs."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, alive
from tests.e2e.test_runs import zlaunch
from tests.limits import LIMIT_S, wait_until

SCRIPT = """
    import os, sys, time
    print("begun", os.isatty(0), flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    print("err", file=sys.stderr, flush=True)
    print("done", flush=True)
    sys.exit(int(sys.argv[1]))
"""
OPTIONS = ("--detach", "--num_gpus=2", "--no_local_rank", "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a script; what runs there is ended afterwards."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    yield tmp_path
    for record in tmp_path.glob("runs/2*/launcher.json"):
        known = json.loads(record.read_text())
        if known["ended"] is None:
            zlaunch(tmp_path, "stop", record.parent)


def in_terminal(folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command in a terminal of its own; give its other end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "zlaunch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(theirs), os.O_RDWR)),  # takes it as its own
    )
    os.close(theirs)
    return process, ours


def read_until(fd: int, word: bytes) -> bytes:
    """Read a terminal until it has shown a word."""
    text = b""

    def shown() -> bool:
        nonlocal text
        text += os.read(fd, 4096)
        return word in text

    wait_until(shown, word.decode())
    return text


def test_a_terminal_that_is_closed_ends_nothing(folder: Path) -> None:
    process, terminal = in_terminal(folder, *OPTIONS, "0")
    said = read_until(terminal, b"zlaunch attach")
    assert process.wait(LIMIT_S) == 0
    name = said.split()[0].decode()
    assert (folder / "runs" / "latest").resolve() == folder / "runs" / name
    run_id = json.loads((folder / "runs" / name / "launcher.json").read_text())["run_id"]
    os.close(terminal)  # its processes get SIGHUP
    log = folder / "runs" / name / "console.log"
    wait_until(lambda: "begun False" in log.read_text(), "the script")
    other, terminal = in_terminal(folder, "attach", name[:13])
    read_until(terminal, b"begun False")
    os.close(terminal)  # ends what is attached, not the run
    other.wait(LIMIT_S)
    assert alive(run_id)
    third, terminal = in_terminal(folder, "attach")
    read_until(terminal, b"begun False")
    (folder / "go").touch()
    read_until(terminal, b"done")
    assert third.wait(LIMIT_S) == 0
    os.close(terminal)
    assert not alive(run_id)


@pytest.mark.rotated
def test_its_exit_code_is_told(folder: Path) -> None:
    started = zlaunch(folder, *OPTIONS, "7")
    name = started.stdout.strip()
    assert started.returncode == 0 and len(started.stdout.splitlines()) == 1, started
    early = zlaunch(folder, "wait", name.rpartition("-")[2], "--timeout", "0.1")
    assert early.returncode == 124 and "has not ended within" in early.stderr
    (folder / "go").touch()
    assert zlaunch(folder, "wait", "latest").returncode == 7
    attached = zlaunch(folder, "attach", "-n", "1000", name)
    assert attached.returncode == 7
    assert "done" in attached.stdout and "it exited with code 7" in attached.stdout
    listed = json.loads(zlaunch(folder, "ps", "--all", "--json").stdout)
    assert [(each["run"], each["state"]) for each in listed] == [(name, "ended 7")]
    assert zlaunch(folder, "ps", "--clean", "--yes").returncode == 0
    assert not (folder / "runs").exists()


def test_it_can_be_stopped_before_its_nodes_answer(folder: Path) -> None:
    with socket.create_server(("", 0)) as silent:  # takes connections, and says nothing
        (folder / "hosts").write_text("127.0.0.2 slots=2\n127.0.0.3 slots=2\n")
        ssh = ("--hostfile=hosts", f"--ssh_port={silent.getsockname()[1]}", "--ssh_accept_new")
        started = zlaunch(folder, *ssh, *OPTIONS, "0")
        assert started.returncode == 0, started.stderr
        [listed] = json.loads(zlaunch(folder, "ps", "--json").stdout)
        assert (listed["state"], listed["hosts"]) == ("running", ["127.0.0.2", "127.0.0.3"])
        stopped = zlaunch(folder, "stop", "last", "--timeout=60")
        assert stopped.returncode == 0, stopped.stderr
    assert zlaunch(folder, "wait").returncode == 128 + signal.SIGTERM


@pytest.mark.rotated
def test_what_cannot_be_is_said(folder: Path) -> None:
    names = ["20260101-000000-aaaaaa", "20260101-000001-aabbbb"]
    for name in names:
        (folder / "runs" / name).mkdir(parents=True)
        record = {"run_id": name, "host": os.uname().nodename, "pid": 1, "start_ticks": 1, "hosts": []}
        record |= {"world_size": 1, "command": ["x.py"], "started": 1.0, "ended": 2.0, "exit_code": 0}
        (folder / "runs" / name / "launcher.json").write_text(json.dumps(record))
    for text in ("2026", "aa"):
        said = zlaunch(folder, "wait", text)
        assert said.returncode == 2 and "matches 2 runs" in said.stderr
    assert zlaunch(folder, "wait", "aab").returncode == 0
    said = zlaunch(folder, "attach", "aab")
    assert (
        said.returncode == 2
        and "was not started with --detach: follow its output with `zlaunch logs -f aab`" in said.stderr
    )
    said = zlaunch(folder, "wait", "zz")
    assert said.returncode == 2 and "no run 'zz'" in said.stderr


@pytest.mark.exhaustive
def test_streams_times_and_the_newest_part_of_logs(folder: Path) -> None:
    (folder / "go").touch()
    (folder / "train.py").write_text(
        "import sys\nfor i in range(3000):\n    print('line', i, 'x' * 990)\nprint('why', file=sys.stderr)\n"
    )
    launched = zlaunch(folder, "--num_gpus=1", "--no_local_rank", "--quiet", "--log_max_mb=1", "train.py")
    assert launched.returncode == 0, launched.stderr
    logs = folder / "runs" / "latest" / "logs"
    sizes = [path.stat().st_size for path in logs.glob("rank_00000.log*")]
    assert len(sizes) == 2 and 500_000 < sum(sizes) < 1_200_000
    lines = zlaunch(folder, "logs", "--stdout").stdout.splitlines()
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert numbers == list(range(numbers[0], 3000)) and len(numbers) > 450
    assert zlaunch(folder, "logs", "--stderr").stdout == "why\n"
    count = len(zlaunch(folder, "logs").stdout.splitlines()) - 3
    assert len(zlaunch(folder, "logs", "-n", str(count)).stdout.splitlines()) == count
    stamped = zlaunch(folder, "logs", "-t", "--since=1h", "--stderr").stdout
    assert stamped.startswith("20") and stamped.endswith(" why\n") and stamped.count(":") == 2
    assert zlaunch(folder, "logs", "--since=2099-01-01").stdout == ""
    (logs / "rank_00001.log").touch()  # of a rank that prints nothing
    both = zlaunch(folder, "logs", "-t", "--since=1h", "--stderr")
    assert both.returncode == 0 and both.stdout.endswith(" why\n"), both
    said = zlaunch(folder, "logs", "--since=yesterday")
    assert said.returncode == 2 and "is not a time" in said.stderr
