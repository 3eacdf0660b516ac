"""Measure the time from the command until all ranks pass their first barrier, beside the peers.

    python -m benchmarks.launch [--rounds 5] [--local] [--nodes] [--hosts 256] [--out FILE.json]

- Local: two workers under zlaunch, torchrun, and deepspeed if it is installed.
- Nodes: three nodes of `tests/cluster/testbed.py` (root; real sshd and slurmd). zlaunch runs over ssh and in
  a SLURM job, torchrun is started manually on the same nodes.
- Hosts: N agents behind one real sshd, each with a trivial worker. One is killed, and all must exit.

All systems take turns in every round. The output has medians and ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.ports import reserved_port

ROOT = Path(__file__).resolve().parent.parent
WORKER = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
with open(os.path.join(os.environ["BENCH_OUT"], "past." + os.environ["RANK"]), "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""
LIMIT_S = 120


class Bench:
    """Runs commands that start the worker, and reads when its ranks were past the barrier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self._ports = ExitStack()

    def port(self) -> int:
        """Reserve a port of this machine until the measurement ends."""
        return self._ports.enter_context(reserved_port())

    def measure(
        self, start: Callable[[dict[str, str]], list[subprocess.Popen[bytes]]], ranks: int
    ) -> dict[str, float]:
        for old in self.folder.glob("past.*"):
            old.unlink()
        env = {**os.environ, "BENCH_OUT": str(self.folder)}
        began = time.time()
        with self._ports:
            for process in start(env):
                if process.wait(LIMIT_S) != 0:
                    raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
            ended = time.time()
        past = [float(path.read_text()) for path in self.folder.glob("past.*")]
        if len(past) != ranks:
            raise RuntimeError(f"{len(past)} of {ranks} ranks came past the barrier")
        return {"barrier_s": max(past) - began, "end_s": ended - began}

    def start(self, *command: str, env: dict[str, str], **more: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                command,
                env={**env, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )


Systems = dict[str, tuple[Callable[[dict[str, str]], list[subprocess.Popen[bytes]]], int]]


def local_systems(bench: Bench) -> Systems:
    zlaunch = (sys.executable, "-m", "zlaunch", "--quiet", "--num_gpus=2", "--no_local_rank")

    def ours(*options: str) -> Callable[[dict[str, str]], list[subprocess.Popen[bytes]]]:
        return lambda env: [bench.start(*zlaunch, *options, str(bench.script), env=env)]

    def by_hand(env: dict[str, str]) -> list[subprocess.Popen[bytes]]:
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(bench.port()),
            "OMP_NUM_THREADS": "1",
        }
        return [
            bench.start(sys.executable, str(bench.script), env=env, RANK=str(r), **common) for r in range(2)
        ]

    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    systems: Systems = {
        "zlaunch": (ours(), 2),
        "zlaunch --no_preload": (ours("--no_preload"), 2),
        "bare workers": (by_hand, 2),
        "torchrun": (
            lambda env: [bench.start(*torchrun, f"--master-port={bench.port()}", str(bench.script), env=env)],
            2,
        ),
    }
    if importlib.util.find_spec("deepspeed"):
        deepspeed = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_local_rank")
        systems["deepspeed"] = (
            lambda env: [
                bench.start(*deepspeed, f"--master_port={bench.port()}", str(bench.script), env=env)
            ],
            2,
        )
    return systems


def node_systems(bench: Bench, bed: Any) -> Systems:
    first, hosts = bed.address(bed.hosts[0]), bed.hosts
    zlaunch = (sys.executable, "-m", "zlaunch", "--quiet", "--no_local_rank")
    ssh = ("ssh", "-F", str(bed.ssh_config))
    slurm = bed.env()["SLURM_CONF"]
    ranks = len(hosts) * bed.slots

    def torchrun(port: int, node: str) -> str:
        return (
            f"{sys.executable} -m torch.distributed.run --nnodes={len(hosts)} --nproc-per-node={bed.slots} "
            f"--node-rank={node} --master-addr={first} --master-port={port} {bench.script}"
        )

    def torchrun_by_ssh(env: dict[str, str]) -> list[subprocess.Popen[bytes]]:
        port = bench.port()
        return [
            bench.start(
                *ssh,
                host,
                f"BENCH_OUT={bench.folder} GLOO_SOCKET_IFNAME=eth0 {torchrun(port, str(i))}",
                env=env,
            )
            for i, host in enumerate(hosts)
        ]

    def torchrun_by_srun(env: dict[str, str]) -> list[subprocess.Popen[bytes]]:
        command = f"GLOO_SOCKET_IFNAME=eth0 {torchrun(bench.port(), '$SLURM_NODEID')}"
        options = (f"-N{len(hosts)}", "--ntasks-per-node=1", f"--gres=gpu:{bed.slots}")
        return [bench.start("srun", *options, "sh", "-c", command, env=env, SLURM_CONF=slurm)]

    by_ssh = (
        f"--hostfile={bed.hostfile}",
        f"--ssh_config={bed.ssh_config}",
        f"--env=BENCH_OUT={bench.folder}",
    )
    salloc = ("salloc", "--quiet", f"-N{len(hosts)}", f"--gres=gpu:{bed.slots}")
    return {
        "zlaunch by ssh": (lambda env: [bench.start(*zlaunch, *by_ssh, str(bench.script), env=env)], ranks),
        "torchrun by ssh": (torchrun_by_ssh, ranks),
        "zlaunch in SLURM": (
            lambda env: [bench.start(*salloc, *zlaunch, str(bench.script), env=env, SLURM_CONF=slurm)],
            ranks,
        ),
        "torchrun by srun": (torchrun_by_srun, ranks),
    }


