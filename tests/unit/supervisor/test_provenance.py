"""Test the record of what a run is made of, without workers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.limits import wait_until
from tests.unit.supervisor.test_git_state import git
from zlaunch.plan.options import Launch, Program
from zlaunch.supervisor import file_hash
from zlaunch.supervisor import provenance as module
from zlaunch.supervisor.provenance import Provenance, find_seed, version_in
from zlaunch.system.messages import Packages

TOKEN = "hf_0a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6"
PENDING = "not recorded: the run ended first"


class Scene:
    """A project with a script, and the folder of its run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        self.script = self.folder / "train.py"
        self.script.write_text(f"key = '{TOKEN}'\n")
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.asked = 0

    def provenance(
        self, name: str = "train.py", mode: Literal["script", "module", "exec"] = "script"
    ) -> Provenance:
        program = Program(mode, name, ("--seed", "7"))
        options = Launch(
            program=program,
            run_id="id",
            run_dir=str(self.run_dir),
            workdir=str(self.folder),
            first_attempt=2,
        )
        return Provenance(options, ("--num_gpus=1", name, "--seed", "7"))

    def ask(self) -> None:
        self.asked += 1

    def read(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "provenance.json").read_text())
        return content

    def git(self) -> dict[str, Any]:
        """Return the record's git section, once it is final."""

        def found() -> dict[str, Any] | None:
            about: dict[str, Any] = self.read()["git"]
            return None if about["why"] == PENDING else about

        about: dict[str, Any] = wait_until(found, "git's state")
        return about


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(module, "_AFTER_S", 0.0)
    return Scene(tmp_path)


def test_what_is_known_at_the_start(scene: Scene) -> None:
    scene.provenance().begin()
    about = scene.read()
    assert (about["command"], about["cwd"]) == (["--num_gpus=1", "train.py", "--seed", "7"], os.getcwd())
    assert (about["seed"], about["attempt"], about["run_id"], about["torch"]) == ("7", 2, "id", None)
    assert about["python"] == {"executable": sys.executable, "version": sys.version.split()[0]}
    assert about["script"]["path"] == str(scene.script) and len(about["script"]["sha256"]) == 64
    assert about["git"]["why"] == about["packages"]["why"] == PENDING
    assert (scene.run_dir / "provenance.json").stat().st_mode & 0o777 == 0o600


def test_the_rest_is_found_beside_the_workers_without_secrets(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "correct-horse")
    git(scene.folder, "init", "-q")
    git(scene.folder, "add", ".")
    git(scene.folder, "commit", "-qm", "first")
    scene.script.write_text(f"key = '{TOKEN}'\nnote = 'correct-horse'\n")
    (scene.folder / "extra.py").touch()
    made = scene.provenance()
    made.begin()
    scene.script.write_text("edited after the start\n")
    made.workers_started(scene.ask)
    about = scene.git()
    assert about["commit"] == git(scene.folder, "rev-parse", "HEAD") and about["branch"] == "trunk"
    assert about["dirty"] is True and about["untracked"] == ["extra.py"] and not about["diff_is_cut"]
    diff = (scene.run_dir / "git.diff").read_text()
    assert "# zlaunch: untracked, not in this diff: 'extra.py'\n" in diff and "+edited after" in diff
    assert TOKEN not in diff and "-key = '(not shown)'" in diff
    assert (scene.run_dir / "script_copy.py").read_text() == "key = '(not shown)'\nnote = '(not shown)'\n"
    assert scene.read()["script"]["secrets"] == 2
    assert scene.asked == 1 and made.end() == []
    for name in ("git.diff", "script_copy.py"):
        assert (scene.run_dir / name).stat().st_mode & 0o777 == 0o600


def test_packages_of_the_workers(scene: Scene) -> None:
    made = scene.provenance()
    lines = ["numpy==2.0", f"own @ git+https://me:{TOKEN}@host/own@abc", "torch==2.6.0+cu124"]
    made.take_packages(Packages("n", 0.0, "/venv/python", "3.12.1", lines))
    shown = "numpy==2.0\nown @ git+https://(not shown)@host/own@abc\ntorch==2.6.0+cu124\n"
    assert (scene.run_dir / "packages.txt").read_text() == shown
    about = scene.read()
    assert about["torch"] == "2.6.0+cu124" and about["packages"] == {"file": "packages.txt", "count": 3}
    assert about["python"] == {"executable": "/venv/python", "version": "3.12.1"}
    made.take_packages(Packages("n", 0.0, why="no memory"))
    assert scene.read()["packages"] == {"why": "no memory"}


