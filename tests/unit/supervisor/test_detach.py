"""Test what a user is told whose processes systemd ends at logout."""

from __future__ import annotations

import pytest

from zlaunch.supervisor.detach import advice

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n"


@pytest.mark.parametrize(
    ("cgroup", "kills", "lingers", "words"),
    [
        (SESSION, True, False, ("enable-linger", "systemd-run --user --scope")),
        (SESSION, True, True, ("KillUserProcesses", "systemd-run --user --scope")),
        (SESSION, False, False, ()),
        (MANAGER, True, False, ("enable-linger",)),
        (MANAGER, True, True, ()),
        ("0::/system.slice/sshd.service\n", True, False, ()),
        ("0::/\n", True, False, ()),
    ],
)
def test_advice(cgroup: str, kills: bool, lingers: bool, words: tuple[str, ...]) -> None:
    said = advice(cgroup, kills=kills, lingers=lingers)
    assert (said is None) == (not words)
    for word in words:
        assert said is not None and word in said
