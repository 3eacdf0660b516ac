"""Write the folders of runs as launchers leave them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STARTED = 1_790_000_000.0


def write_run(
    folder: Path,
    name: str,
    /,
    *,
    steps: int = 3,
    log: str = "",
    events: Iterable[Mapping[str, Any]] = (),
    **record: Any,
) -> Path:
    """Write a run of one rank that has ended after some steps."""
    path = folder / name
    (path / "logs").mkdir(parents=True)
    known = {
        **{"run_id": name, "host": socket.gethostname(), "pid": 1, "start_ticks": -1, "hosts": ["n1"]},
        **{"world_size": 1, "command": ["train.py", "--lr", "1"], "started": STARTED},
        **{"ended": STARTED + 60, "exit_code": 0, **record},
    }
    (path / "launcher.json").write_text(json.dumps(known))
    append(path, {"type": "start", "attempt": 0, "hosts": ["n1"], "time": STARTED})
    append(path, *(reported(step, steps) for step in range(1, steps + 1)), *events)
    if log:
        (path / "logs" / "rank_00000.log").write_text(log)
    return path


def reported(step: int, steps: int) -> dict[str, Any]:
    """Return the report of a step, with a loss of 4 / step."""
    values = {"step": step, "steps": steps, "loss": 4.0 / step}
    return {"type": "metrics", "rank": 0, "host": "n1", "time": STARTED + step, "values": values}


def append(path: Path, *events: Mapping[str, Any]) -> None:
    """Append events to a run's file."""
    with open(path / "events.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
