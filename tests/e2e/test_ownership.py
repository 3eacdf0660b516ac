"""Check that only the run's processes are touched, and that none of them escapes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.helpers import Launch, alive, exists, run
from tests.e2e.test_preload import _broken_torch
from tests.limits import LIMIT_S, wait_until

DAEMON = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open("hidden.tmp", "w") as file: file.write(str(os.getpid()))
os.rename("hidden.tmp", "hidden")
time.sleep(600)
"""
HIDING = """
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "daemon.py"], env={})
time.sleep(600)
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pids_of_the_tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def with_pid(pid: int) -> subprocess.Popen[bytes]:
    """A session leader of somebody else's that happens to get this process id."""
    for _ in range(2000):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if stranger.pid == pid:
            return stranger
        stranger.kill()
        stranger.wait()
    raise AssertionError(f"process id {pid} is not to be had")


@pytest.mark.needs("root", "process ids")
@pytest.mark.parametrize("end", ["by itself", "Ctrl-C", "kill -9 of the agent", "kill -9 of the guard"])
def test_a_stranger_with_the_id_of_a_finished_rank_lives_on(tmp_path: Path, end: str) -> None:
    script = """
        import os, time
        while os.environ["RANK"] == "0" and not os.path.exists("end"): time.sleep(0.02)
    """
    launch = Launch(tmp_path, "--num_gpus=2", script=script)
    pid = launch.worker_pid(1)
    wait_until(lambda: launch.events("exit"), "rank 1 has ended")
    stranger = with_pid(pid)
    try:
        agent = launch.agent_pid()
        if end == "by itself":
            (tmp_path / "end").touch()
        elif end == "Ctrl-C":
            launch.process.send_signal(signal.SIGINT)
        else:
            os.kill(agent if "agent" in end else parent_of(agent), signal.SIGKILL)
        code = launch.wait()
        assert code == {"by itself": 0, "Ctrl-C": 130}.get(end, code) and (code or end == "by itself")
        wait_until(lambda: not exists(agent), "the agent is gone")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def _kill_both(launch: Launch, agent: int) -> None:
    launch.process.kill()
    os.kill(agent, signal.SIGKILL)


KILLED: dict[str, Callable[[Launch, int], None]] = {
    "agent": lambda launch, agent: os.kill(agent, signal.SIGKILL),
    "guard": lambda launch, agent: os.kill(parent_of(agent), signal.SIGKILL),
    "launcher": lambda launch, agent: launch.process.kill(),
    "launcher and agent": _kill_both,
}


@pytest.mark.parametrize("killed", KILLED)
def test_a_daemon_without_environment_does_not_survive_a_kill(tmp_path: Path, killed: str) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    launch = Launch(tmp_path, "--num_gpus=1", script=HIDING)
    wait_until((tmp_path / "hidden").exists, "the daemon hides")
    daemon, agent = int((tmp_path / "hidden").read_text()), launch.agent_pid()
    guard = parent_of(agent)
    run_id = launch.run_id
    assert exists(daemon) and daemon not in alive(run_id)
    KILLED[killed](launch, agent)
    assert launch.wait() != 0
    wait_until(lambda: not any(map(exists, (daemon, agent, guard))), "daemon, agent and guard are gone")
    wait_until(lambda: not alive(run_id), "nothing is left")


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("frozen", ["agent", "agent and guard", "everything"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_frozen_agent_does_not_hold_up_a_stop(tmp_path: Path, frozen: str, signum: int) -> None:
    script = "import time\nprint('up', flush=True)\ntime.sleep(600)"
    launch = Launch(tmp_path, "--num_gpus=2", "--grace=1", script=script)
    wait_until(lambda: launch.out == "up\n", "the worker is up")
    agent = launch.agent_pid()
    tree = pids_of_the_tree(parent_of(agent))
    run_id = launch.run_id
    for pid in {"agent": [agent], "agent and guard": [parent_of(agent), agent]}.get(frozen, tree):
        os.kill(pid, signal.SIGSTOP)
    launch.process.send_signal(signum)
    assert launch.wait() == 128 + signum
    assert "did not stop in time" in launch.events("lost")[0]["why"]
    wait_until(lambda: not alive(run_id) and not any(map(exists, tree)), "nothing is left")


@pytest.mark.rotated
def test_when_a_fork_of_the_preloader_fails_no_rank_runs_twice(tmp_path: Path) -> None:
    """The second fork fails, as with EAGAIN: the first worker must not have begun."""
    act = """
    real, count = os.fork, [0]
    def fork():
        count[0] += 1
        if count[0] == 2: ACT
        return real()
    os.fork = fork
    """
    for what in ("raise BlockingIOError(11, 'Resource temporarily unavailable')", "os.kill(os.getpid(), 9)"):
        folder = tmp_path / what[:5]
        folder.mkdir()
        lines = [
            line.strip() if not line.startswith("     ") else line[4:] for line in act.splitlines() if line
        ]
        body = "\n        ".join(line for line in lines if line.strip()).replace("ACT", what)
        env = _broken_torch(folder, body)
        script = "import os, torch\nopen(os.environ['RANK'] + '.' + str(os.getpid()), 'w').close()"
        launch = run(folder, "--num_gpus=3", script=script, env=env)
        assert launch.process.returncode == 0, launch.err
        assert sorted(path.name[0] for path in folder.glob("[0-2].*")) == ["0", "1", "2"], launch.err
        assert "each starts by itself" in launch.err


def test_an_agent_without_a_plan_ends(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-m", "zlaunch.node.agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(b'{"cmd": "hello", "idle_s": 0.5}\n')
    agent.stdin.flush()
    assert b'"hello"' in agent.stdout.readline()
    assert agent.wait(LIMIT_S) == 0
    agent.stdin.close()
    agent.stdout.close()
