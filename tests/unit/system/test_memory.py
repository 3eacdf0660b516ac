"""Test the folders in this machine's memory that agents name and remove."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zlaunch.system import machine


def test_names_cannot_be_guessed_and_what_dead_agents_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    own, again, dead = (Path(machine.new_folder(pid)) for pid in (os.getpid(), os.getpid(), 2**22 - 1))
    assert own.parent == tmp_path and own != again
    for folder in (own, again, dead):
        folder.mkdir()
    machine.remove(str(own))
    assert list(tmp_path.iterdir()) == [again], "this process is alive, and may still use it"


@pytest.mark.needs("root")
def test_what_a_dead_agent_of_another_user_left_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    foreign = Path(machine.new_folder(2**22 - 1))
    foreign.mkdir()
    os.chown(foreign, 65533, 65533)
    machine.remove(machine.new_folder(os.getpid()))
    assert foreign.exists()
