"""Test who may see the pages."""

from __future__ import annotations

import pytest

from zlaunch.ui.access import PageAccess, is_loopback


def test_the_token() -> None:
    access, other = PageAccess(80), PageAccess(80)
    assert len(access.token) >= 32 and access.token != other.token
    assert access.holds(access.token)
    for wrong in ("", other.token, access.token[:-1], access.token + "x", "é", "\udcff"):
        assert not access.holds(wrong)
    assert PageAccess(81).cookie != access.cookie, "browsers send a cookie to every port"


@pytest.mark.parametrize("header", ["127.0.0.1:80", "localhost", "LOCALHOST:99", "[::1]:80", "10.0.0.7:80"])
def test_names_of_this_machine(header: str) -> None:
    assert PageAccess(80).knows(header)


@pytest.mark.parametrize(
    "header",
    ["", "evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "a:b:c"],
)
def test_names_that_somebody_else_points_here(header: str) -> None:
    assert not PageAccess(80).knows(header)


def test_the_machines_name_only_where_others_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "login1")
    monkeypatch.setattr("socket.getfqdn", lambda: "login1.cluster")
    assert not PageAccess(80).knows("login1:80")
    remote = PageAccess(80, "0.0.0.0")
    assert remote.knows("login1:80") and remote.knows("login1.cluster") and not remote.knows("evil.example")


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.7", "login1", "")))
