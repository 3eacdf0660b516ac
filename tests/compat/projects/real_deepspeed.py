"""Answer for ``survey`` what DeepSpeed takes: ``real_deepspeed.py QUESTION < cases``. Imports no zlaunch."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from typing import Any


class _World:
    """Stands for the ranks that a config's batch sizes are made for."""

    def __init__(self, config: dict[str, Any]) -> None:
        micro = config.get("train_micro_batch_size_per_gpu") or 1
        steps = config.get("gradient_accumulation_steps") or 1
        whole = config.get("train_batch_size") or micro * steps
        known = all(isinstance(each, int) for each in (micro, steps, whole))
        self._size = max(1, whole // (micro * steps)) if known else 1

    def get_data_parallel_world_size(self) -> int:
        return self._size


def takes_config(config: dict[str, Any]) -> bool:
    """Tell whether DeepSpeed accepts a config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config, mpu=_World(config))
    except Exception:
        return False
    return True


def takes_command(words: list[str]) -> bool:
    """Tell whether DeepSpeed's launcher can read the words of a command."""
    from deepspeed.launcher import runner

    try:
        runner.parse_args(words)
    except SystemExit as end:
        return not end.code
    return True


def find_name(name: str) -> Any:
    """Import a dotted name, or read it from a module or class that can be imported. Raises ImportError or
    AttributeError, or what the module raises.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        parts = name.rpartition(".")
        if not parts[0]:
            raise
        return getattr(find_name(parts[0]), parts[2])


def has_name(name: str) -> bool:
    """Tell whether a dotted name can be found."""
    try:
        find_name(name)
    except Exception:
        return False
    return True


def main() -> None:
    """Read the cases, and print the answers in one line."""
    cases = json.load(sys.stdin)
    question = {each.__name__: each for each in (takes_config, takes_command, has_name)}[sys.argv[1]]
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(io.StringIO()):
        answers = [question(case) for case in cases]
    print("answers:" + json.dumps(answers))


if __name__ == "__main__":
    main()
