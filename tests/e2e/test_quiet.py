"""Test what a run says of itself, and that -q leaves only the workers' output, warnings and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import Launch, run

TRAIN = """
    import torch
    import {module} as library
    import zlaunch
    with zlaunch.zero.Init(config="ds.json"):
        model = torch.nn.Linear(4, 1)
    engine, *_ = library.initialize(model=model, config="ds.json")
    engine.save_checkpoint("saved")
    engine.load_checkpoint("saved")
    zlaunch.report(loss=1.0)
    if engine.global_rank == 0:
        print("my own line")
"""
NOTICE = "gradient_clipping is not set"


def trained(folder: Path, *flags: str, module: str = "zlaunch", **config: object) -> Launch:
    """A run of two workers that has ended well."""
    base = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    (folder / "ds.json").write_text(json.dumps({**base, "zero_optimization": {"stage": 3}, **config}))
    script = TRAIN.format(module=module)
    env = {"CUDA_VISIBLE_DEVICES": ""}
    launch = run(folder, "--num_gpus=2", *flags, script=script, args=("--config", "ds.json"), env=env)
    assert launch.process.returncode == 0, launch.out + launch.err
    return launch


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", ["zlaunch", pytest.param("deepspeed", marks=pytest.mark.exhaustive)])
def test_quiet_is_quiet(tmp_path: Path, module: str) -> None:
    launch = trained(tmp_path, "-q", module=module)
    assert (launch.out, launch.err) == ("my own line\n", "")


@pytest.mark.exhaustive
def test_warnings_are_said_in_any_case(tmp_path: Path) -> None:
    launch = trained(tmp_path, "-q", strict=False, my_own_key=1)
    assert "zlaunch: warning: ds.json: my_own_key: unknown key" in launch.out
    assert "memory per rank" not in launch.out


@pytest.mark.exhaustive
def test_who_needs_no_notice_of_deepspeeds_defaults_gets_none(tmp_path: Path) -> None:
    launch = trained(tmp_path)
    lines = [line for line in launch.out.splitlines() if not line.startswith("loss")]
    assert len(lines) == 3, lines
    start, loaded, own = lines
    assert start.startswith("zlaunch: memory per rank: ") and loaded.startswith("zlaunch: loaded ")
    assert own == "my own line"


@pytest.mark.exhaustive
def test_scripts_of_deepspeed_are_told_of_a_default_that_has_changed(tmp_path: Path) -> None:
    for given, times in (({}, 1), ({"gradient_clipping": 1.0}, 0)):
        folder = tmp_path / str(times)
        folder.mkdir()
        assert trained(folder, module="deepspeed", **given).out.count(NOTICE) == times