def test_the_end_stops_the_search_for_good(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = scene.folder.parent / "git"
    fake.write_text(f"#!/bin/sh\ntouch {scene.folder}/asked\nexec sleep 600\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    made = scene.provenance()
    made.begin()
    made.workers_started(scene.ask)
    made.workers_started(scene.ask)
    wait_until((scene.folder / "asked").exists, "git hangs")
    (helper,) = made.pids
    assert made.end() == []
    wait_until(lambda: not made.pids and not Path(f"/proc/{helper}").exists(), "the helper is gone")
    assert scene.read()["git"]["why"] == PENDING
    made.workers_started(scene.ask)
    assert scene.asked == 1, "nothing begins after the end"


def test_a_failed_helper_and_a_full_disk_do_not_end_a_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "python_module_argv", lambda name: ("/no/such/python",))
    made = scene.provenance()
    made.begin()
    made.workers_started(scene.ask)
    assert "No such file" in scene.git()["why"]
    shutil.rmtree(scene.run_dir)
    made.take_packages(Packages("n", 0.0, lines=["a==1"]))
    assert sorted(made.end()) == [
        f"cannot write {scene.run_dir}/packages.txt: No such file or directory",
        f"cannot write {scene.run_dir}/provenance.json: No such file or directory",
    ]


def test_programs_that_are_no_script_or_cannot_be_copied(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def about(name: str, mode: Literal["script", "module", "exec"]) -> Any:
        scene.provenance(name, mode).begin()
        return scene.read()["script"]

    (scene.folder / "run.sh").write_text("#!/bin/sh\n")
    (scene.folder / "pack").mkdir()
    (scene.folder / "pack" / "__main__.py").touch()
    monkeypatch.chdir(scene.folder)
    assert about("run.sh", "exec")["path"] == str(scene.folder / "run.sh")
    assert about("pack", "script")["path"] == str(scene.folder / "pack" / "__main__.py")
    assert about("train", "module")["path"] == str(scene.script)
    assert about("bash", "exec") == {"path": None, "why": "the program is not a script"}
    assert about("gone.py", "script")["why"] == "cannot be read here: No such file or directory"
    scene.script.write_bytes(bytes(1_000_001))
    assert about("train.py", "script")["why"] == "not copied: it has more than 1,000,000 bytes"


def test_files_are_hashed_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hash, "MOST_FILE_BYTES", 4)
    monkeypatch.setattr(file_hash, "MOST_BYTES", 8)
    for size in range(6):
        (tmp_path / f"{size}").write_bytes(bytes(size))
    os.mkfifo(tmp_path / "pipe")
    hashes = file_hash.hash_files(tmp_path, ["5", "pipe", "gone", "4", "3", "2", "1", "0"])
    assert list(hashes) == ["4", "3", "1", "0"], "5 is too long; 4, 3 and 2 are too many bytes"
    assert hashes["4"] == hashlib.sha256(bytes(4)).hexdigest()


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        ([], None),
        (["--seed", "3"], "3"),
        (["--data_seed", "1", "--seed=4"], "4"),
        (["trainer.seed=5", "x"], "5"),
        (["--random-seed", "6"], "6"),
        (["--seed"], None),
        (["--seed", "--lr"], None),
        (["seed", "7", "--seeds=8", "unseeded=9"], None),
    ],
)
def test_the_seed_of_a_command_line(arguments: list[str], seed: str | None) -> None:
    assert find_seed(arguments) == seed


def test_the_version_of_a_package() -> None:
    lines = ["# /x: unreadable", "-e /src  # Torch==3.0", "other @ https://host/torch==1"]
    assert (version_in(lines, "torch"), version_in(lines, "numpy")) == ("3.0", None)
    assert version_in(["torch @ file:///wheel.whl"], "torch") == "file:///wheel.whl"
