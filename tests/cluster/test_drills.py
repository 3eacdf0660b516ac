"""Check that a run ends, says why, and leaves nothing on any node, whatever is killed, cut or rebooted.

Where a node answers, the heartbeat must not be needed: it is longer than a test waits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.helpers import BUSY, SILENT, agent_of, await_ready, pid_of, start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch, alive
from tests.limits import FOR_EVER_S, wait_until

HEARTBEAT_S = 5.0
PATIENT = f"--heartbeat={FOR_EVER_S}"
SCRIPTS = pytest.mark.parametrize(
    "script", [SILENT, pytest.param(BUSY, marks=pytest.mark.exhaustive)], ids=["silent", "busy"]
)


def _gone(cluster: Testbed) -> None:
    wait_until(lambda: not cluster.processes(), lambda: f"nodes empty, not {cluster.processes()}")


def _kill_on(cluster: Testbed, host: str, pid: int) -> None:
    assert cluster.enter(host, "kill", "-9", str(pid)).returncode == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["ssh", "slurm"])
@SCRIPTS
def test_a_worker_is_killed(cluster: Testbed, tmp_path: Path, script: str, by: str) -> None:
    launch = start(cluster, tmp_path, PATIENT, by=by, script=script)
    await_ready(launch)
    host, pid = pid_of(launch, 3)
    assert host == "n2"
    _kill_on(cluster, host, pid)
    assert launch.wait() == 137, launch.err
    assert "rank 3 on n2 failed first: it was killed by SIGKILL" in launch.err
    _gone(cluster)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["ssh", "slurm"])
def test_an_agent_is_killed(cluster: Testbed, tmp_path: Path, by: str) -> None:
    launch = start(cluster, tmp_path, PATIENT, by=by, script=SILENT)
    await_ready(launch)
    _kill_on(cluster, "n2", agent_of(launch, "n2"))
    assert launch.wait() != 0
    assert "agent on n2 died" in launch.err
    _gone(cluster)


def _kill_launcher(launch: Launch) -> None:
    launch.process.kill()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _kill_group(launch: Launch) -> None:
    """Also salloc, which gives its command a process group of its own."""
    for pid in (launch.process.pid, *_children(launch.process.pid)):
        try:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


def _kill_zlaunch_in_job(launch: Launch) -> None:
    os.kill(_children(launch.process.pid)[0], signal.SIGKILL)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("by", "act"),
    [
        ("ssh", _kill_launcher),
        ("ssh", _kill_group),
        ("slurm", _kill_zlaunch_in_job),
        ("slurm", _kill_group),
    ],
)
def test_the_launcher_is_killed(
    cluster: Testbed, tmp_path: Path, by: str, act: Callable[[Launch], None]
) -> None:
    launch = start(cluster, tmp_path, PATIENT, by=by, script=SILENT)
    await_ready(launch)
    run_id = launch.run_id
    act(launch)
    _gone(cluster)
    wait_until(lambda: not alive(run_id), "nothing of the run anywhere")
    launch.wait()


@pytest.mark.exhaustive
@SCRIPTS
def test_a_node_is_cut_off(cluster: Testbed, tmp_path: Path, script: str) -> None:
    launch = start(cluster, tmp_path, f"--heartbeat={HEARTBEAT_S}", script=script)
    await_ready(launch)
    cluster.cut("n3")
    try:
        assert launch.wait() == 1, launch.err
        assert "n3 fell silent" in launch.err, launch.err
        _gone(cluster)  # also on n3, which nobody can reach
    finally:
        cluster.heal("n3")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@SCRIPTS
def test_a_node_is_rebooted(cluster: Testbed, tmp_path: Path, script: str, hard: bool) -> None:
    launch = start(cluster, tmp_path, f"--heartbeat={HEARTBEAT_S}", script=script)
    await_ready(launch)
    cluster.reboot("n2", hard=hard)
    try:
        assert launch.wait() != 0
        assert "n2" in launch.err and ("died" in launch.err or "silent" in launch.err), launch.err
        _gone(cluster)
    finally:
        cluster.await_nodes()


@pytest.mark.rotated
def test_ctrl_c_while_running(cluster: Testbed, tmp_path: Path) -> None:
    launch = start(cluster, tmp_path, PATIENT, script=SILENT)
    await_ready(launch)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    assert "stopped by SIGINT" in launch.err
    _gone(cluster)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.4])
def test_ctrl_c_during_start(cluster: Testbed, tmp_path: Path, delay_s: float) -> None:
    launch = start(cluster, tmp_path, PATIENT, script=SILENT)
    wait_until(launch.run_dir.exists, "the launch has come to its nodes")
    time.sleep(delay_s)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() in (130, -2), launch.err
    assert "Traceback" not in launch.err
    _gone(cluster)


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_ctrl_c_during_a_start_behind_an_ampersand(cluster: Testbed, tmp_path: Path, delay_s: float) -> None:
    """A shell script starts what stands before an `&` with SIGINT ignored."""
    prefix = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    launch = start(cluster, tmp_path, PATIENT, script=SILENT, prefix=prefix)
    wait_until(launch.run_dir.exists, "the launch has come to its nodes")
    time.sleep(delay_s)
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130, launch.err
    _gone(cluster)


@pytest.mark.exhaustive
def test_fifty_milliseconds_of_latency(cluster: Testbed, tmp_path: Path) -> None:
    with cluster.latency("n2", 25):
        launch = start(cluster, tmp_path, f"--heartbeat={HEARTBEAT_S}", script=SILENT)
        await_ready(launch)
        time.sleep(HEARTBEAT_S + 1)
        assert launch.process.poll() is None
        _kill_on(cluster, "n2", pid_of(launch, 3)[1])
        assert launch.wait() == 137, launch.err
        assert "rank 3 on n2 failed first" in launch.err


@pytest.mark.exhaustive
def test_two_jobs_at_once(cluster: Testbed, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    stays = """
        import os, time
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.1)
    """
    first = start(cluster, folders[0], script=SILENT)
    second = start(cluster, folders[1], script=stays)
    await_ready(first)
    await_ready(second)
    first.process.kill()
    wait_until(lambda: not alive(first.run_id), "the first one gone")
    assert len({e["pid"] for e in second.events("spawn")}) and second.process.poll() is None
    (folders[1] / "go").touch()
    assert second.wait() == 0, second.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_launches_leave_nothing(cluster: Testbed, tmp_path: Path, count: int) -> None:
    temporary = tmp_path / "temporary"  # of these launches alone: other tests run beside this one
    temporary.mkdir()
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        launch = start(cluster, folder, "--quiet", script="print('hello')", env={"TMPDIR": str(temporary)})
        assert launch.wait() == 0, launch.err
    _gone(cluster)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("count", [pytest.param(12, marks=pytest.mark.exhaustive)])
def test_random_kills_leave_nothing(cluster: Testbed, count: int) -> None:
    """Does what `python -m tests.drills cluster --seed 1` does."""
    from tests.cluster.drills import one

    for number in range(count):
        one(cluster, 1, number)


@pytest.mark.exhaustive
def test_random_losses_with_a_spare(cluster: Testbed) -> None:
    """Does what `python -m tests.drills spares --seed 1` does."""
    from tests.cluster.spare_drills import one

    for number in range(8):
        one(cluster, 1, number)
