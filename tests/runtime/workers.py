"""Run a function in several real gloo processes and give back what each returned."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(AssertionError):
    """A worker raised; the text is its traceback."""


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    env = {**os.environ, **{key: str(value) for key, value in places.items()}}
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    return env


def run_workers(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """``function(*args)`` in ``world_size`` processes joined by gloo; results in rank order.

    ``function`` is a module-level function of an importable test module. Raises WorkerError with the first
    failing rank's traceback.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        job = pickle.dumps((function.__module__, function.__qualname__, args))
        processes = []
        for rank in range(world_size):
            result = Path(folder) / f"{rank}.pkl"
            command = [sys.executable, "-m", "tests.runtime.worker_main", str(result)]
            process = subprocess.Popen(
                command, env=_environment(rank, world_size, port), cwd=ROOT, stdin=subprocess.PIPE
            )
            assert process.stdin is not None
            process.stdin.write(job)
            process.stdin.close()
            processes.append((process, result))
        try:
            codes = [process.wait(timeout) for process, _ in processes]
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
        outcomes = [pickle.loads(result.read_bytes()) if result.exists() else None for _, result in processes]
    errors = [o[1] for o in outcomes if o is not None and o[0] == "error"]
    real = [
        e for e in errors if "Connection closed by peer" not in e and "Connection reset" not in e
    ] or errors
    if real:
        raise WorkerError(real[0])
    if any(codes):
        raise WorkerError(f"workers ended with {codes}")
    return [outcome[1] for outcome in outcomes]
