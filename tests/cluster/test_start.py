"""Test what can be wrong before a run begins, and the clusters that people really have."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster.helpers import SILENT, await_ready, start
from tests.cluster.testbed import Testbed
from tests.e2e.helpers import Launch
from tests.limits import LIMIT_S, wait_until

SUBNET = "10.79.0.0/24"
ARGS = ("a b", "$HOME", "quote'\"", "line\nbreak", "é\u4e2d", "*", "")

SHOW = """
    import json, os, sys
    env = os.environ
    print(json.dumps([sys.argv[1:], env.get("HF_SECRET"), env.get("MINE"), env["LOCAL_RANK"]]))
"""


@pytest.mark.rotated
def test_arguments_and_environment_survive(cluster: Testbed, tmp_path: Path) -> None:
    env = {"HF_SECRET": "t$k'e\"n \n é", "NOT_LISTED": "x"}
    launch = start(cluster, tmp_path, "--env=MINE=a=b c", script=SHOW, args=ARGS, env=env)
    assert launch.wait() == 0, launch.err
    for rank in range(6):
        args, secret, mine, local = json.loads(launch.log(rank))
        assert (tuple(args), secret, mine, local) == (ARGS, env["HF_SECRET"], "a=b c", str(rank % 2))


@pytest.mark.rotated
def test_nothing_of_it_shows_in_ps(cluster: Testbed, tmp_path: Path) -> None:
    launch = start(cluster, tmp_path, "--env=MINE=verysecret", script=SILENT)
    await_ready(launch)
    shown = " ".join(cluster.enter(host, "ps", "-eww", "-o", "args").stdout for host in cluster.hosts)
    assert "worker.py" in shown and "verysecret" not in shown
    launch.process.terminate()
    assert launch.wait() == 143


@pytest.mark.rotated
def test_unequal_nodes_and_filters(cluster: Testbed, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n2 slots=3  # first\n\nn1 slots=1\nn3 slots=4\n")
    script = (
        "import os, socket; print(socket.gethostname(), os.environ['LOCAL_RANK'], os.environ['CROSS_RANK'])"
    )
    options = (f"--hostfile={hostfile}", "--include=n[2-3]:0-2@n1", "--no_local_rank")
    launch = Launch(tmp_path, *options, f"--ssh_config={cluster.ssh_config}", script=script)
    assert launch.wait() == 0, launch.err
    said = [launch.log(rank).split() for rank in range(7)]
    nodes = [("n2", 3, 0), ("n1", 1, 1), ("n3", 3, 2)]
    assert said == [[host, str(i), str(node)] for host, count, node in nodes for i in range(count)]


def _refused(cluster: Testbed, tmp_path: Path, *options: str, hostfile: str | None = None) -> str:
    if hostfile is not None:
        (tmp_path / "hosts").write_text(hostfile)
        options = (*options, f"--hostfile={tmp_path / 'hosts'}")
    launch = start(cluster, tmp_path, *options, script=SILENT)
    assert launch.wait() == 2, launch.err
    assert "Traceback" not in launch.err
    return launch.err


def test_a_host_that_does_not_exist(cluster: Testbed, tmp_path: Path) -> None:
    text = _refused(cluster, tmp_path, hostfile="n1 slots=1\nnowhere.invalid slots=1\nn3 slots=1\n")
    assert "nowhere.invalid: no such host" in text and "1 of 3 nodes cannot take part" in text


def test_a_host_where_nothing_listens(cluster: Testbed, tmp_path: Path) -> None:
    text = _refused(cluster, tmp_path, hostfile="n1 slots=1\nn2 slots=1 port=2299\n")
    assert "n2" in text and "connection refused" in text


def test_a_host_that_refuses_the_key(cluster: Testbed, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    config = cluster.ssh_config.read_text().replace(f"{cluster.folder}/key", str(tmp_path / "other"))
    (tmp_path / "config").write_text(config)
    text = _refused(cluster, tmp_path, f"--ssh_config={tmp_path / 'config'}")
    assert "refused our keys" in text and "ssh-copy-id" in text


@pytest.mark.exhaustive
def test_an_unknown_host_key(cluster: Testbed, tmp_path: Path) -> None:
    known = cluster.known_hosts.read_text().splitlines(keepends=True)
    try:
        cluster.known_hosts.write_text("".join(known[:2]))
        text = _refused(cluster, tmp_path)
        assert f"ssh-keyscan {cluster.address('n3')} >> {cluster.known_hosts}" in text
        command = next(line for line in text.splitlines() if "ssh-keyscan" in line)
        subprocess.run(command, shell=True, check=True, capture_output=True)
        launch = start(cluster, tmp_path, script="print('fine')")
        assert launch.wait() == 0, launch.err

        cluster.known_hosts.write_text("".join(known[:2]))
        launch = start(cluster, tmp_path, "--ssh_accept_new", script="print('fine')")
        assert launch.wait() == 0, launch.err
        assert cluster.address("n3") in cluster.known_hosts.read_text()
    finally:
        cluster.trust_all()


def test_a_changed_host_key(cluster: Testbed, tmp_path: Path) -> None:
    lines = cluster.known_hosts.read_text().splitlines()
    try:
        swapped = [f"{lines[0].split()[0]} {' '.join(lines[1].split()[1:])}", *lines[1:]]
        cluster.known_hosts.write_text("\n".join(swapped) + "\n")
        text = _refused(cluster, tmp_path)
        assert "host key has CHANGED" in text and "ssh-keygen -f" in text
    finally:
        cluster.trust_all()


def test_python_is_missing_on_one_host(cluster: Testbed, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    cluster.enter("n2", "mount", "-t", "tmpfs", "tmpfs", str(folder))
    try:
        text = _refused(cluster, tmp_path, f"--remote_python={folder}/python")
        assert "n2: there is no such Python" in text and "--remote_python" in text
    finally:
        cluster.enter("n2", "umount", str(folder))


def test_the_port_is_taken(cluster: Testbed, tmp_path: Path) -> None:
    code = "import socket; s=socket.socket(); s.bind(('', 29777)); s.listen(); print('taken'); input()"
    enter = ["nsenter", f"--target={cluster.pids['n1']}", "--net"]
    holder = subprocess.Popen(
        [*enter, sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
    text = _refused(cluster, tmp_path, "--master_port=29777")
    holder.communicate("\n")
    assert "n1: --master_port 29777: Address already in use" in text


@pytest.mark.rotated
def test_a_full_disk_on_one_node(cluster: Testbed, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    cluster.enter("n2", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "data"))
    script = """
        import os, time
        with open("data/" + os.environ["RANK"], "wb") as file:
            file.write(bytes(1 << 20))
        time.sleep(600)
    """
    try:
        launch = start(cluster, tmp_path, script=script)
        assert launch.wait() == 1
        assert "on n2 failed first" in launch.err and "No space left on device" in launch.err
    finally:
        cluster.enter("n2", "umount", str(tmp_path / "data"))


@pytest.mark.exhaustive
def test_a_noisy_and_slow_bashrc(cluster: Testbed, tmp_path: Path) -> None:
    cluster.bashrc.write_text('echo welcome; echo \'{"type": "hello"\' ; echo oops >&2; sleep 2\n')
    try:
        launch = start(cluster, tmp_path, script="print('fine')")
        assert launch.wait() == 0, launch.err
        assert launch.log(5) == "fine\n"
    finally:
        cluster.bashrc.write_text("")


@pytest.mark.exhaustive
def test_twelve_agents_behind_one_sshd(cluster: Testbed, tmp_path: Path) -> None:
    """Its MaxStartups is the default, 10:30:100."""
    names = [f"m{i:02d}" for i in range(1, 13)]
    block = "".join(f"Host {name}\n  HostName {cluster.address('n1')}\n" for name in names)
    (tmp_path / "config").write_text(block + cluster.ssh_config.read_text())
    (tmp_path / "hosts").write_text("m[01-12] slots=1\n")
    options = (f"--hostfile={tmp_path / 'hosts'}", f"--ssh_config={tmp_path / 'config'}", "--no_local_rank")
    launch = Launch(tmp_path, *options, script="import os; print(os.environ['WORLD_SIZE'])")
    assert launch.wait() == 0, launch.err
    assert [launch.log(rank) for rank in range(12)] == ["12\n"] * 12


def test_slots_that_are_not_written_down(cluster: Testbed, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1\nn2 slots=2\n")
    options = (f"--hostfile={tmp_path / 'hosts'}", f"--ssh_config={cluster.ssh_config}", "--no_local_rank")
    launch = Launch(tmp_path, *options, script="import os; print(os.environ['WORLD_SIZE'])")
    assert launch.wait() == 0, launch.err
    assert launch.log(2) == "3\n"


@pytest.mark.rotated
def test_an_allocation_is_used_as_it_is(cluster: Testbed, tmp_path: Path) -> None:
    script = "import os, socket; print(socket.gethostname(), os.environ['LOCAL_RANK'])"
    launch = start(cluster, tmp_path, by="slurm", script=script)
    assert launch.wait() == 0, launch.err
    assert "worker.py on n1, n2, n3: 6 workers\n" in launch.err
    assert [launch.log(rank).split() for rank in range(6)] == [
        [f"n{r // 2 + 1}", str(r % 2)] for r in range(6)
    ]


TORCHRUN = (
    "--nnodes=3",
    "--nproc_per_node=2",
    "--rdzv_backend=c10d",
    "--rdzv_id=7",
    "--rdzv_endpoint=n1:29533",
)


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("tasks", "flags"), [(1, ()), (2, ()), (1, TORCHRUN)])
def test_started_by_the_users_own_srun(
    cluster: Testbed, tmp_path: Path, tasks: int, flags: tuple[str, ...]
) -> None:
    script = (
        "import os\ne = os.environ\nopen('rank.' + e['RANK'], 'w').write(e['WORLD_SIZE'] + e['LOCAL_RANK'])\n"
        "open('port', 'w').write(e['MASTER_PORT'])"
    )
    (tmp_path / "worker.py").write_text(script)
    command = ["srun", "-N3", f"--ntasks-per-node={tasks}", "--gres=gpu:2", "-D", str(tmp_path)]
    command += [sys.executable, "-m", "zlaunch", "--no_local_rank", *flags, "worker.py"]
    result = subprocess.run(command, env=cluster.env(), capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert not flags or (tmp_path / "port").read_text() == "29533"
    assert [(tmp_path / f"rank.{r}").read_text() for r in range(6)] == [f"6{r % 2}" for r in range(6)]


@pytest.mark.rotated
def test_a_failing_task_ends_the_users_own_srun(cluster: Testbed, tmp_path: Path) -> None:
    """The others get their SIGTERM and their grace, and the step ends with the failing task's code."""
    script = """
        import os, signal, time
        def save(*_):
            open("saved." + os.environ["RANK"], "w").close()
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, save)
        open("ready." + os.environ["RANK"], "w").close()
        while len([name for name in os.listdir() if name.startswith("ready.")]) < 6:
            time.sleep(0.05)
        if os.environ["RANK"] == "3":
            raise SystemExit(7)
        time.sleep(600)
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(script))
    command = ["srun", "-N3", "--ntasks-per-node=1", "--gres=gpu:2", "-D", str(tmp_path)]
    command += [sys.executable, "-m", "zlaunch", "--no_local_rank", "worker.py"]
    result = subprocess.run(command, env=cluster.env(), capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 7, result.stderr
    assert "rank 3 on n2 failed first: it exited with code 7" in result.stderr
    assert {path.name for path in tmp_path.glob("saved.*")} == {f"saved.{rank}" for rank in (0, 1, 2, 4, 5)}
    wait_until(lambda: not cluster.processes(), "all tasks gone")


@pytest.mark.exhaustive
def test_what_would_have_no_effect_is_refused(cluster: Testbed, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("")
    for option in ("--include=n1", "--num_nodes=1", "--max_restarts=2", "--iface=eth0"):
        command = ["srun", "-N2", "-D", str(tmp_path), sys.executable, "-m", "zlaunch", option, "worker.py"]
        result = subprocess.run(command, env=cluster.env(), capture_output=True, text=True, timeout=LIMIT_S)
        assert result.returncode == 2 and "has no effect here: srun has started this task" in result.stderr
    assert "--min_nodes 4: there are 3 hosts" in _refused(cluster, tmp_path, "--min_nodes=4")


@pytest.mark.rotated
def test_files_in_the_working_folder_do_no_harm(cluster: Testbed, tmp_path: Path) -> None:
    for name in ("tokenize", "token", "signal", "typing", "queue", "zlaunch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import tokenize, typing\nprint('fine')")
    zlaunch = Path(sys.executable).with_name("zlaunch")
    command = [
        str(zlaunch),
        f"--hostfile={cluster.hostfile}",
        f"--ssh_config={cluster.ssh_config}",
        "--no_local_rank",
    ]
    command += ["--run_dir=run", "scripts/train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run/logs/rank_00005.log").read_text() == "fine\n"


@pytest.mark.exhaustive
def test_address_of_node_zero_is_one_the_others_reach(cluster: Testbed, tmp_path: Path) -> None:
    launch = start(
        cluster,
        tmp_path,
        script="import os; print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])",
    )
    assert launch.wait() == 0
    assert launch.log(5) == f"{cluster.address('n1')} eth0\n"
    text = _refused(cluster, tmp_path, "--iface=ib0")
    assert "n1: --iface ib0: it has no such interface" in text
    text = _refused(cluster, tmp_path, "--master_addr=127.0.0.1")
    assert "cannot reach n1 at 127.0.0.1" in text
    assert socket.gethostname() not in text


def test_through_a_jump_host(cluster: Testbed, tmp_path: Path) -> None:
    """n2 and n3 are reached through n1 alone: nothing else knows the names inner2 and inner3."""
    block = "".join(f"Host inner{i}\n  HostName {cluster.address(f'n{i}')}\n  ProxyJump n1\n" for i in (2, 3))
    (tmp_path / "config").write_text(block + cluster.ssh_config.read_text())
    (tmp_path / "hosts").write_text("inner[2-3] slots=1\n")
    options = (f"--hostfile={tmp_path / 'hosts'}", f"--ssh_config={tmp_path / 'config'}", "--no_local_rank")
    script = "import os, socket; print(socket.gethostname(), os.environ['SSH_CONNECTION'].split()[0])"
    launch = Launch(tmp_path, *options, script=script)
    assert launch.wait() == 0, launch.err
    assert [launch.log(rank).split() for rank in (0, 1)] == [[n, cluster.address("n1")] for n in ("n2", "n3")]


@pytest.mark.exhaustive
def test_a_batch_file_is_written_submitted_and_followed(cluster: Testbed, tmp_path: Path) -> None:
    script = "import os; print('world', os.environ['WORLD_SIZE'], os.environ['RANK'])"
    (tmp_path / "worker.py").write_text(script)
    zlaunch = [sys.executable, "-m", "zlaunch"]
    command = [
        *zlaunch,
        "slurm",
        "script",
        "--nodes=3",
        "--sbatch=--gres=gpu:2",
        "--time=5",
        "worker.py",
        "x y",
    ]
    env = {**cluster.env(), "PATH": f"{Path(sys.executable).parent}:{cluster.env()['PATH']}"}
    written = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert written.returncode == 0, written.stderr
    (tmp_path / "job.sbatch").write_text(written.stdout)
    command = [*zlaunch, "slurm", "submit", "--follow", "job.sbatch"]
    sent = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert sent.returncode == 0, sent.stderr + sent.stdout
    assert "world 6 0" in sent.stdout


def mpirun(cluster: Testbed) -> tuple[str, ...]:
    """Return the command that starts one task on each node."""
    agent = ("--mca", "plm_rsh_agent", f"ssh -F {cluster.ssh_config}", "--mca", "oob_tcp_if_include", SUBNET)
    hosts = ("--host", ",".join(cluster.hosts), "--map-by", "ppr:1:node")
    return ("mpirun.openmpi", "--allow-run-as-root", *agent, *hosts, "-x", "PYTHONPATH")


@pytest.mark.exhaustive
@pytest.mark.needs("mpirun.openmpi")
def test_mpirun_starts_one_launcher_a_node(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os, socket, time
        rank, place = os.environ["RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == "0":
            server = socket.create_server(place)
            others = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
            total = str(sum(int(other.recv(8)) for other in others)).encode()
            for other in others:
                other.sendall(total)
        else:
            while True:
                try:
                    server = socket.create_connection(place)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            server.sendall(rank.encode())
            total = server.recv(8)
        print("sum", total.decode(), rank, os.environ["LOCAL_RANK"], flush=True)
    """
    options = ("--num_gpus=2", "--no_local_rank", "--log_ranks=all")
    prefix = (*mpirun(cluster), "-x", "MASTER_ADDR=n1")
    launch = Launch(tmp_path, *options, prefix=prefix, script=script)
    assert launch.wait() == 0, launch.err
    assert sorted(re.findall(r"sum (\d+) (\d) (\d)", launch.out)) == [
        ("15", str(rank), str(rank % 2)) for rank in range(6)
    ]
    (tmp_path / "x").mkdir()
    lost = Launch(tmp_path / "x", *options, prefix=mpirun(cluster), script=script)
    assert lost.wait() == 2 and "no address of node 0" in lost.err, lost.err