def compare(bench: Bench, systems: Systems, rounds: int, baselines: list[str]) -> dict[str, Any]:
    times: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, (start, ranks) in systems.items() if turn % 2 == 0 else reversed(systems.items()):
            result = bench.measure(start, ranks)
            if turn:  # the first round warms the file cache
                times[name].append(result)
    known = [name for name in baselines if name in times]
    print(f"{'':22} {'barrier s':>9} {'min':>6} {'end s':>6}  " + "  ".join(f"over {name}" for name in known))
    for name, results in times.items():
        past = [result["barrier_s"] for result in results]
        ratios = [
            statistics.median(a / b["barrier_s"] for a, b in zip(past, times[base], strict=True))
            for base in known
        ]
        print(
            f"{name:22} {statistics.median(past):9.2f} {min(past):6.2f} "
            f"{statistics.median(r['end_s'] for r in results):6.2f}  "
            + "  ".join(f"{ratio:{5 + len(base)}.2f}" for ratio, base in zip(ratios, known, strict=True))
        )
    return times


def many_hosts(folder: Path, count: int) -> dict[str, Any]:
    """`count` agents behind one sshd: start, kill one worker, see all gone; the launcher's memory by host."""
    from tests.cluster.testbed import Testbed

    bed = Testbed(folder / "bed", count=1, slurm=False)
    bed.up()
    try:
        few = max(1, count // 16)
        results = {n: _start_and_kill(bed, folder / str(n), n) for n in (few, count)}
    finally:
        bed.down()
    growth_mb = (results[count]["peak_mb"] - results[few]["peak_mb"]) / (count - few)
    r = results[count]
    print(
        f"{count} agents: all started after {r['started_s']:.1f} s, all gone {r['gone_s']:.1f} s after a "
        f"worker was killed (exit code {r['code']}); launcher's peak {r['peak_mb']:.0f} MB, "
        f"{growth_mb:.2f} MB a host"
    )
    return {"count": count, "growth_mb_per_host": growth_mb, **r}


def _start_and_kill(bed: Any, folder: Path, count: int) -> dict[str, float]:
    from tests.limits import wait_until

    folder.mkdir()
    names = [f"m{i:03d}" for i in range(1, count + 1)]
    block = "".join(f"Host {name}\n  HostName {bed.address('n1')}\n" for name in names)
    (folder / "config").write_text(
        block + bed.ssh_config.read_text().replace("ConnectTimeout 5", "ConnectTimeout 60")
    )
    (folder / "hosts").write_text(f"m[001-{count:03d}] slots=1\n")
    (folder / "peak.py").write_text(
        "import resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:]).returncode\n"
        "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    command = [
        sys.executable,
        str(folder / "peak.py"),
        sys.executable,
        "-m",
        "zlaunch",
        "--quiet",
        "--no_python",
    ]
    command += [
        f"--hostfile={folder / 'hosts'}",
        f"--ssh_config={folder / 'config'}",
        f"--run_dir={folder / 'run'}",
    ]
    command += ["--connect_timeout=300", "--heartbeat=120", "sleep", "6000"]
    began = time.monotonic()
    with open(folder / "err", "wb") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, cwd=folder)

    def spawned() -> list[dict[str, Any]]:
        try:
            lines = (folder / "run" / "events.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [event for event in map(json.loads, lines) if event["type"] == "spawn"]

    wait_until(lambda: len(spawned()) == count or process.poll() is not None, "all workers")
    started_s = time.monotonic() - began
    began = time.monotonic()
    bed.enter("n1", "kill", "-9", str(spawned()[count // 2]["pid"]))
    out, _ = process.communicate(timeout=120)
    wait_until(lambda: not bed.processes(), "all gone")
    code, peak_kb = out.split()[-2:]
    return {
        "started_s": started_s,
        "gone_s": time.monotonic() - began,
        "peak_mb": int(peak_kb) / 1024,
        "code": int(code),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local", action="store_true", help="run only this part (default: local and nodes)")
    parser.add_argument("--nodes", action="store_true", help="run only this part")
    parser.add_argument("--hosts", type=int, default=0, help="run only this part, with N agents")
    parser.add_argument("--out", help="write everything measured to this JSON file")
    args = parser.parse_args()
    every = not (args.local or args.nodes or args.hosts)
    result: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="zbench-") as name:
        folder = Path(name)
        bench = Bench(folder)
        if every or args.local:
            result["local"] = compare(bench, local_systems(bench), args.rounds, ["torchrun", "deepspeed"])
        if every or args.nodes:
            from tests.cluster.testbed import Testbed
            from tests.programs import CLUSTER, missing

            if reason := missing(CLUSTER):
                print(f"cannot create nodes: {reason}")
            else:
                bed = Testbed(folder / "bed")
                bed.up()
                try:
                    known = ["torchrun by ssh", "torchrun by srun"]
                    result["nodes"] = compare(bench, node_systems(bench, bed), args.rounds, known)
                finally:
                    bed.down()
        if args.hosts:
            result["hosts"] = many_hosts(folder, args.hosts)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
