"""Tell the user how to attach a debugger to a rank that waits for one: `--debug RANK`."""

from __future__ import annotations

import json

LIFTED = (
    "no timeout ends the run: --hang_timeout and NCCL's monitor are off, and collectives wait up to 20 days"
)


def advice(rank: int, host: str, address: object, port: object) -> str:
    """Return where the rank waits, the block for VS Code's launch.json, and a warning if others reach it."""
    block = {
        "name": f"zlaunch rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": address, "port": port},
    }
    lines = [
        f"zlaunch: rank {rank} on {host} waits for a debugger at {address}:{port}",
        'VS Code: add this to "configurations" in .vscode/launch.json, then press F5:',
        json.dumps(block),
    ]
    if address != "127.0.0.1":
        lines.insert(
            1, "warning: anyone who reaches this port can run code as you; use it in networks you trust"
        )
    return "\n  ".join(lines)
