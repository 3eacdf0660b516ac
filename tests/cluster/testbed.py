"""Build a cluster on this machine: a node is a set of Linux namespaces with its sshd, slurmd and processes.

Everything lives in one folder and in network namespaces called after it; `Testbed.down` removes all of it.
CLUSTER in tests/programs.py lists what it needs. Numbers of processes are as the host sees them.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.leftovers import unmarked
from tests.limits import wait_until

_BRIDGE = "ztest"
_PREFIX = "ztest-"
_RELAY = "zrelay-a"
_RELAY_FAR = "zrelay-b"
_NET = "10.79.0"
_HEAD = f"{_NET}.1"

_INIT = """
set -e
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
[ -e ~/.bashrc ] && mount --bind "$2/bashrc" ~/.bashrc
# Nodes have none of this machine's GPUs: all would start workers on the same ones.
[ ! -e /proc/driver/nvidia ] || mount -t tmpfs tmpfs /proc/driver/nvidia
if [ -e /dev/dxg ] || compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
  mkdir -p "$2/$1/dev"
  mount -t tmpfs tmpfs "$2/$1/dev"
  for name in full null ptmx pts random shm tty urandom zero; do
    if [ -d "/dev/$name" ]; then mkdir "$2/$1/dev/$name"; else touch "$2/$1/dev/$name"; fi
    mount --rbind "/dev/$name" "$2/$1/dev/$name"
  done
  ln -s /proc/self/fd "$2/$1/dev/fd"
  ln -s fd/0 "$2/$1/dev/stdin"
  ln -s fd/1 "$2/$1/dev/stdout"
  ln -s fd/2 "$2/$1/dev/stderr"
  mount --rbind "$2/$1/dev" /dev
fi
mkdir -p /run/sshd
/usr/sbin/sshd -D -E "$2/$1/sshd.log" -f "$2/$1/sshd_config" &
[ -z "$3" ] || slurmd -D -f "$2/slurm.conf" &
set +e
while :; do wait; sleep 1; done
"""


def _succeeds(*command: str) -> bool:
    return sh(*command, check=False).returncode == 0


def sh(*command: str | Path, check: bool = True, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a program with its output captured."""
    result: subprocess.CompletedProcess[str] = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **more,  # type: ignore[call-overload]
    )
    if check and result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {result.stderr.strip() or result.stdout.strip()}")
    return result


