"""Run a worker of ``zlaunch.launch``: `python -m zlaunch.node.function_call FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from zlaunch.node.long_traceback import shorten
from zlaunch.runtime.trust import Folder

CALL = "call.pkl"
PATH = "path.json"
RESULT = "result_*.pkl"
ERROR = "error_*.pkl"
"""Patterns of the files that hold what ranks gave back, or raised: the star is ATTEMPT_RANK."""


def main() -> None:
    """Call the function that the folder holds and leave its result, or its exception, there."""
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    folder = Path(sys.argv[1])
    number = int(os.environ["RANK"])
    rank = f"{int(os.environ['ZLAUNCH_RESTART_COUNT']):04d}_{number:06d}"
    with Folder(folder) as checked:
        known = json.loads((checked.path / PATH).read_text())
        call = (checked.path / CALL).read_bytes()
    sys.path += [entry for entry in known if entry not in sys.path]
    try:
        function, args, kwargs = cloudpickle.loads(call)
        result = function(*args, **kwargs)
        _write(folder / RESULT.replace("*", rank), cloudpickle.dumps(result))
    except Exception as error:
        left_out = shorten(error)
        about = {"time": time.time(), "rank": number, "traceback": left_out + traceback.format_exc()}
        _write(folder / ERROR.replace("*", rank), cloudpickle.dumps({**about, "error": _sent(error)}))
        raise


def _sent(error: Exception) -> bytes | None:
    """Return an exception as bytes; None for one that would not arrive as it is."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(error)
        # An exception whose class takes other arguments than its args pickles, and fails here.
        cloudpickle.loads(data)
    except Exception:
        return None
    return data


def _write(path: Path, data: Any) -> None:
    with Folder(path.parent) as folder:
        temporary = folder.path / path.with_suffix(".new").name
        temporary.write_bytes(data)
        temporary.replace(folder.path / path.name)  # whole, or not there


if __name__ == "__main__":
    main()
