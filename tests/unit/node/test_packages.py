"""Test the list of the workers' packages, and that an agent makes it without waiting for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.limits import LIMIT_S, wait_until
from tests.unit.node.test_agent import Scene, scene  # noqa: F401
from zlaunch.node import agent as module
from zlaunch.node.package_list import PackageList
from zlaunch.node.packages import list_packages


def install(folder: Path, name: str, version: str = "1.0", source: Any = None) -> None:
    """Write the metadata of a package."""
    own = folder / f"{name}-{version}.dist-info"
    own.mkdir(parents=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if source is not None:
        (own / "direct_url.json").write_text(source if isinstance(source, str) else json.dumps(source))


def test_lines_are_what_pip_would_install(tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    install(first, "Zeta_Tools", "2.0")
    install(first, "alpha")
    install(second, "zeta-tools", "1.0")
    commit = {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}
    install(second, "repo", source={"url": "https://h/r", "vcs_info": commit, "subdirectory": "py"})
    install(second, "wheel", source={"url": "file:///w.whl", "archive_info": {}})
    install(second, "mine", source={"url": "file:///src/mine", "dir_info": {"editable": True}})
    install(second, "folder", source={"url": "file:///src/folder", "dir_info": {}})
    for number, damaged in enumerate(("{", "[]", '{"url": 3}')):
        install(second, f"odd{number}", source=damaged)
    (second / "broken-1.0.dist-info").mkdir()
    assert list_packages(metadata.distributions(path=[str(first), str(second)])) == [
        "alpha==1.0",
        "folder @ file:///src/folder",
        "-e /src/mine  # mine==1.0",
        *(f"odd{number}==1.0" for number in range(3)),
        "repo @ git+https://h/r@abc#subdirectory=py",
        "wheel @ file:///w.whl",
        "Zeta_Tools==2.0",
        f"# {second}/broken-1.0.dist-info: its metadata cannot be read",
    ]


def test_the_process_lists_what_its_own_python_imports(tmp_path: Path) -> None:
    install(tmp_path, "only-here", "3.1")
    listing = PackageList({"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}, "/")
    about = wait_until(listing.read, "the list")
    assert listing.pid is not None and listing.fd is not None
    os.waitpid(listing.pid, 0)
    os.close(listing.fd)
    assert (about["python"], about["executable"]) == (sys.version.split()[0], sys.executable)
    assert "only-here==3.1" in about["lines"] and any(line.startswith("click==") for line in about["lines"])


class FakeList:
    """A listing that is a pipe."""

    def __init__(self, env: dict[str, str], cwd: str) -> None:
        self.fd, self.writer = os.pipe()
        self.pid = 20_000_000
        self.killed = 0

    def read(self) -> dict[str, Any] | None:
        return {"lines": [os.read(self.fd, 100).decode()]}

    def kill(self) -> None:
        self.killed += 1
        os.close(self.writer)


def _listing(scene: Scene) -> Any:  # noqa: F811
    return scene.agent.packages


def test_an_agent_sends_the_list(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(module, "PackageList", FakeList)
    scene.tell({"cmd": "packages"})
    before: Any = scene.agent.packages
    assert before is None, "there are no workers yet"
    scene.start()
    scene.said()
    scene.tell({"cmd": "packages"})
    listing = _listing(scene)
    scene.tell({"cmd": "packages"})
    assert _listing(scene) is listing, "once at a time"
    os.write(listing.writer, b"a==1")
    scene.agent.descriptors.wait(LIMIT_S)
    (event,) = scene.said()
    assert (event["type"], event["lines"], listing.fd) == ("packages", ["a==1"], None)


def test_no_run_waits_for_the_list(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(module, "PackageList", FakeList)
    spared: list[Any] = []

    def find(*args: Any, **given: Any) -> list[Any]:
        spared.append(given["spared"])
        return []

    monkeypatch.setattr(module, "run_processes", find)
    scene.start()
    scene.tell({"cmd": "packages"})
    listing: Any = scene.agent.packages
    scene.exit(0)
    assert not listing.killed
    scene.exit(1)
    assert listing.killed == 1
    scene.agent._tick()
    assert spared == [(20_000_000,)], "the kernel may need a while for its end"
    scene.ended.append((20_000_000, signal.SIGKILL))
    scene.agent._reap()
    assert scene.agent.packages is not None and scene.agent.packages.pid is None


def test_the_listing_dies_with_its_agent(tmp_path: Path) -> None:
    """Start the list after its parent has ended."""
    command = [sys.executable, "-m", "zlaunch.node.packages", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
