"""Run a module as several ranks, each of which pretends to have a GPU.

Imports take a rank five times as long as most cases. So one process imports everything, and each rank is a
fork of it, as in ``tests/runtime/workers.py``. That one forks from the server of multiprocessing, of which a
process has only one, and the pretended GPU has to be in place before the runtime is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.leftovers import unmarked
from tests.ports import reserved_port

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "torch._dynamo",
    "zlaunch.runtime.api",
    "tests.pretend_gpu.cases",
    "tests.pretend_gpu.mutations",
    "tests.runtime.frozen",  # last: compiles the host's kernels, and freezes everything imported above
)


class Ranks:
    """A process from which ranks are forked; close it, or use it in a ``with`` statement."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pretend_gpu.ranks"],
            cwd=ROOT,
            env={**unmarked(), "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would not be in the forks
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, module: str, arguments: Sequence[str], *, world: int, limit_s: float
    ) -> tuple[list[int], list[str]]:
        """Run `python -m module` as all ranks of a world; return each rank's exit code and output. After
        `limit_s` seconds ranks are killed, and have the code -9.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
            order = {
                "module": module,
                "arguments": list(arguments),
                "world": world,
                "limit_s": limit_s,
                "folder": folder,
                "environment": {
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            }
            print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            if not answer:
                code = self._process.wait()
                raise RuntimeError(f"the process from which ranks are forked ended with {code}")
            codes: list[int] = json.loads(answer)
            said = [Path(folder, str(rank)).read_text() for rank in range(world)]
        return codes, said

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main() -> None:
    """Import everything, then run orders from the standard input until it is closed."""
    from . import device

    device.install()
    for name in _IMPORTED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork of a process with threads may hang"
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(order: dict[str, Any]) -> list[int]:
    """Fork the ranks of an order, and return their exit codes."""
    pids = []
    for rank in range(order["world"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, order)
        pids.append(pid)
    deadline = time.monotonic() + order["limit_s"]
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
            elif pid not in codes and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _be_rank(rank: int, order: dict[str, Any]) -> None:
    """Run the module of an order in this process, and end it."""
    from .streams import place

    code = 1
    try:
        os.environ.update(order["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
        place.take(rank, order["world"])
        output = os.open(Path(order["folder"], str(rank)), os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the code behind is the parent's


if __name__ == "__main__":
    main()
