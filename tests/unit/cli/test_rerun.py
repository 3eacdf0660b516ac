"""Test what `zlaunch rerun` makes of a recorded run, without starting one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.supervisor.test_git_state import git
from tests.unit.ui.folders import write_run
from zlaunch.cli.main import main
from zlaunch.node.packages import list_packages
from zlaunch.supervisor.git_state import read_git

NAME = "runs/2026-aaa"
"""Name of the recorded run."""


class Scene:
    """A project under git with one run; and what the command prints."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.script = folder / "train.py"
        self.script.write_text("lr = 1\n")
        (folder / ".gitignore").write_text("runs\n")
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "first")
        self.run_dir = write_run(folder / "runs", "2026-aaa", name="base")
        (self.run_dir / "packages.txt").write_text("".join(f"{line}\n" for line in list_packages()))
        (self.run_dir / "script_copy.py").write_text("lr = 1\n")
        self.record: dict[str, Any] = {
            "version": 1,
            "command": ["--num_gpus", "2", "train.py", "--seed", "1"],
            "cwd": str(folder),
            "script": {
                "path": str(self.script),
                "sha256": hashlib.sha256(self.script.read_bytes()).hexdigest(),
                "copy": "script_copy.py",
            },
            "git": self.git(),
            "packages": {"file": "packages.txt"},
        }

    def git(self) -> dict[str, Any]:
        """Return what a run that starts now records of git."""
        request = {"parent": os.getpid(), "run_dir": str(self.run_dir), "code_folder": str(self.folder)}
        done = subprocess.run(
            [sys.executable, "-m", "zlaunch.supervisor.code_state"],
            input=json.dumps({**request, "script": None}),
            capture_output=True,
            text=True,
            check=True,
        )
        return {"folder": str(self.folder), "why": "", **json.loads(done.stdout)["git"]}

    def rerun(self, *arguments: str, **changes: Any) -> tuple[int, str, str]:
        """Rerun with a changed record; give the exit code and what is printed."""
        (self.run_dir / "provenance.json").write_text(json.dumps({**self.record, **changes}))
        code = main(["rerun", "--dry_run", *(arguments or ("base",))])
        printed = self.capsys.readouterr()
        return code, printed.out, printed.err

    def refusal(self, *command: str, **changes: Any) -> str:
        """The error of a command line that cannot be run again."""
        if command:
            changes["command"] = list(command)
        code, out, err = self.rerun(**changes)
        assert (code, out) == (2, "") and err.startswith("zlaunch rerun: error: ")
        return err.removeprefix("zlaunch rerun: error: ")

    def warnings(self, **changes: Any) -> list[str]:
        code, _, err = self.rerun(**changes)
        assert code == 0
        return [line.removeprefix("zlaunch: warning: ") for line in err.splitlines()]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scene:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Scene(tmp_path, capsys)


@pytest.mark.rotated
def test_the_same_command_in_the_same_folder(scene: Scene) -> None:
    shown = f"cd {scene.folder}\nzlaunch --num_gpus 2 train.py --seed 1\n"
    assert scene.rerun() == (0, shown, "")
    more = shown.replace("--seed 1", "--seed 1 --lr '1 2'")
    assert scene.rerun("2026-a", "--lr", "1 2") == (0, more, "")
    line = ["run", "--run-dir=old", "--run_dir", "x", "--detach", "--run_id=y", "train.py", "--run_dir=own"]
    _, out, _ = scene.rerun(command=line)
    assert out.endswith("\nzlaunch --detach train.py --run_dir=own\n"), "the new run has a folder of its own"
    line = ["--tag", "parent", "--name=run_id", "--run_d", "run_dir", "-H", "parent", "train.py", "a"]
    _, out, err = scene.rerun(command=line)
    assert "--hostfile parent, which is gone" in err, "a value is no option"
    (scene.folder / "parent").write_text("localhost slots=2\n")
    _, out, err = scene.rerun(command=line)
    assert out.endswith("\nzlaunch --tag parent --name=run_id -H parent train.py a\n"), err
    code, _, err = scene.rerun("base", "--dry-run")
    assert code == 2 and "--dry_run goes before RUN" in err


@pytest.mark.rotated
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "flag", ["--run_dir", "--enable-each-rank-log", "--log_dir", "--log-dir", "--log_di"]
)
def test_a_new_run_does_not_get_the_folder_of_the_old_one(scene: Scene, flag: str) -> None:
    for given in ([flag, "runs/tr"], [f"{flag}=runs/tr"]):
        line = ["--standalone", "--nproc_per_node", "1", *given, "train.py", "--log_dir", "own"]
        _, out, err = scene.rerun(command=line)
        assert out.endswith("\nzlaunch --standalone --nproc_per_node 1 train.py --log_dir own\n"), err


