"""Test users whom neither HOME nor /etc/passwd knows, as in containers."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zlaunch.errors import LaunchError, NodeError
from zlaunch.plan.options import requested_env
from zlaunch.queue.daemon import queue_folder
from zlaunch.system.user import home, user_name
from zlaunch.transports import ssh


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make this process's user one that nothing knows."""

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_such_a_user_has_a_number_for_a_name_and_no_home() -> None:
    assert user_name() == str(os.getuid()) and home() is None


def test_variables_come_from_the_current_folder_alone(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    assert requested_env({}) == {"A": "1"}


def test_the_queue_s_folder_lies_among_the_temporary_files_and_is_private(tmp_path: Path) -> None:
    folder = queue_folder({})
    assert folder.is_relative_to(tmp_path / f"zlaunch-{os.getuid()}") and folder.is_dir()
    assert (tmp_path / f"zlaunch-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    (tmp_path / f"zlaunch-{os.getuid()}").chmod(0o777)
    with pytest.raises(LaunchError, match="XDG_STATE_HOME"):
        queue_folder({})


def test_hosts_are_reached_by_paramiko_s_reader_or_ssh_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ssh.resolve("n1").user == str(os.getuid())
    said = SimpleNamespace(returncode=255, stdout="", stderr="No user exists for uid 4242\n")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/ssh")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    with pytest.raises(NodeError, match="ssh needs an entry for you in /etc/passwd: No user exists"):
        ssh.resolve("n1")