@pytest.mark.rotated
@pytest.mark.needs("mpirun.openmpi")
def test_mpirun_reaches_the_hosts_of_a_hostfile(cluster: Testbed, tmp_path: Path) -> None:
    agent = {"OMPI_MCA_plm_rsh_agent": f"ssh -F {cluster.ssh_config}", "OMPI_MCA_oob_tcp_if_include": SUBNET}
    script = "import os, socket; print(socket.gethostname(), os.environ['RANK'])"
    options = (f"--hostfile={cluster.hostfile}", "--launcher=openmpi", "--no_local_rank")
    launch = Launch(tmp_path, *options, script=script, env=agent)
    assert launch.wait() == 0, launch.err
    assert [launch.log(rank).split() for rank in range(6)] == [[f"n{1 + r // 2}", str(r)] for r in range(6)]


@pytest.mark.exhaustive
def test_what_record_writes_on_another_node_is_in_the_run(cluster: Testbed, tmp_path: Path) -> None:
    script = """
        import os
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            if os.environ["RANK"] == "3":
                raise ValueError("as it is recorded")

        main()
    """
    launch = start(cluster, tmp_path, "--num_nodes=2", script=script)
    assert launch.wait() == 1 and "ValueError: as it is recorded" in launch.err
    recorded = json.loads((launch.run_dir / "logs" / "error_00003.json").read_text())
    assert recorded["message"]["message"] == "ValueError: as it is recorded"
    assert not launch.events("error_file") and not list((launch.run_dir / "logs").glob("error_00001.json"))
    assert not any("zlaunch-memory" in cluster.enter(host, "ls", "/dev/shm").stdout for host in cluster.hosts)