def test_the_run_is_started_with_its_options_in_its_folder(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    started: list[Any] = []

    def start(chosen: Any, ranks: Any) -> int:
        o = chosen.launcher.launch
        started.append((o.workdir, o.program.name, o.program.args, o.num_gpus, tuple(sys.argv[1:])))
        return 7

    monkeypatch.setattr("zlaunch.cli.run._start", start)
    (scene.run_dir / "provenance.json").write_text(json.dumps(scene.record))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setattr(sys, "argv", ["zlaunch"])
    assert main(["rerun", str(scene.run_dir), "--lr", "2"]) == 7
    words = ("--num_gpus", "2", "train.py", "--seed", "1", "--lr", "2")
    assert started == [(str(scene.folder), "train.py", words[3:], 2, words)]


def test_what_is_missing_is_named(scene: Scene) -> None:
    assert main(["rerun", "base"]) == 2
    assert "no provenance.json: an older zlaunch" in scene.capsys.readouterr().err
    assert scene.refusal(cwd="/gone") == f"{NAME} ran in /gone, which is gone\n"
    said = scene.refusal("-H", "hosts", "train.py")
    assert said == f"{NAME} used --hostfile hosts, which is gone from {scene.folder}\n"
    said = scene.refusal("--deepspeed_hostfile", "hosts", "train.py")
    assert said == f"{NAME} used --deepspeed_hostfile hosts, which is gone from {scene.folder}\n"
    secret = ["--env=HF_TOKEN=(not shown)", "train.py", "--api_key", "(not shown)"]
    said = scene.refusal(*secret)
    assert (
        "are not recorded: --env=HF_TOKEN=(not shown) (its name has 'TOKEN'), "
        "--api_key (its name has 'key'). Fill them in" in said
    )
    assert f"cd {scene.folder} && zlaunch '--env=HF_TOKEN=(not shown)' train.py" in said
    said = scene.refusal("train.py", "(not shown)", "--model", "(not shown)", "s3://(not shown)@host/pass")
    why = "(its value looks like a token, or a variable with a secret name has it)"
    places = ("the argument after train.py", "--model", "s3://(not shown)@host/pass")
    assert f"are not recorded: {', '.join(f'{place} {why}' for place in places)}. Fill them in" in said
    assert "is a function that a Python program" in scene.refusal("-m", "zlaunch.node.function_call", "x")
    assert "No such option" in scene.refusal("--gone", "train.py")
    assert "use zlaunch 9.0, which wrote it" in scene.refusal(version=2, zlaunch="9.0")
    for damaged in ([], "train.py", [1], None):
        assert "provenance.json cannot be read" in scene.refusal(command=damaged)
    scene.script.unlink()
    copy = scene.run_dir / "script_copy.py"
    assert scene.refusal() == f"{NAME} ran the script {scene.script}, which is gone; its copy is {copy}\n"


def test_a_record_that_cannot_be_opened_says_why(scene: Scene) -> None:
    (scene.run_dir / "provenance.json").mkdir()  # root may read any file
    assert main(["rerun", "base"]) == 2
    assert f"{NAME}/provenance.json cannot be read: is not a file" in scene.capsys.readouterr().err


@pytest.mark.exhaustive
def test_each_difference_is_one_line(scene: Scene) -> None:
    scene.script.write_text("lr = 2\n")
    assert scene.warnings() == [
        f"the script {scene.script} has changed since the run; its copy is {scene.run_dir}/script_copy.py",
        f"the uncommitted changes differ from {scene.run_dir}/git.diff",
    ]
    git(scene.folder, "commit", "-qam", "second")
    before = scene.record["git"]["commit"][:10]
    now = git(scene.folder, "rev-parse", "HEAD")[:10]
    assert scene.warnings()[1:] == [f"the git commit is {now} and was {before}"]
    git(scene.folder, "checkout", "-q", "HEAD~1")
    assert scene.warnings() == []
    lines = (scene.run_dir / "packages.txt").read_text().splitlines()
    others = [line for line in lines if not line.startswith("click==")]
    (scene.run_dir / "packages.txt").write_text("\n".join([*others, "click==0.1", "-e /src  # zz==1"]))
    (difference,) = scene.warnings()
    assert (
        difference.startswith("packages differ: click ") and ", was 0.1; zz is missing, was -e" in difference
    )


def test_what_cannot_be_compared_is_said(scene: Scene, tmp_path: Path) -> None:
    (scene.run_dir / "packages.txt").unlink()
    late = {"why": "not recorded: the run ended first"}
    assert scene.warnings(git={**late, "folder": str(scene.folder)}, packages=late, script={}) == [
        "git state not compared: not recorded: the run ended first",
        "packages not compared: not recorded: the run ended first",
    ]
    assert "untracked files not compared: the record does not have them" in scene.warnings(
        git={name: value for name, value in scene.record["git"].items() if name != "untracked"}
    )
    gone = {"path": "/gone.py", "sha256": "x"}
    assert scene.warnings(script=gone)[0] == "script not compared: /gone.py: No such file or directory"
    none = {"folder": "/", "commit": "", "why": read_git(Path("/"), 60.0).why}
    assert scene.warnings(git=none)[0].startswith("packages"), "there was no repository, and there is none"


def test_a_script_that_is_no_file_by_now_is_not_read(scene: Scene) -> None:
    scene.script.unlink()
    os.mkfifo(scene.script)
    assert scene.warnings()[0] == f"script not compared: {scene.script}: is not a file"
    scene.script.unlink()
    scene.script.symlink_to("/dev/zero")
    assert scene.warnings()[0] == f"script not compared: {scene.script}: is not a file"


@pytest.mark.rotated
def test_untracked_files_are_compared(scene: Scene) -> None:
    for name in ("helper.py", "old.py", "same.py"):
        (scene.folder / name).write_text("x = 1\n")
    (scene.folder / "long.bin").write_bytes(bytes(1_000_001))
    (scene.folder / "parts").mkdir()
    (scene.folder / "parts" / "one.py").touch()
    (scene.folder / "zero").symlink_to("/dev/zero")
    scene.record["git"] = scene.git()
    unknown = "contents of untracked files not compared: long.bin, parts/, zero"
    assert scene.warnings() == [unknown]
    (scene.folder / "helper.py").write_text("x = 2\n")
    (scene.folder / "old.py").unlink()
    for name in ("a.txt", "b.txt", "c.txt", "new.py"):
        (scene.folder / name).touch()
    (scene.folder / "__pycache__").mkdir()
    (scene.folder / "__pycache__" / "helper.pyc").touch()
    differ = "untracked files differ: changed helper.py; new new.py, a.txt, b.txt, 1 more; gone old.py"
    assert scene.warnings() == [differ, unknown]
    older = {name: value for name, value in scene.record["git"].items() if name != "untracked_sha256"}
    assert scene.warnings(git=older) == [
        differ.replace("changed helper.py; ", ""),
        "contents of untracked files not compared: helper.py, same.py, long.bin, 2 more",
    ]
    cut = {**scene.record["git"], "untracked": ["helper.py"], "untracked_not_listed": 5}
    assert scene.warnings(git=cut) == [
        "untracked files not compared: those after helper.py",
        "untracked files differ: changed helper.py; new a.txt, b.txt, c.txt",
    ]


def test_folders_of_runs_are_no_code(scene: Scene) -> None:
    (scene.folder / ".gitignore").unlink()
    scene.record["git"] = {**scene.git(), "untracked": []}
    assert scene.warnings() == []


@pytest.mark.rotated
def test_what_a_diff_does_not_have_is_said(scene: Scene) -> None:
    assert scene.warnings(git={**scene.record["git"], "diff_is_cut": True}) == [
        "uncommitted changes not compared after the first 10 MB"
    ]
    source = scene.folder / "runs" / "source"
    source.mkdir()
    (source / "x.py").touch()
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-qm", "first")
    for name in ("sub", "my sub", "clean"):
        git(scene.folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(source), name)
    git(scene.folder, "commit", "-qm", "second")
    git(scene.folder / "sub", "commit", "-q", "--allow-empty", "-m", "second")
    (scene.folder / "sub" / "x.py").write_text("x = 1\n")
    (scene.folder / "my sub" / "x.py").write_text("x = 1\n")
    scene.record["git"] = scene.git()
    assert scene.record["git"]["dirty_submodules"] == ["my sub", "sub"]
    said = "# zlaunch: submodule with uncommitted changes, not in this diff: 'my sub'\n"
    assert said in (scene.run_dir / "git.diff").read_text()
    (scene.folder / "sub" / "x.py").write_text("x = 2\n")
    assert scene.warnings() == ["uncommitted changes in submodules not compared: my sub, sub"]
