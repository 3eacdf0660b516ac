"""Test which command lines with `--debug RANK` are rejected, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.supervisor.test_controller import FakeTransport
from zlaunch import __version__
from zlaunch.cli.main import main
from zlaunch.errors import NodeError
from zlaunch.launchers.ssh import SshLauncher
from zlaunch.plan.options import Launch, Program
from zlaunch.supervisor.nodes import AgentConnection, Node, Rendezvous
from zlaunch.system.machine import Facts


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('ran')\n")


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--debug"], "'train.py' is not a rank; --debug 0 debugs rank 0. accelerate's --debug is --env "),
        (["--debug=2", "--num_gpus=2"], "--debug 2: there is no rank 2 among 2 worker(s)"),
        (["--debug=0", "--detach"], "--debug and --detach cannot be used together: the address"),
        (["--debug=0", "--max_restarts=1"], "--debug and --max_restarts cannot be used together"),
        (["--debug=0", "--no_python"], "--debug and --no_python cannot be used together"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_line_that_cannot_work(
    options: list[str], answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zlaunch.launchers.this_node.has_debugpy", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = "/bin/true" if "--no_python" in options else "train.py"
    assert main([*options, script, "x"]) == 2
    said = capsys.readouterr().err
    assert answer in said and said.count("\n") == 1 and not Path("runs").exists()


def test_without_debugpy_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zlaunch.launchers.this_node.has_debugpy", lambda: False)
    assert main(["--debug=0", "train.py"]) == 2
    assert "--debug needs debugpy: pip install 'zlaunch[debug]'" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert main(["--dry_run", "train.py"]) == 0, "it is needed for --debug alone"


def test_another_host_without_debugpy_is_named_before_workers_start(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n0 slots=1\nn1 slots=1\n")
    options = Launch(
        program=Program("script", "train.py"),
        run_id="id",
        run_dir=str(tmp_path),
        workdir=str(tmp_path),
        hostfile=str(tmp_path / "hosts"),
        debug_rank=1,
    )
    facts = Facts("n", __version__, "3.11.7", ((0,),), (), None, {}, debugpy=True)
    found = [facts, replace(facts, debugpy=False)]
    rendezvous = Rendezvous("n0", 29500, ("", ""))

    def nodes(*about: Facts) -> list[Node]:
        return [Node(AgentConnection(FakeTransport(f"n{index}")), each) for index, each in enumerate(about)]

    launcher = SshLauncher(options, None)
    with pytest.raises(NodeError, match=r"--debug needs debugpy: pip install 'zlaunch\[debug\]'") as caught:
        launcher.plan(nodes(*found), rendezvous, 0)
    assert caught.value.host == "n1"
    plan = launcher.plan(nodes(*reversed(found)), rendezvous, 0)
    assert plan.nodes[1].workers[0].env["ZLAUNCH_DEBUG"] == "n1", "only the rank's node needs it"
