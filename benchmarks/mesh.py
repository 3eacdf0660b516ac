"""Measure training speed on two nodes with a slow link between them, beside the peers.

    sudo python -m benchmarks.mesh [--rate 1gbit] [--latency 0.5] [--model 15m] [--out FILE.json]

The nodes are two network namespaces of this machine with two CPU workers each (see `--ranks`). `tc` limits
the rate of their interfaces. With `--latency` (ms, each way), a relay joins them and takes some CPU time from
the workers. The same processes build all systems, which take turns. Ratios are medians over the rounds of the
ratios within a round. Needs root, `ip`, `tc` and, for a latency, `ethtool`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NODES, BETWEEN = ("zmesh-a", "zmesh-b"), "zmesh-relay"
RELAY = ROOT / "tests" / "cluster" / "relay.py"
FRAME = "60000"
"""Bytes of a packet on the way to the relay, which takes as long for a large one as for a small one."""
_PLAIN = ("tx", "off", "tso", "off", "gso", "off", "gro", "off")

LIMIT_S = 3600


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


def _join(name: str, end: str, other: str, other_end: str) -> None:
    _run("ip", "link", "add", end, "netns", name, "type", "veth", "peer", other_end, "netns", other)


@contextmanager
def nodes(rate: str, latency_ms: float) -> Iterator[None]:
    """Make the namespaces and the link."""
    relay = None
    for name in (*NODES, BETWEEN):
        _run("ip", "netns", "del", name, check=False)
        _run("ip", "netns", "add", name)
    try:
        if latency_ms:
            for name in NODES:
                _join(name, "eth0", BETWEEN, name)
                _run("ip", "netns", "exec", BETWEEN, "ip", "link", "set", name, "mtu", FRAME, "up")
                _run("ip", "netns", "exec", name, "ip", "link", "set", "eth0", "mtu", FRAME)
                _run("ip", "netns", "exec", name, "ethtool", "-K", "eth0", *_PLAIN)
            command = (sys.executable, str(RELAY), *NODES, str(latency_ms))
            relay = subprocess.Popen(["ip", "netns", "exec", BETWEEN, "nice", "-n", "-20", *command])
        else:
            _join(NODES[0], "eth0", NODES[1], "eth0")
        for number, name in enumerate(NODES, start=1):
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run(*inside, "ip", "link", "set", interface, "up")
            limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
            _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *limit)
        yield
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for name in (*NODES, BETWEEN):
            _run("ip", "netns", "del", name, check=False)


def measure(systems: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        options = {"systems": systems, "model": args.model, "micro_batch": args.micro_batch}
        options |= {"rounds": args.rounds, "steps": args.steps, "out": out}
        workers = []
        for rank in range(len(NODES) * args.ranks):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(NODES) * args.ranks),
                "LOCAL_RANK": str(rank % args.ranks),
                "LOCAL_WORLD_SIZE": str(args.ranks),
                "MASTER_ADDR": "10.99.0.1",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", NODES[rank // args.ranks], sys.executable, "-m"]
            command += ["benchmarks.train_worker", *(f"--{name}={value}" for name, value in options.items())]
            workers.append(subprocess.Popen(command, cwd=ROOT, env=env))
        try:
            codes = [worker.wait(LIMIT_S) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds each way")
    parser.add_argument("--model", default="15m")
    parser.add_argument("--ranks", type=int, default=2, help="workers per node")
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--systems", default="stage 3,stage 3 node,stage 3 copies,stage 3 packed,stage 3 zero++,fsdp2,hsdp"
    )
    parser.add_argument("--out", help="write everything measured to this JSON file")
    args = parser.parse_args()
    with nodes(args.rate, args.latency):
        found = measure(args.systems, args)
    seconds = found["seconds"]
    first = next(iter(seconds))
    for name, taken in seconds.items():
        speed = statistics.median(a / b for a, b in zip(seconds[first], taken, strict=True))
        print(f"{name:16} {statistics.median(taken):7.3f} s a step   {speed:5.2f} x {first}")
    if args.out:
        Path(args.out).write_text(json.dumps({"arguments": vars(args), **found}, indent=1))


if __name__ == "__main__":
    main()
