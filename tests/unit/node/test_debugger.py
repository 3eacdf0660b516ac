"""Test where a worker listens for a debugger, and that no timeout of torch.distributed is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zlaunch.node import debugger

OWN = {"eth0": ("10.0.0.1", "10.0.0.2"), "ib0": ("192.168.1.1",)}


class FakeDebugpy(ModuleType):
    """Notes the calls; its port is the one that was asked for, or 1 for a free one."""

    calls: list[Any]

    def listen(self, address: tuple[str, int]) -> tuple[str, int]:
        self.calls.append(address)
        return address[0], address[1] or 1

    def wait_for_client(self) -> None:
        self.calls.append("waited")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDebugpy]:
    module = FakeDebugpy("debugpy")
    module.calls = []
    monkeypatch.setitem(sys.modules, "debugpy", module)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr("zlaunch.system.network.interface_addresses", lambda: OWN)
    monkeypatch.setattr(debugger, "_free_port", lambda address: 5678)
    yield module


def reports(host: str) -> list[dict[str, Any]]:
    reader, writer = os.pipe()
    debugger.await_client(host, writer)
    os.close(writer)
    with os.fdopen(reader) as file:
        return [json.loads(line) for line in file]


def test_the_launcher_hears_before_and_after_the_wait(fake: FakeDebugpy) -> None:
    waits, attached = reports("localhost")
    assert fake.calls == [("127.0.0.1", 5678), "waited"]
    assert (waits["type"], waits["rank"], waits["attached"]) == ("debugger", 3, False)
    assert (waits["address"], waits["port"]) == ("127.0.0.1", 5678) and attached["attached"] is True


@pytest.mark.parametrize(
    ("asked", "named", "address"),
    [
        ("10.9.9.9 50000 10.0.0.2 22", ["192.168.1.1"], "10.0.0.2"),
        ("10.9.9.9 50000 172.16.0.1 22", ["127.0.1.1", "192.168.1.1"], "192.168.1.1"),
        ("", ["192.168.1.1"], "192.168.1.1"),
        ("", [], "10.0.0.1"),
    ],
    ids=["as sshd was asked", "srun from a session of ssh", "by its name", "any of its own"],
)
def test_the_address_on_another_host(
    fake: FakeDebugpy, monkeypatch: pytest.MonkeyPatch, asked: str, named: list[str], address: str
) -> None:
    def resolve(host: str, *_args: Any, **_more: Any) -> list[Any]:
        assert host == "node7"
        if not named:
            raise socket.gaierror("no such host")
        return [(0, 0, 0, "", (each, 0)) for each in named]

    monkeypatch.setenv("SSH_CONNECTION", asked)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert reports("node7")[0]["address"] == address


def test_a_port_that_another_process_has_is_left_to_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        before = debugger._USUAL_PORT
        try:
            debugger._USUAL_PORT = taken.getsockname()[1]
            assert debugger._free_port("127.0.0.1") == 0
        finally:
            debugger._USUAL_PORT = before


def test_groups_have_no_short_timeout_whatever_the_script_asks_for(tmp_path: Path) -> None:
    """A package with the functions of torch.distributed, imported as torch is."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("from . import distributed\n")
    (package / "__init__.py").write_text("from .distributed_c10d import *\n")
    (package / "distributed_c10d.py").write_text(
        "def init_process_group(backend=None, timeout=None): return backend, timeout\n"
        "def new_group(ranks=None, timeout=None): return ranks, timeout\n"
        "def split_group(parent=None, timeout=None): return parent, timeout\n"
    )
    script = """
import sys
from zlaunch.node.debugger import lift_timeouts
before = list(sys.meta_path)
lift_timeouts()
import torch.distributed as dist
from torch.distributed import distributed_c10d
made = dist.init_process_group("gloo", 1), dist.new_group([0]), dist.split_group(timeout=2)
assert distributed_c10d.new_group is dist.new_group and sys.meta_path == before
print(*(f"{each[0]} {each[1].days}" for each in made), sep=", ")
"""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(root)))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "gloo 20, [0] 20, None 20\n", done.stderr
