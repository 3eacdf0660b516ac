"""Test launches under what networks, ssh configurations and SLURM do to them unplanned."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.helpers import SILENT, agent_of, await_ready, pid_of, start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import ROOT, Launch
from tests.limits import LIMIT_S, wait_until

NOISY = """
    import os
    print("ready", os.environ["RANK"], flush=True)
    while True:
        print("x" * 1000, flush=True)
"""


def _gone(cluster: Testbed) -> None:
    wait_until(lambda: not cluster.processes(), lambda: f"nodes empty: {cluster.processes()}")


@pytest.mark.exhaustive
def test_a_noisy_node_that_is_cut_off_keeps_nothing(cluster: Testbed, tmp_path: Path) -> None:
    launch = start(cluster, tmp_path, "--heartbeat=3", "--grace=1", script=NOISY)
    await_ready(launch)
    cluster.cut("n3")
    try:
        assert launch.wait() == 1
        wait_until(lambda: not cluster.processes("n3"), lambda: f"n3 empty: {cluster.processes('n3')}")
    finally:
        cluster.heal("n3")


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["ssh", "agent"])
def test_a_host_that_hangs_is_named_in_time(cluster: Testbed, tmp_path: Path, first: str) -> None:
    """An sshd that stops answering right after the login; an agent that never says who it is."""
    config = tmp_path / "config"
    config.write_text(cluster.ssh_config.read_text())
    options = [f"--hostfile={cluster.hostfile}", f"--ssh_config={config}", "--connect_timeout=10"]
    if first == "agent":
        (tmp_path / "python").write_text(
            f'#!/bin/sh\n[ "$(hostname)" = n2 ] && exec sleep 600\nexec {sys.executable} "$@"\n'
        )
        (tmp_path / "python").chmod(0o755)
        options.append(f"--remote_python={tmp_path / 'python'}")
    ended = threading.Event()
    stopped: set[str] = set()

    def stop_sessions() -> None:
        """Freeze every sshd of n2 but the one that listens, as soon as somebody has logged in."""
        while not ended.wait(0.005):
            for text in cluster.enter("n2", "pgrep", "-f", r"sshd: .*@notty|sshd: .*\[priv\]").stdout.split():
                cluster.enter("n2", "kill", "-STOP", text)
                stopped.add(text)

    freezer = threading.Thread(target=stop_sessions)
    if first == "ssh":
        freezer.start()
    try:
        launch = Launch(tmp_path, *options, script=SILENT)
        assert launch.wait() == 2, launch.err
    finally:
        ended.set()
        if first == "ssh":
            freezer.join()
            # By its number: sshd's child may have become the agent between pgrep and kill.
            cluster.enter("n2", "kill", "-CONT", *stopped)
            cluster.enter("n2", "pkill", "-KILL", "-f", r"sshd: .*@notty|sshd: .*\[priv\]")
    assert "n2" in launch.err and "within" in launch.err, launch.err
    assert "waiting for n2" in launch.err, launch.err
    cluster.enter("n2", "pkill", "sleep")
    _gone(cluster)


@pytest.mark.rotated
def test_what_only_openssh_can_do(cluster: Testbed, tmp_path: Path) -> None:
    """Tokens in ProxyCommand and IdentityFile, HostKeyAlias: the ssh program is taken by itself."""
    (tmp_path / f"key-{cluster.address('n2')}").write_bytes((cluster.folder / "key").read_bytes())
    (tmp_path / f"key-{cluster.address('n2')}").chmod(0o600)
    known = cluster.known_hosts.read_text().replace(f"{cluster.address('n2')} ", "second ")
    (tmp_path / "known").write_text(known)
    block = (
        f"Host inner2\n  HostName {cluster.address('n2')}\n  HostKeyAlias second\n"
        f"  UserKnownHostsFile {tmp_path}/known\n  IdentityFile {tmp_path}/key-%h\n"
        f"Host inner3\n  HostName {cluster.address('n3')}\n"
        f"  ProxyCommand ssh -F {cluster.ssh_config} -W %h:%p n1\n"
    )
    (tmp_path / "config").write_text(block + cluster.ssh_config.read_text())
    (tmp_path / "hosts").write_text("inner[2-3] slots=1\n")
    options = (f"--hostfile={tmp_path / 'hosts'}", f"--ssh_config={tmp_path / 'config'}", "--no_local_rank")
    script = "import os, socket; print(socket.gethostname(), os.environ['SSH_CONNECTION'].split()[0])"
    launch = Launch(tmp_path, *options, script=script)
    assert launch.wait() == 0, launch.err
    assert launch.log(0).split()[0] == "n2"
    assert launch.log(1).split() == ["n3", cluster.address("n1")]


@pytest.mark.exhaustive
def test_the_ssh_program_as_a_launcher(cluster: Testbed, tmp_path: Path) -> None:
    launch = start(cluster, tmp_path, "--launcher=openssh", script=SILENT)
    await_ready(launch)
    host, pid = pid_of(launch, 4)
    cluster.enter(host, "kill", "-KILL", str(pid))
    assert launch.wait() == 137, launch.err
    assert "rank 4 on n3 failed first" in launch.err
    _gone(cluster)
    refused = start(cluster, tmp_path, "--launcher=openssh", "--remote_python=/nowhere/python", script="pass")
    assert refused.wait() == 2 and "no such Python" in refused.err, refused.err
    (tmp_path / "hosts").write_text("nowhere slots=1\nn1 slots=1\n")
    options = (f"--hostfile={tmp_path / 'hosts'}", f"--ssh_config={cluster.ssh_config}", "--launcher=openssh")
    unknown = Launch(tmp_path, *options, script="pass")
    assert unknown.wait() == 2 and "nowhere: ssh: " in unknown.err, unknown.err


@pytest.mark.exhaustive
def test_the_cause_is_found_on_the_slowest_node(cluster: Testbed, tmp_path: Path) -> None:
    """The ranks that only lost a peer are heard first, and all of their node's at once."""
    script = """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        print("ready", flush=True)
        if os.environ["RANK"] == "5":
            while not os.path.exists("go"): time.sleep(0.05)
            os._exit(9)
        dist.all_reduce(torch.ones(1))
    """
    with cluster.latency("n3", 150):
        launch = start(cluster, tmp_path, "--grace=1", script=script)
        await_ready(launch)
        (tmp_path / "go").touch()
        assert launch.wait() == 9, launch.err
        assert "rank 5 on n3 failed first: it exited with code 9" in launch.err, launch.err


