"""Run a function in several real processes, joined by gloo or NCCL, and give back what each returned."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.devices import VISIBLE, shown_gpus
from tests.limits import RANKS_LIMIT_S
from tests.ports import reserved_port

# One process imports what tests use, and every rank is a fork of it: to import transformers or numba takes a
# rank ten times as long as most tests. What is not installed is left out.
_IMPORTED = [
    "torch",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "tests.needs",
    "zlaunch.runtime.api",
    "zlaunch.optim",
    "zlaunch.runtime.memory.fake_step",
    "zlaunch.runtime.parallel.stages",
    "tests.runtime.models",
    "zlaunch.cuda_ops.host_kernels",
    "zlaunch.cuda_ops.narrow_host_kernels",
    "zlaunch.cuda_ops.quantize_host_kernels",
    "zlaunch.cuda_ops.signs_host_kernels",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "tests.runtime.frozen",  # last: freezes everything imported above
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)
# An import that asks whether there is a GPU would initialize CUDA, which the forks could not use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_around: Callable[[], AbstractContextManager[None]] = nullcontext
"""Surrounds what each rank runs."""


def use_machine(module: str, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Run ranks on a machine that a module pretends.

    Args:
        module: Is imported before anything else in the process from which ranks are forked.
        around: Makes what surrounds each rank's function: it may fail the rank at the end.
    """
    global _around
    _context.set_forkserver_preload([module, *_IMPORTED])
    _around = around


def start_fork_server() -> None:
    """Start the fork server and wait until it has imported and compiled everything."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()


def join() -> int:
    """Join the process group of the workers; return this worker's rank."""
    import torch.distributed as dist

    import zlaunch

    zlaunch.init_distributed()
    return dist.get_rank()


class WorkerError(AssertionError):
    """A worker raised; the text is its traceback."""


def _work(
    result: Path,
    env: dict[str, str],
    around: Callable[[], AbstractContextManager[None]],
    module: str,
    name: str,
    args: tuple[Any, ...],
) -> None:
    # The fork server has the environment of the test that started it; a rank gets that of its own test.
    os.environ.clear()
    os.environ.update(env)
    # A rank that is about to be killed is asked for its stacks. The file stays open while the rank lives.
    stacks = result.with_suffix(".stacks").open("w")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    from tests.poison import poison

    torch.set_num_threads(1)
    # As in a worker of a launch: a rank that starts processes would start a fork server of its own.
    multiprocessing.set_start_method("fork", force=True)
    poison()
    try:
        with around():
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
    limit_s: float = RANKS_LIMIT_S,
) -> list[Any]:
    """Run ``function(*args)`` in ``world_size`` processes; return the results in rank order.

    Ranks of a test that uses GPUs see one GPU each (``tests/devices.py``), others none. Where there are too
    few GPUs, the test is skipped.

    Args:
        function: A module-level function of an importable test module.
        env: Added to the ranks' environment.
        limit_s: Ranks that take longer are killed.

    Raises:
        WorkerError: with the first failing rank's traceback, or with the stacks of the ranks that hang.
    """
    common = {**os.environ, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), **(env or {})}
    gpus = shown_gpus()
    if gpus and len(gpus) < world_size:
        pytest.skip(f"{world_size} ranks need as many GPUs; this machine has {len(gpus)}")
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        workers: list[tuple[Any, Path]] = []
        late: dict[int, Any] = {}
        stacks = ""
        try:
            for rank in range(world_size):
                result = Path(folder) / f"{rank}.pkl"
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if gpus:
                    place[VISIBLE] = gpus[rank]
                own = {**common, **place, **(env or {})}
                job = (result, own, _around, function.__module__, function.__qualname__, args)
                process = _context.Process(target=_work, args=job)
                process.start()
                workers.append((process, result))
            while (waiting := [process for process, _ in workers if process.is_alive()]) and (
                time.monotonic() < deadline
            ):
                sentinels = [process.sentinel for process in waiting]
                multiprocessing.connection.wait(sentinels, deadline - time.monotonic())
                if any(process.exitcode for process, _ in workers):  # the others may wait for it for ever
                    deadline = min(deadline, time.monotonic() + RANKS_LIMIT_S)
            late = {rank: process for rank, (process, _) in enumerate(workers) if process.is_alive()}
            stacks = _stacks(late, Path(folder))
        finally:  # also where the test has reached its own limit
            for process, _ in workers:
                process.kill()
            for process, _ in workers:
                process.join()
        codes = [process.exitcode for process, _ in workers]
        outcomes: list[Any] = [
            pickle.loads(result.read_bytes()) if result.exists() else None for _, result in workers
        ]
    errors = [o[1] for o in outcomes if o is not None and o[0] == "error"]
    consequences = ("Connection closed by peer", "Connection reset", "PeerLost: rank")
    real = [e for e in errors if not any(text in e for text in consequences)] or errors
    if real:
        raise WorkerError(f"{real[0]}\n{stacks}" if late else real[0])
    if late:
        raise WorkerError(f"ranks {list(late)} had to be killed; exit codes {codes}\n{stacks}")
    if any(codes):
        raise WorkerError(f"workers ended with {codes}")
    return [outcome[1] for outcome in outcomes]


def _stacks(late: Mapping[int, multiprocessing.process.BaseProcess], folder: Path) -> str:
    """Have ranks that hang write the stacks of their threads, and return these."""
    for process in late.values():
        with suppress(OSError, TypeError):
            os.kill(process.pid, signal.SIGUSR2)  # type: ignore[arg-type]
    if late:
        time.sleep(0.5)  # the handler writes at once; on a very busy machine the stacks may be missing
    paths = {rank: folder / f"{rank}.stacks" for rank in late}
    return "\n".join(
        f"rank {rank} stood at\n{path.read_text()[:4000]}" for rank, path in paths.items() if path.exists()
    )
