"""Run the workers of ``zlaunch.notebook``: `python -m zlaunch.node.notebook_call FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Call the function that the folder holds and leave its result there."""
    import cloudpickle  # type: ignore[import-untyped, unused-ignore]

    folder = Path(sys.argv[1])
    known = json.loads((folder / "path.json").read_text())
    sys.path += [entry for entry in known if entry not in sys.path]
    function, args, kwargs = cloudpickle.loads((folder / "call.pkl").read_bytes())
    result = function(*args, **kwargs)
    (folder / f"result_{int(os.environ['RANK']):06d}.pkl").write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
