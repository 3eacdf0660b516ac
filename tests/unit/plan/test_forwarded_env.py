"""Test which variables go to the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from zlaunch.plan.options import EnvError, forwarded_env, requested_env


def test_the_allow_list() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "PYTHONPATH": "/x", "HOME": "/root", "MY_SECRET": "s"}
    environ |= {"CUDA_VISIBLE_DEVICES": "0", "CUDA_LAUNCH_BLOCKING": "1", "ZLAUNCH_SHARED_MEMORY": "0"}
    # what belongs to a run that this one was started from stays behind
    environ |= {"ZLAUNCH_RUN_ID": "x", "ZLAUNCH_STOP_ASKED": "1", "ZLAUNCH_CPUS": "0"}
    kept = {"NCCL_DEBUG", "HF_TOKEN", "PYTHONPATH", "CUDA_LAUNCH_BLOCKING", "ZLAUNCH_SHARED_MEMORY"}
    assert forwarded_env(environ).keys() == kept


def test_files_and_options(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / ".deepspeed_env").write_text("A=1\nB=home\n")
    (here / ".zlaunch_env").write_text("# a comment\n\n  export B='two words' \nC=x=y#z\nD=\n")
    given = ("E=a=b c", "F", "A=option")
    found = requested_env({"F": "from here"}, given, (home, here))
    assert found == {"A": "option", "B": "two words", "C": "x=y#z", "D": "", "E": "a=b c", "F": "from here"}


def test_the_current_folder_s_file_comes_after_the_home_folder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
        (folder / ".zlaunch_env").write_text(f"A={folder.name}\n{folder.name.upper()}_ALONE=1\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert requested_env({}) == {"A": "here", "HOME_ALONE": "1", "HERE_ALONE": "1"}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("NOT_SET", "not set in this environment; write --env NOT_SET=VALUE"),
        ("2X=1", "'2X' is not a variable's name"),
        ("RANK=3", "zlaunch sets this variable"),
        ("CUDA_VISIBLE_DEVICES=1", "choose GPUs with --include"),
    ],
)
def test_options_that_cannot_be(item: str, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        requested_env({}, [item], ())


def test_a_bad_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / ".zlaunch_env").write_text("A=1\nnonsense\n")
    with pytest.raises(EnvError, match=r"\.zlaunch_env:2: 'nonsense' is not KEY=VALUE"):
        requested_env({}, (), [tmp_path])
    (tmp_path / ".zlaunch_env").write_bytes(b"A=\xff\n")
    with pytest.raises(EnvError, match=r"\.zlaunch_env: cannot be read"):
        requested_env({}, (), [tmp_path])