@pytest.mark.rotated
def test_a_clock_that_is_wrong_names_nobody(cluster: Testbed, tmp_path: Path) -> None:
    """Reports are ordered by when the launcher hears them; here n1's say that they are a day old."""
    script = """
        import os, time
        if os.environ["RANK"] == "0":
            real = time.time
            time.time = lambda: real() - 86400
        print("ready", flush=True)
        while not os.path.exists("go"): time.sleep(0.02)
        if os.environ["RANK"] == "4": raise ValueError("first")
        time.sleep(0.5)
        if os.environ["RANK"] == "0": raise ValueError("second")
        time.sleep(600)
    """
    launch = start(cluster, tmp_path, "--grace=3", script=script)
    await_ready(launch)
    (tmp_path / "go").touch()
    assert launch.wait() == 1
    assert "rank 4 on n3 failed first" in launch.err, launch.err


@pytest.mark.exhaustive
def test_ctrl_z_is_no_end(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os, time
        print("ready", flush=True)
        while not os.path.exists("go"): time.sleep(0.05)
    """
    launch = start(cluster, tmp_path, "--heartbeat=2", script=script)
    await_ready(launch)
    launch.process.send_signal(signal.SIGTSTP)
    time.sleep(8)  # four times as long as the nodes would otherwise wait
    launch.process.send_signal(signal.SIGCONT)
    time.sleep(3)
    assert launch.process.poll() is None, launch.err
    (tmp_path / "go").touch()
    assert launch.wait() == 0, launch.err


def test_the_port_that_was_asked_for_on_a_single_host(cluster: Testbed, tmp_path: Path) -> None:
    script = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    options = ("--include=n2:0", "--master_port=23471", f"--master_addr={cluster.address('n2')}")
    launch = start(cluster, tmp_path, *options, script=script)
    assert launch.wait() == 0, launch.err
    assert launch.log(0).split() == [cluster.address("n2"), "23471"]


def test_a_job_that_asks_for_gpus_per_task(cluster: Testbed, tmp_path: Path) -> None:
    script = "import os; print(os.environ['LOCAL_WORLD_SIZE'], os.environ.get('CUDA_VISIBLE_DEVICES'))"
    prefix = ("salloc", "--quiet", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1")
    launch = Launch(tmp_path, "--no_local_rank", prefix=prefix, env=cluster.env(), script=script)
    assert launch.wait() == 0, launch.err
    assert len(launch.events("spawn")) == 4, launch.err
    assert {launch.log(rank).split()[0] for rank in range(4)} == {"2"}


@pytest.mark.rotated
def test_a_shell_of_srun(cluster: Testbed, tmp_path: Path) -> None:
    """Only the first task of `srun --pty` is a shell: zlaunch there is not one task among several."""
    (tmp_path / "worker.py").write_text("import os; open('w.' + os.environ['RANK'], 'w').close()")
    inner = f"cd {tmp_path} && {sys.executable} -m zlaunch --num_gpus=1 --no_local_rank worker.py"
    command = ["srun", "-N2", "--ntasks-per-node=1", "--pty", "bash", "-c", inner]
    env = {**cluster.env(), "PYTHONPATH": str(ROOT)}
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command, env=env, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    said = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(controller, 4096):
                said.extend(chunk)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert process.wait(LIMIT_S) == 0, said.decode()
    finally:
        process.kill()
        reader.join(10)
        os.close(controller)
    assert sorted(path.name for path in tmp_path.glob("w.*")) == ["w.0", "w.1"], said.decode()


@pytest.mark.rotated
def test_a_task_whose_zlaunch_is_killed_ends_the_step(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os, time
        open("ready." + os.environ["RANK"], "w").close()
        time.sleep(600)
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(script))
    command = ["srun", "-N3", "--ntasks-per-node=1", "--gres=gpu:2", "-D", str(tmp_path)]
    command += [sys.executable, "-m", "zlaunch", "--no_local_rank", "worker.py"]
    process = subprocess.Popen(command, env=cluster.env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 6, "all workers are up")
        (pid,) = (line for line in cluster.enter("n2", "pgrep", "-f", "m zlaunch --no_local").stdout.split())
        cluster.enter("n2", "kill", "-KILL", pid)
        assert process.wait(LIMIT_S) != 0
        _gone(cluster)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("command", "states", "words"),
    [
        ("scancel", ("CANCELLED", "COMPLETING", ""), "was cancelled and is not requeued"),
        ("scontrol requeue", ("PENDING",), "SLURM has requeued job"),
    ],
)
def test_what_has_become_of_a_job_that_was_ended(
    cluster: Testbed, tmp_path: Path, command: str, states: tuple[str, ...], words: str
) -> None:
    (tmp_path / "worker.py").write_text("import time\nopen('ready', 'w').close()\ntime.sleep(600)")
    (tmp_path / "job.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH -N2 --requeue --output={tmp_path}/out\n"
        f"exec {sys.executable} -m zlaunch --requeue --grace=1 --num_gpus=1 --no_local_rank worker.py\n"
    )
    submit = ["sbatch", "--parsable", "--chdir", str(tmp_path), str(tmp_path / "job.sbatch")]
    job = subprocess.run(submit, env=cluster.env(), capture_output=True, text=True, check=True).stdout.strip()

    def state() -> str:
        command = ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]
        return subprocess.run(command, env=cluster.env(), capture_output=True, text=True).stdout.strip()

    wait_until((tmp_path / "ready").exists, "the worker is up")
    subprocess.run([*command.split(), job], env=cluster.env(), check=True)
    wait_until(lambda: state() in ("CANCELLED", "PENDING", ""), state)
    wait_until(lambda: not cluster.processes(), lambda: f"{cluster.processes()}")
    said = (tmp_path / "out").read_text()
    assert state() in states and words in said, (state(), said)


def test_agents_say_what_only_they_know(cluster: Testbed, tmp_path: Path) -> None:
    """An agent that is asked to end by its host names the host, and the others follow."""
    launch = start(cluster, tmp_path, "--grace=1", script=SILENT)
    await_ready(launch)
    cluster.enter("n2", "kill", "-TERM", str(agent_of(launch, "n2")))
    assert launch.wait() == 143, launch.err
    assert "the run on n2 was stopped: the agent got SIGTERM" in launch.err
    _gone(cluster)


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["ssh", "openssh"])
def test_a_frozen_agent_on_another_node_goes_when_its_launcher_has_gone(
    cluster: Testbed, tmp_path: Path, by: str
) -> None:
    launch = start(cluster, tmp_path, "--grace=0.5", f"--launcher={by}", script=SILENT)
    await_ready(launch)
    cluster.enter("n2", "kill", "-STOP", str(agent_of(launch, "n2")))
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait() == 130, launch.err
    _gone(cluster)
