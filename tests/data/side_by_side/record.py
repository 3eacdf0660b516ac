"""Write down what ``side_by_side.py`` says under the real DeepSpeed.

``python -m tests.data.side_by_side.record FOLDER``, where ``pip install --target FOLDER deepspeed==0.19.8``
has put it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    env = {**os.environ, "PYTHONPATH": sys.argv[1], "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for world in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
        command += [
            "--master_port=29777",
            str(HERE.parents[1] / "compat" / "side_by_side.py"),
            str(HERE / f"deepspeed_{world}.json"),
        ]
        subprocess.run(command, env=env, check=True)


if __name__ == "__main__":
    main()