class Testbed:
    """`count` nodes called n1, n2, ...; `slots` in the hostfile and GPUs in SLURM's eyes for each."""

    __test__ = False

    def __init__(self, folder: Path, count: int = 3, slots: int = 2, *, slurm: bool = True) -> None:
        self.folder, self.slots, self.slurm = folder, slots, slurm
        self.hosts = [f"n{i}" for i in range(1, count + 1)]
        self.hostfile = folder / "hostfile"
        self.ssh_config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.bashrc = folder / "bashrc"
        self.slurm_conf = folder / "slurm.conf"
        self.pids: dict[str, int] = {}
        self._daemons: list[str] = []
        os.environ["PATH"] += ":/usr/sbin:/sbin"

    def address(self, node: str) -> str:
        """A node's address."""
        return f"{_NET}.{10 + int(node[1:])}"

    def up(self) -> None:
        """Start everything; returns when every node answers."""
        self.down()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_files()
        sh("ip", "link", "add", _BRIDGE, "address", "02:00:0a:4f:00:ff", "type", "bridge")
        sh("ip", "addr", "add", f"{_HEAD}/24", "dev", _BRIDGE)
        sh("ip", "link", "set", _BRIDGE, "up")
        if self.slurm:
            self._start_slurm()
        for node in self.hosts:
            self._plug(node)
            self._boot(node)
        self.await_nodes()

    def await_nodes(self) -> None:
        """Every node's sshd listens and SLURM has it idle."""
        for node in self.hosts:
            wait_until(lambda node=node: self._listens(node), f"sshd on {node}")  # type: ignore[misc]
        if self.slurm:
            wait_until(self._all_idle, "all nodes idle in SLURM")

    def _listens(self, node: str) -> bool:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            return probe.connect_ex((self.address(node), 22)) == 0

    def _all_idle(self) -> bool:
        states = sh("sinfo", "-h", "-N", "-p", "all", "-o", "%T", env=self.env(), check=False).stdout.split()
        return len(states) == len(self.hosts) and set(states) == {"idle"}

    def env(self) -> dict[str, str]:
        """The environment for SLURM's commands."""
        return {**os.environ, "SLURM_CONF": str(self.slurm_conf)}

    def _daemon_env(self) -> dict[str, str]:
        return {**unmarked(), "SLURM_CONF": str(self.slurm_conf)}

    def down(self) -> None:
        """End every process and remove every trace, also those of an earlier testbed."""
        for name in self._daemons:
            pid = self.folder / f"{name}.pid"
            if pid.exists():
                _kill(int(pid.read_text()))
        self._daemons.clear()
        for line in sh("ip", "netns", "list", check=False).stdout.splitlines():
            name = line.split()[0]
            if name.startswith(_PREFIX):
                self._halt(name)
        sh("ip", "link", "del", _RELAY, check=False)  # also where a test was killed under `latency`
        sh("ip", "link", "del", _BRIDGE, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- files

    def _write_files(self) -> None:
        f = self.folder
        sh("ssh-keygen", "-qt", "ed25519", "-N", "", "-f", f / "key")
        (f / "authorized_keys").write_bytes((f / "key.pub").read_bytes())
        self.bashrc.write_text("")
        names = "".join(f"{self.address(node)} {node}\n" for node in self.hosts)
        (f / "hosts").write_text(f"127.0.0.1 localhost\n{_HEAD} {socket.gethostname()}\n{names}")
        self.hostfile.write_text("".join(f"{node} slots={self.slots}\n" for node in self.hosts))
        config = []
        for node in self.hosts:
            (f / node / "spool").mkdir(parents=True)
            sh("ssh-keygen", "-qt", "ed25519", "-N", "", "-f", f / node / "host_key")
            (f / node / "sshd_config").write_text(
                f"ListenAddress {self.address(node)}:22\nHostKey {f}/{node}/host_key\nPidFile none\n"
                f"AuthorizedKeysFile {f}/authorized_keys\nAuthenticationMethods publickey\n"
                "PermitRootLogin prohibit-password\nStrictModes no\n"
            )
            config.append(f"Host {node}\n  HostName {self.address(node)}\n")
        self.trust_all()
        self.ssh_config.write_text(
            "".join(config)
            + f"Host *\n  User {getpass.getuser()}\n  IdentityFile {f}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  ConnectTimeout 60\n"
        )

    def trust_all(self) -> None:
        """Write known_hosts anew, with every node's true key."""
        lines = []
        for node in self.hosts:
            key = " ".join((self.folder / node / "host_key.pub").read_text().split()[:2])
            lines.append(f"{self.address(node)} {key}\n")
        self.known_hosts.write_text("".join(lines))

    def _start_slurm(self) -> None:
        f = self.folder
        (f / "munge.key").write_bytes(os.urandom(128))
        (f / "munge.key").chmod(0o600)
        (f / "slurmctld").mkdir()
        for i in range(self.slots):
            sh("mknod", f / f"gpu{i}", "c", "1", "3")  # SLURM wants device files: /dev/null's numbers
        nodes = "".join(
            f"NodeName={n} NodeAddr={self.address(n)} CPUs=8 RealMemory=1000 Gres=gpu:{self.slots}\n"
            for n in self.hosts
        )
        self.slurm_conf.write_text(
            f"ClusterName=ztest\nSlurmctldHost={socket.gethostname().split('.')[0]}({_HEAD})\n"
            f"SlurmctldPort=16817\nSlurmdPort=16818\nSlurmUser={getpass.getuser()}\n"
            f"AuthInfo=socket={f}/munge.socket\nStateSaveLocation={f}/slurmctld\n"
            f"SlurmctldPidFile={f}/slurmctld.pid\nSlurmctldLogFile={f}/slurmctld.log\n"
            f"SlurmdSpoolDir={f}/%n/spool\nSlurmdPidFile={f}/%n/slurmd.pid\nSlurmdLogFile={f}/%n/slurmd.log\n"
            "SlurmdParameters=config_overrides\nSelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nGresTypes=gpu\n"
            "ReturnToService=2\nSlurmdTimeout=600\nKillWait=10\nJobRequeue=1\n"
            "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
            f"{nodes}PartitionName=all Nodes=ALL Default=YES State=UP PreemptMode=REQUEUE\n"
            "PartitionName=grace Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=600\n"
            "PartitionName=first Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF\n"
        )
        (f / "gres.conf").write_text(f"Name=gpu File={f}/gpu[0-{self.slots - 1}] Flags=nvidia_gpu_env\n")
        (f / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        sh(
            "munged", "--force", "--socket", f / "munge.socket", "--key-file", f / "munge.key",
            "--pid-file", f / "munged.pid", "--log-file", f / "munged.log", "--seed-file", f / "munged.seed",
            env=self._daemon_env(),
        )  # fmt: skip
        self._daemons.append("munged")
        sh("slurmctld", "-f", self.slurm_conf, env=self._daemon_env())
        self._daemons.append("slurmctld")

    # -- nodes

    def _plug(self, node: str) -> None:
        ns, veth = _PREFIX + node, _PREFIX + node
        mac = f"02:00:0a:4f:00:{int(node[1:]):02x}"  # the same after a reboot: neighbours remember it
        sh("ip", "netns", "add", ns)
        sh("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", ns, "address", mac)
        sh("ip", "link", "set", veth, "master", _BRIDGE, "up")
        sh("ip", "-n", ns, "link", "set", "lo", "up")
        sh("ip", "-n", ns, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        sh("ip", "-n", ns, "link", "set", "eth0", "up")

    def _boot(self, node: str) -> None:
        with open(self.folder / node / "console.log", "ab") as log:
            inside = ["unshare", "--pid", "--uts", "--mount", "--ipc", "--fork", "--kill-child"]
            init = ["bash", "-c", _INIT, "init", node, str(self.folder), "1" if self.slurm else ""]
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{_PREFIX}{node}", *inside, *init],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._daemon_env(),
            )

        def children() -> str:
            return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()

        wait_until(children, f"{node} booting")
        self.pids[node] = int(children().split()[0])

    def _halt(self, namespace: str) -> None:
        for pid in sh("ip", "netns", "pids", namespace, check=False).stdout.split():
            _kill(int(pid))
        wait_until(
            lambda: not sh("ip", "netns", "pids", namespace, check=False).stdout.split(), "node halted"
        )
        sh("ip", "link", "del", namespace, check=False)
        sh("ip", "netns", "del", namespace, check=False)

    def reboot(self, node: str, *, hard: bool = False) -> None:
        """Kill every process there and boot anew; `hard`: pull the cable first, as in a power loss."""
        if hard:
            sh("ip", "link", "del", _PREFIX + node)
        self._halt(_PREFIX + node)
        self._plug(node)
        self._boot(node)

    def cut(self, node: str) -> None:
        """Pull the cable: packets vanish silently."""
        sh("ip", "link", "set", _PREFIX + node, "down")

    def heal(self, node: str) -> None:
        """Plug it in again; returns when every node can be reached from it."""
        sh("ip", "link", "set", _PREFIX + node, "up")
        probe = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1).close()"
        for other in self.hosts:
            if other != node:
                address = self.address(other)
                command = ("ip", "netns", "exec", _PREFIX + node, sys.executable, "-c", probe, address)
                wait_until(partial(_succeeds, *command), f"{node} reaches {other} again")

    @contextmanager
    def latency(self, node: str, ms: float) -> Iterator[None]:
        """Packets from and to the node take `ms` milliseconds more each way."""
        veth = _PREFIX + node
        ns = _PREFIX + node
        near = _RELAY
        far = _RELAY_FAR
        sh("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        sh("ip", "link", "set", veth, "nomaster", "arp", "off")
        sh("ip", "link", "set", far, "arp", "off", "up")
        sh("ip", "link", "set", near, "master", _BRIDGE, "up")
        for command in (("ethtool", "-K", near), ("ip", "netns", "exec", ns, "ethtool", "-K", "eth0")):
            sh(*command, "tx", "off", "tso", "off", "gso", "off", "gro", "off", check=False)
        relay = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("relay.py")), veth, far, str(ms)]
        )
        try:
            wait_until(lambda: self._listens(node), f"{node} through the relay")
            yield
        finally:
            relay.kill()
            relay.wait()
            sh("ip", "link", "del", near)
            sh("ip", "link", "set", veth, "master", _BRIDGE, "arp", "on")

    def enter(self, node: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the node without ssh, also while it is cut off."""
        flags = ("--net", "--pid", "--uts", "--mount", "--ipc")
        return sh("nsenter", f"--target={self.pids[node]}", *flags, "--", *command, check=False)

    def cancel_jobs(self) -> None:
        """End all jobs and wait until SLURM has cleaned up after them."""
        if not self.slurm:
            return

        def cancel() -> bool:
            """Again and again: a job that requeues itself when it is told to end comes back once."""
            for job in (jobs := self._jobs()):
                sh("scancel", job, env=self.env(), check=False)
                sh("scancel", "--signal=KILL", "--full", job, env=self.env(), check=False)
            return not jobs

        wait_until(cancel, "no job left")
        wait_until(self._all_idle, "all nodes idle in SLURM")

    def _jobs(self) -> list[str]:
        return sh("squeue", "-h", "-o", "%i", env=self.env(), check=False).stdout.split()

    def kill_processes(self) -> None:
        """Kill what `processes` finds."""

        def kill_all() -> bool:
            for pid in (found := self.processes()):
                _kill(pid)
            return not found

        wait_until(kill_all, "nodes empty")

    def processes(self, *nodes: str) -> dict[int, str]:
        """The processes of a run that live on the nodes (default: all): zlaunch's own, and workers."""
        found = {}
        for node in nodes or self.hosts:
            for text in sh("ip", "netns", "pids", _PREFIX + node, check=False).stdout.split():
                try:
                    command = Path(f"/proc/{text}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                except OSError:
                    continue
                words = command.split(" ")
                if command and any(word in command for word in ("python", "zlaunch", "zwatchdog", "sleep 6")):
                    found[int(text)] = f"{node}: {' '.join(words[:6])}"
        return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


if __name__ == "__main__":
    # python -m tests.cluster.testbed up|down FOLDER: for trying things by hand
    bed = Testbed(Path(sys.argv[2]))
    bed._daemons = ["munged", "slurmctld"]
    bed.up() if sys.argv[1] == "up" else bed.down()
