"""Test the folders in this machine's memory that agents name and remove."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zlaunch.system import memory


def test_names_cannot_be_guessed_and_what_dead_agents_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    own, again, dead = (Path(memory.new_folder(pid)) for pid in (os.getpid(), os.getpid(), 2**22 - 1))
    assert own.parent == tmp_path and own != again
    for folder in (own, again, dead):
        folder.mkdir()
    memory.remove(str(own))
    assert list(tmp_path.iterdir()) == [again], "this process is alive, and may still use it"


@pytest.mark.needs("root")
def test_what_a_dead_agent_of_another_user_left_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    foreign = Path(memory.new_folder(2**22 - 1))
    foreign.mkdir()
    os.chown(foreign, 65533, 65533)
    memory.remove(memory.new_folder(os.getpid()))
    assert foreign.exists()
