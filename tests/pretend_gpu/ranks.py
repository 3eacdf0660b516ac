"""Run a module as several ranks, each of which pretends to have a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.ports import reserved_port

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    module: str, arguments: Sequence[str], *, world: int, limit_s: float
) -> tuple[list[int], list[str]]:
    """Run `python -m module` as all ranks of a world; return each rank's exit code and output. Raises
    subprocess.TimeoutExpired after `limit_s` seconds; no rank is left running.
    """
    with reserved_port() as port:
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **common, "RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            said = [process.communicate(timeout=limit_s)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return [process.returncode for process in ranks], said
