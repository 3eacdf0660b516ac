"""Run a function in several real gloo processes and give back what each returned."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.limits import LIMIT_S, MATRIX_LIMIT_S

# One process imports torch; every worker is a fork of it, which saves seconds on each test.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "zlaunch.runtime.api", "pytest"])


def join() -> int:
    """Joins the process group of the workers; returns this worker's rank."""
    import torch.distributed as dist

    import zlaunch

    zlaunch.init_distributed()
    return dist.get_rank()


class WorkerError(AssertionError):
    """A worker raised; the text is its traceback."""


def _work(result: Path, env: dict[str, str], module: str, name: str, args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        outcome = ("ok", getattr(importlib.import_module(module), name)(*args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    result.write_bytes(pickle.dumps(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()
    raise SystemExit(0 if outcome[0] == "ok" else 1)


def run_workers(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``function(*args)`` in ``world_size`` processes joined by gloo; results in rank order.

    ``function`` is a module-level function of an importable test module; ``env`` is added to the workers'
    environment. Raises WorkerError with the first failing rank's traceback.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), **(env or {})}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    deadline = time.monotonic() + MATRIX_LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(world_size):
            result = Path(folder) / f"{rank}.pkl"
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
            job = (result, own, function.__module__, function.__qualname__, args)
            process = _context.Process(target=_work, args=job)
            process.start()
            workers.append((process, result))
        while (waiting := [process for process, _ in workers if process.is_alive()]) and (
            time.monotonic() < deadline
        ):
            multiprocessing.connection.wait([p.sentinel for p in waiting], deadline - time.monotonic())
            if any(process.exitcode for process, _ in workers):
                deadline = min(deadline, time.monotonic() + LIMIT_S)  # the others may wait for it for ever
        late = [rank for rank, (process, _) in enumerate(workers) if process.is_alive()]
        for process, _ in workers:
            process.kill()
            process.join()
        codes = [process.exitcode for process, _ in workers]
        outcomes: list[Any] = [
            pickle.loads(result.read_bytes()) if result.exists() else None for _, result in workers
        ]
    errors = [o[1] for o in outcomes if o is not None and o[0] == "error"]
    consequences = ("Connection closed by peer", "Connection reset", "PeerLost: rank")
    real = [e for e in errors if not any(text in e for text in consequences)] or errors
    if real:
        raise WorkerError(real[0])
    if late:
        raise WorkerError(f"ranks {late} had to be killed; exit codes {codes}")
    if any(codes):
        raise WorkerError(f"workers ended with {codes}")
    return [outcome[1] for outcome in outcomes]
