"""Check that files have the modes that the user's umask asks for, so that a group can share a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import run

SCRIPT = """
    import torch, zlaunch
    model = torch.nn.Linear(4, 1)
    engine, *_ = zlaunch.initialize(model=model, config="ds.json")
    engine.save_checkpoint("saved")
    engine.save_16bit_model("weights", "pytorch_model.bin")
    engine.save_16bit_model("weights", "model.safetensors")
    zlaunch.report(loss=1.0)
    engine.destroy()
"""
EXPORT = """
    import sys
    from zlaunch.cli.main import main
    for kind in ("bin", "safetensors"):
        assert main(["checkpoint", "export", "../saved", kind, "--format", kind, "--like", "../model"]) == 0
    assert main(["checkpoint", "import", "safetensors", "again"]) == 0
    assert main(["slurm", "script", "-o", "job.sbatch", "train.py"]) == 0
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("umask", [0o022, pytest.param(0o027, marks=pytest.mark.exhaustive)])
def test_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    prefix = ("sh", "-c", f'umask {umask:o}; exec "$@"', "sh")
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 2}}))
    launch = run(tmp_path, "--num_gpus=2", script=SCRIPT, prefix=prefix, env={"CUDA_VISIBLE_DEVICES": ""})
    assert launch.process.returncode == 0, launch.err
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "config.json").chmod(0o600)
    (tmp_path / "exported").mkdir()
    made = run(tmp_path / "exported", "--num_gpus=1", script=EXPORT, prefix=prefix)
    assert made.process.returncode == 0, made.err

    wrong, seen = [], 0
    for top in (
        "run",
        "saved",
        "weights",
        "exported/bin",
        "exported/safetensors",
        "exported/again",
        "exported",
    ):
        for path in (tmp_path / top).rglob("*"):
            if path.name in ("worker.py", "out", "err") and path.parent.name == "exported":
                continue  # the test's own
            if path.name in ("plan.json", "provenance.json", "packages.txt", "git.diff", "script_copy.py"):
                assert path.stat().st_mode & 0o777 == 0o600, "it has the run's environment, or its code"
                continue
            mode = path.stat().st_mode & 0o777
            if path == tmp_path / "exported" / "run":
                assert mode == 0o700, "a run's folder is for its user alone"
                continue
            program = path.is_dir() or path.name == "zero_to_fp32.py"
            seen += 1
            if mode != (0o777 if program else 0o666) & ~umask:
                wrong.append(f"{path.relative_to(tmp_path)} {mode:o}")
    assert wrong == [] and seen > 30
