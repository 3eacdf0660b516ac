"""Test how `zlaunch ps` shows commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from zlaunch.cli.main import main
from zlaunch.cli.short_command import short_commands
from zlaunch.supervisor import run_folder

LONG = "--num_gpus 8 --max_restarts 3 work/train.py --config ds.json --model llama-7b --lr 3e-4 --seed 17"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, LONG),
        (70, "... train.py --config ds.json --model llama-7b --lr 3e-4 --seed 17"),
        (65, "... train.py --config ds.json --model llama-7b --lr 3e-4 ..."),
        (50, "... train.py --config ds.json --model llama-7b ..."),
        (30, "... train.py --config ..."),
        (15, "... train.py..."),
    ],
)
def test_the_script_and_the_first_options_stay(width: int, shown: str) -> None:
    assert short_commands([shlex.split(LONG)] * 2, width) == [shown] * 2


def test_commands_that_would_look_alike_show_their_ends() -> None:
    lines = (LONG, LONG.replace("17", "18"), LONG.replace("ds.json", "a.json"))
    assert short_commands([shlex.split(line) for line in lines], 50) == [
        "... train.py ... llama-7b --lr 3e-4 --seed 17",
        "... train.py ... llama-7b --lr 3e-4 --seed 18",
        "... train.py --config a.json --model llama-7b ...",
    ]


def test_a_module_and_a_command_without_a_script() -> None:
    for start, shown in ((["-m", "pkg.train"], "... pkg.train"), (["function"], "function")):
        pair = [[*start, "x" * 30, "--seed", seed] for seed in "12"]
        assert short_commands(pair, 30) == [f"{shown} ... --seed 1", f"{shown} ... --seed 2"]
        (alone,) = short_commands(pair[:1], 30)
        assert alone.startswith(f"{shown} xxx") and alone.endswith("x ...") and len(alone) == 30
    assert len(short_commands([["x" * 60 + ".py", "y"]], 30)[0]) == 30


def test_ps_uses_the_width_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zlaunch", *shlex.split(LONG)])
    (tmp_path / "run").mkdir()
    run_folder.begun(str(tmp_path / "run"), "run", ["localhost"], 8)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for width, found in ((121, "... train.py --config ds.json ..."), (151, "train.py --config"), (250, LONG)):
        size = os.terminal_size((width, 24))
        monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, size=size: size)
        assert main(["ps", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(found in line for line in lines), lines
    assert main(["ps", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["command"] == shlex.split(LONG)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((121, 24)))
    assert main(["ps", str(tmp_path), "-v"]) == 0
    words = capsys.readouterr().out.split()
    assert set(LONG.split()) <= set(words) and "..." not in words


def test_a_run_inside_slurm_shows_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    for job in ("17", ""):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        run_folder.begun(str(tmp_path / "run"), "run", ["localhost"], 1)
        assert main(["ps", str(tmp_path / "run")]) == 0
        assert ("SLURM job 17" in capsys.readouterr().out) == bool(job)


def test_a_pipe_gets_whole_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{LONG} --output_dir {'/scratch/' * 20}"
    for number, seed in enumerate((18, 19)):
        words = shlex.split(f"{command} --seed {seed}")
        monkeypatch.setattr(sys, "argv", ["zlaunch", *words])
        (tmp_path / f"run{number}").mkdir()
        run_folder.begun(str(tmp_path / f"run{number}"), "run", ["localhost"], 8)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ps", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   ")[-1].strip() for line in lines if "train.py" in line] == [
        f"{command} --seed 18",
        f"{command} --seed 19",
    ]


@pytest.mark.parametrize(
    ("array", "shown"), [({}, "17"), ({"ARRAY_JOB_ID": "11", "ARRAY_TASK_ID": "3"}, "11_3")]
)
def test_ps_has_a_column_for_slurm_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    array: dict[str, str],
    shown: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["zlaunch", "train.py"])
    for name in ("ARRAY_JOB_ID", "ARRAY_TASK_ID", "JOB_ID"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    (tmp_path / "a").mkdir()
    run_folder.begun(str(tmp_path / "a"), "a", ["localhost"], 8)
    assert main(["ps", str(tmp_path)]) == 0
    assert "SLURM" not in capsys.readouterr().out
    for name, value in {"JOB_ID": "17", **array}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    (tmp_path / "b").mkdir()
    run_folder.begun(str(tmp_path / "b"), "b", ["localhost"], 8)
    assert main(["ps", str(tmp_path)]) == 0
    header, *rows = [line for line in capsys.readouterr().out.splitlines() if "   " in line.strip()]
    assert header.split()[-3:] == ["SLURM", "job", "command"]
    assert [row.split()[-2:] for row in rows] == [["0", "train.py"], [shown, "train.py"]]
