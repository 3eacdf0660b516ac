"""Check that no process of a run is left, whatever is killed, and that the exit code tells why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.helpers import Launch, alive, exists, run
from tests.limits import FOR_EVER_S, LIMIT_S, wait_until

STUBBORN = """
    import os, signal, sys, time

    def child(*steps):
        if os.fork():
            return
        for step in steps:
            step()
        with open(f"pid.{os.getpid()}", "w"):
            pass
        time.sleep(600)
        os._exit(0)

    def fork_again():
        if os.fork():
            os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child()
    child(os.setsid)
    child(os.setsid, fork_again)
    child(lambda: os.close(1), lambda: os.close(2), os.setsid, fork_again)
    while len([name for name in os.listdir() if name.startswith("pid.")]) < 4 * int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    open("ready." + os.environ["RANK"], "w").close()
    print("ready", flush=True)
    time.sleep(600)
"""


def kill_worker(launch: Launch) -> None:
    os.kill(launch.worker_pid(1), signal.SIGKILL)


def kill_agent(launch: Launch) -> None:
    os.kill(launch.agent_pid(), signal.SIGKILL)


def kill_launcher(launch: Launch) -> None:
    launch.process.kill()


def kill_launcher_and_agent(launch: Launch) -> None:
    agent = launch.agent_pid()
    launch.process.kill()
    os.kill(agent, signal.SIGKILL)


def kill_all_by_name(launch: Launch) -> None:
    """What `pkill -9 -f zlaunch` would hit of this run's own machinery."""
    agent = launch.agent_pid()
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    named = [pid for pid in children if b"zlaunch.node.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    launch.process.kill()
    for pid in (agent, *map(int, named)):
        os.kill(pid, signal.SIGKILL)


def send(signum: int) -> Callable[[Launch], None]:
    return lambda launch: launch.process.send_signal(signum)


def terminate_agent(launch: Launch) -> None:
    os.kill(launch.agent_pid(), signal.SIGTERM)


DRILLS = {
    "worker": (kill_worker, 137),
    "agent": (kill_agent, 137),
    "launcher": (kill_launcher, -9),
    "launcher and agent": (kill_launcher_and_agent, -9),
    "all of ours by name": (kill_all_by_name, -9),
    "Ctrl-C": (send(signal.SIGINT), 130),
    "SIGTERM": (send(signal.SIGTERM), 143),
    "SIGHUP": (send(signal.SIGHUP), 129),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drill", DRILLS)
def test_stubborn_workers_and_their_grandchildren_are_gone(tmp_path: Path, drill: str) -> None:
    """The workers ignore SIGTERM and have children in their group, in new sessions, and orphaned."""
    act, code = DRILLS[drill]
    launch = Launch(tmp_path, "--num_gpus=2", script=STUBBORN)
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "workers ready")
    run_id, agent = launch.run_id, launch.agent_pid()
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    everyone = {agent, *map(int, children), *alive(run_id)}
    assert len(alive(run_id)) == 10

    act(launch)
    assert launch.wait() == code, launch.err
    wait_until(lambda: not alive(run_id), "all processes of the run gone")
    wait_until(lambda: not any(map(exists, everyone)), "agent and guard gone")
    if drill == "worker":
        assert "rank 1 on localhost failed first" in launch.err and "SIGKILL" in launch.err
    if drill == "agent":
        assert "agent on localhost died (SIGKILL)" in launch.err


def test_a_daemon_that_hides_is_found_as_a_descendant(tmp_path: Path) -> None:
    """Cleared environment, own session, orphaned: only the agent's adoption knows it."""
    (tmp_path / "daemon.py").write_text(
        "import os, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "with open('hidden.tmp', 'w') as file: file.write(str(os.getpid()))\n"
        "os.rename('hidden.tmp', 'hidden')\n"
        "time.sleep(600)\n"
    )
    script = """
        import os, subprocess, sys, time
        subprocess.run([sys.executable, "-S", "daemon.py"], env={})
        while not os.path.exists("hidden"): time.sleep(0.01)
        sys.exit(int(sys.argv[1]))
    """
    for code in (0, 5):
        launch = run(tmp_path, "--no_local_rank", "--grace=0.5", script=script, args=(str(code),))
        assert launch.process.returncode == code, launch.err
        assert not exists(int((tmp_path / "hidden").read_text()))
        (tmp_path / "hidden").unlink()


@pytest.mark.parametrize("code", [0, 4])
def test_helpers_left_by_finished_workers_are_swept(tmp_path: Path, code: int) -> None:
    script = f"""
        import subprocess, sys
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("bye", flush=True)
        sys.exit({code})
    """
    launch = run(tmp_path, "--num_gpus=2", script=script)
    assert launch.process.returncode == code, launch.err
    assert not alive(launch.run_id)


def test_ctrl_c_in_a_terminal_reaches_the_group_and_ends_at_once(tmp_path: Path) -> None:
    """The terminal signals the whole group; polite workers end without the grace period."""
    script = "import time; print('up', flush=True); time.sleep(600)"
    launch = Launch(tmp_path, f"--grace={FOR_EVER_S}", "--num_gpus=2", script=script)
    wait_until(lambda: "up" in launch.out, "workers up")
    os.killpg(launch.process.pid, signal.SIGINT)
    assert launch.wait() == 130
    assert not alive(launch.run_id) and "stopped by SIGINT" in launch.err


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    launch = Launch(tmp_path, f"--grace={FOR_EVER_S}", "--num_gpus=2", script=STUBBORN)
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "workers ready")
    launch.process.send_signal(signal.SIGINT)
    wait_until(lambda: launch.events("stopping"), "stop begun")
    time.sleep(0.5)  # closer together they would count as one
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    wait_until(lambda: not alive(launch.run_id), "all gone")


