"""The process behind ``run_workers``: reads a job on stdin, writes its result to the file named."""

from __future__ import annotations

import importlib
import pickle
import sys
import traceback
from pathlib import Path


def main() -> None:
    module, name, args = pickle.loads(sys.stdin.buffer.read())
    target = Path(sys.argv[1])
    try:
        outcome = ("ok", getattr(importlib.import_module(module), name)(*args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    target.write_bytes(pickle.dumps(outcome))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(0 if outcome[0] == "ok" else 1)


if __name__ == "__main__":
    main()
