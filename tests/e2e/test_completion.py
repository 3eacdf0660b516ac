"""Test how a line that begins with `zlaunch` goes on in a shell, by what click's scripts for shells call."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT
from tests.limits import LIMIT_S
from zlaunch.system.processes import start_ticks

ENTRY = "from zlaunch.__main__ import main; raise SystemExit(main())"
"""Does what the script `zlaunch` does that pip makes."""


def zlaunch(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command without arguments, as shells call it."""
    return subprocess.run(
        [sys.executable, "-c", ENTRY],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def ways_on(folder: Path, line: str) -> list[str]:
    """Return what bash is told for a line with the cursor at its end, as `kind,value`, and nothing else."""
    words = line.split()
    count = len(words) if line.endswith(" ") else len(words) - 1
    done = zlaunch(folder, _ZLAUNCH_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(count))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def write_run(folder: Path, name: str, started: int, *, lives: bool) -> None:
    record = {
        "run_id": name,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "hosts": ["localhost"],
        "world_size": 1,
        "command": ["train.py"],
        "started": started,
        "ended": None if lives else started + 1,
        "exit_code": None if lives else 0,
    }
    path = folder / "runs" / name
    path.mkdir(parents=True)
    (path / "launcher.json").write_text(json.dumps(record))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("zlaunch l", ["file,l", "plain,logs"]),
        ("zlaunch --num_n", ["plain,--num_nodes"]),
        ("zlaunch --launcher s", ["plain,ssh", "plain,slurm"]),
        ("zlaunch --compat ", ["plain,auto", "plain,deepspeed", "plain,none"]),
        ("zlaunch --hostfile ", ["file,"]),
        ("zlaunch --ssh_config my", ["file,my"]),
        ("zlaunch --workdir ", ["dir,"]),
        ("zlaunch --num_gpus 2 tr", ["file,tr"]),
        ("zlaunch --nproc_per_node 2 tr", ["file,tr"]),
        ("zlaunch train.py --config d", ["file,d"]),
        ("zlaunch train.py --num", ["file,--num"]),
        ("zlaunch checkpoint ", [f"plain,{name}" for name in ("export", "import", "ls", "show", "verify")]),
        ("zlaunch checkpoint export ckpt out --dtype b", ["plain,bf16"]),
        ("zlaunch checkpoint ls ", ["dir,"]),
        ("zlaunch config check d", ["file,d"]),
        ("zlaunch slurm script --gp", ["plain,--gpus_per_node", "plain,--gpus"]),
        ("zlaunch --num-n", ["plain,--num_nodes"]),
        ("zlaunch run --num-n", ["plain,--num_nodes"]),
        ("zlaunch run tr", ["file,tr"]),
        ("zlaunch ru", ["file,ru", "plain,run"]),
        ("zlaunch slurm script train.py --gp", ["file,--gp"]),
        ("zlaunch slurm script -h", ["plain,-h"]),
        ("zlaunch help s", ["plain,slurm", "plain,stacks", "plain,stop", "plain,submit", "plain,sweep"]),
        ("zlaunch help slurm ", ["plain,script", "plain,submit"]),
        ("zlaunch logs ", []),
    ],
)
def test_a_line_goes_on(line: str, expected: list[str], tmp_path: Path) -> None:
    assert ways_on(tmp_path, line) == expected


def test_a_line_begins_with_a_command_an_option_or_a_script(tmp_path: Path) -> None:
    found = ways_on(tmp_path, "zlaunch ")
    assert found[0] == "file," and {"plain,doctor", "plain,ps", "plain,help"} < set(found)
    options = ways_on(tmp_path, "zlaunch -")
    assert {"plain,--num_gpus", "plain,-H", "plain,--dry_run", "plain,--help"} < set(options)
    assert "plain,--nproc_per_node" not in options, "flags of others are taken, not offered"


def test_runs_are_offered_by_name(tmp_path: Path) -> None:
    write_run(tmp_path, "a-old", 1000, lives=True)
    write_run(tmp_path, "b-ended", 2000, lives=False)
    assert ways_on(tmp_path, "zlaunch logs ") == ["plain,last", "plain,b-ended", "plain,a-old"]
    assert ways_on(tmp_path, "zlaunch ps a") == ["dir,a", "plain,a-old"]
    for command in ("stop", "stacks"):
        assert ways_on(tmp_path, f"zlaunch {command} ") == ["plain,a-old"], "the last one has ended"
    write_run(tmp_path, "c-new", 3000, lives=True)
    assert ways_on(tmp_path, "zlaunch stop ") == ["plain,last", "plain,c-new", "plain,a-old"]


@pytest.mark.parametrize("line", ["zlaunch ", "zlaunch checkpoint export ", "zlaunch estimate "])
def test_torch_is_not_imported(line: str, tmp_path: Path) -> None:
    env = {"_ZLAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()))}
    done = zlaunch(tmp_path, PYTHONPROFILEIMPORTTIME="1", **env)
    names = {entry.rpartition("|")[2].strip() for entry in done.stderr.splitlines()}
    assert "zlaunch.cli.completion" in names and "torch" not in names


def test_zsh_and_fish_are_told_what_things_are(tmp_path: Path) -> None:
    zsh = zlaunch(tmp_path, _ZLAUNCH_COMPLETE="zsh_complete", COMP_WORDS="zlaunch sto", COMP_CWORD="1")
    assert zsh.stdout.splitlines()[3:] == ["plain", "stop", "Stop a run and wait until it ends."]
    fish = zlaunch(tmp_path, _ZLAUNCH_COMPLETE="fish_complete", COMP_WORDS="zlaunch sto", COMP_CWORD="sto")
    assert fish.stdout.splitlines()[1:] == ["plain,stop\tStop a run and wait until it ends."]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str, tmp_path: Path) -> None:
    done = zlaunch(tmp_path, _ZLAUNCH_COMPLETE=f"{shell}_source")
    assert done.returncode == 0 and "_zlaunch_completion" in done.stdout
    assert f"_ZLAUNCH_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("tcsh_source", "use bash_source, zsh_source or fish_source"),
        ("bash_complete", "called by the shell"),
    ],
)
def test_other_requests_are_one_line(asked: str, answer: str, tmp_path: Path) -> None:
    done = zlaunch(tmp_path, _ZLAUNCH_COMPLETE=asked)
    assert done.returncode == 2 and done.stdout == ""
    assert answer in done.stderr and done.stderr.count("\n") == 1


def test_bash_takes_the_script(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "zlaunch"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{ENTRY}\n")
    program.chmod(0o755)
    code = (
        'eval "$(_ZLAUNCH_COMPLETE=bash_source zlaunch)"; complete -p zlaunch\n'
        'COMP_WORDS=(zlaunch checkpoint ""); COMP_CWORD=2; _zlaunch_completion zlaunch\n'
        'echo "${COMPREPLY[@]}"'
    )
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _zlaunch_completion zlaunch",
        "export import ls show verify",
    ]