def test_workers_may_save_in_the_grace_period(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        def save(*_):
            time.sleep(0.3)
            open("saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(600)
    """
    launch = Launch(tmp_path, script=script)
    wait_until(lambda: "up" in launch.out, "worker up")
    launch.process.terminate()
    assert launch.wait() == 143
    assert (tmp_path / "saved").exists()


def test_a_stopped_worker_is_ended_too(tmp_path: Path) -> None:
    launch = Launch(tmp_path, script="import time; print('up', flush=True); time.sleep(600)")
    wait_until(lambda: "up" in launch.out, "worker up")
    os.kill(launch.worker_pid(0), signal.SIGSTOP)
    launch.process.terminate()
    assert launch.wait() == 143
    assert not alive(launch.run_id)


def test_an_agent_that_is_asked_to_end_stops_the_run(tmp_path: Path) -> None:
    launch = Launch(tmp_path, script="import time; print('up', flush=True); time.sleep(600)")
    wait_until(lambda: "up" in launch.out, "worker up")
    terminate_agent(launch)
    assert launch.wait() == 143
    assert "the agent got SIGTERM" in launch.err and not alive(launch.run_id)


def test_a_noisy_run_ends_though_nobody_reads(tmp_path: Path) -> None:
    """The launcher's own stdout is a full pipe; a stop must not wait for its reader."""
    (tmp_path / "w.py").write_text("import os\nwhile True: os.write(1, b'x' * 65536)\n")
    launch = Launch(tmp_path, "--dry_run", "--json", "w.py")
    assert launch.wait() == 0
    reader, writer = os.pipe()
    command = [*launch.process.args[:3], f"--run_dir={tmp_path / 'run'}", "w.py"]  # type: ignore[index]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.DEVNULL, env=env, start_new_session=True
    )
    os.close(writer)
    wait_until(lambda: launch.events("spawn"), "worker started")
    run_id = launch.run_id
    process.terminate()
    wait_until(lambda: not alive(run_id), "workers gone")
    os.close(reader)
    assert process.wait(LIMIT_S) == 143


@pytest.mark.parametrize("numbers", [range(12), pytest.param(range(12, 72), marks=pytest.mark.exhaustive)])
def test_random_kills_leave_nothing(numbers: range) -> None:
    """Does what `python -m tests.drills kill --seed 1` does."""
    from tests.drills import local, many

    assert many(local, 1, numbers, parallel=2) == []


@pytest.mark.exhaustive  # tests/e2e/test_queue.py, test_detach.py and test_in_memory.py have shorter ones
@pytest.mark.parametrize("kind", ["queue", "detached", "restarts"])
def test_random_kills_of_queued_detached_and_restarting_runs(kind: str) -> None:
    """Does what `python -m tests.drills KIND --seed 1` does."""
    from tests.drills import many
    from tests.queue_drills import queued
    from tests.run_drills import detached, restarted

    drills = {"queue": queued, "detached": detached, "restarts": restarted}
    assert many(drills[kind], 1, range(20), parallel=1) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_launches_in_a_row(count: int) -> None:
    from tests.drills import launched, many

    assert many(launched, 1, range(count), parallel=2) == []
