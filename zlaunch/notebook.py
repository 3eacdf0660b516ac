"""Run a function of a notebook on several workers: ``zlaunch.notebook(function, num_gpus=2)``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def notebook(
    function: Callable[..., Any],
    *args: Any,
    num_gpus: int | None = None,
    options: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` in fresh workers of this machine and return their results, by rank.

    The function may be one that the notebook itself defines: it is sent by value, with what it refers to, so
    that this process need not be forked (it may use a GPU already). What rank 0 prints appears here.
    ``num_gpus`` is the command's ``--num_gpus``, ``options`` are further ones: ``["--log_ranks", "all"]``.
    Interrupting the cell stops the workers. Raises RuntimeError when one has failed; TypeError for something
    that cannot be sent.
    """
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    with tempfile.TemporaryDirectory(prefix="zlaunch-notebook-") as folder:
        Path(folder, "path.json").write_text(json.dumps(sys.path))
        try:
            Path(folder, "call.pkl").write_bytes(cloudpickle.dumps((function, args, kwargs)))
        except Exception as error:
            raise TypeError(
                f"{function!r} and its arguments cannot be sent to the workers: {error}"
            ) from None
        command = [sys.executable, "-m", "zlaunch", "-q", "--no_local_rank", *options]
        if num_gpus is not None:
            command += ["--num_gpus", str(num_gpus)]
        _run([*command, "--module", "zlaunch.node.notebook_call", folder])
        results = sorted(Path(folder).glob("result_*.pkl"))
        return [cloudpickle.loads(path.read_bytes()) for path in results]


def _run(command: Sequence[str]) -> None:
    """Run a command with its output on this process's ``sys.stdout``, which a notebook shows."""
    tail: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            tail = [*tail[-20:], line]
        code = process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code:
        text = "".join(tail).strip()
        raise RuntimeError(f"zlaunch.notebook: the workers ended with exit code {code}\n{text}")
