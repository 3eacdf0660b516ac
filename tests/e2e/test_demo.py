"""Test what `make demo` shows: the example trains at every stage, and plain torch reads its weights."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch

EXAMPLE = str(ROOT / "examples" / "train_gpt.py")
STEPS = 12


def demo(folder: Path, config: Path, *args: str) -> Launch:
    """A short run of the example with two workers, always on the CPU, that has ended."""
    script = (EXAMPLE, "--config", str(config), "--steps", str(STEPS), "--every", "4", *args)
    launch = Launch(folder, "--num_gpus", "2", *script, env={"CUDA_VISIBLE_DEVICES": ""})
    launch.wait()
    return launch


def config_for(folder: Path, stage: int) -> Path:
    """The demo's config at another stage and with a shorter warmup."""
    config = json.loads((ROOT / "examples" / "ds_stage2.json").read_text())
    config["zero_optimization"]["stage"] = stage
    config["scheduler"]["params"]["warmup_num_steps"] = 4
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (0, 1, 2)), 3])
def test_the_example_trains(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "saved"
    launch = demo(tmp_path, config_for(tmp_path, stage), "--save", str(weights))
    assert launch.process.returncode == 0, launch.err
    shown = launch.out + launch.err

    losses = {int(step): float(loss) for step, loss in re.findall(rf"step (\d+)/{STEPS} loss (\S+) ", shown)}
    assert sorted(losses) == [4, 8, 12], shown
    assert losses[12] < losses[4] - 0.3, shown
    validation = re.search(r"validation loss (\S+) -> (\S+)", shown)
    assert validation is not None, shown
    assert 5.3 < float(validation[1]) < 5.8 and float(validation[2]) < 4.5, shown

    effective = (launch.run_dir / "config.effective.json").read_text()
    assert re.search(rf'"stage":[^0-9]*{stage}\b', effective), effective

    if stage not in (0, 3):
        return  # all stages save the same way, whole or gathered
    script = ROOT / "examples" / "sample.py"  # in this process, which has torch
    monkeypatch.setattr(sys, "argv", [str(script), str(weights / "pytorch_model.bin"), "--length=20"])
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("def ") and len(said) > 15


@pytest.mark.exhaustive
def test_the_pipeline_example_trains_and_goes_on(tmp_path: Path) -> None:
    script = (str(ROOT / "examples" / "train_gpt_pipeline.py"), "--config")
    options = (str(ROOT / "examples" / "ds_pipeline.json"), "--checkpoints", str(tmp_path / "ckpt"))
    losses = []
    for steps in ("50", "52"):
        (tmp_path / steps).mkdir()
        launch = Launch(
            tmp_path / steps,
            *("--num_gpus", "2", *script, *options, "--steps", steps),
            env={"CUDA_VISIBLE_DEVICES": ""},
        )
        launch.wait()
        shown = launch.out + launch.err
        assert launch.process.returncode == 0, shown
        validation = re.search(r"validation loss (\S+) -> (\S+)", shown)
        assert validation is not None, shown
        losses.append((float(validation[1]), float(validation[2])))
        for share in re.findall(r"take .* \((\d+)%\)", shown):
            assert int(share) <= 100, shown
    assert 5.3 < losses[0][0] < 5.8 and losses[0][1] < 3.0
    assert losses[1][0] == losses[0][1]  # it begins with what the first run has saved


def test_sampling_needs_nothing_of_ours() -> None:
    source = (ROOT / "examples" / "sample.py").read_text() + (ROOT / "examples" / "gpt.py").read_text()
    assert "import zlaunch" not in source and "from zlaunch" not in source


def test_a_typo_in_the_config_stops_before_any_worker(tmp_path: Path) -> None:
    config = config_for(tmp_path, 2)
    config.write_text(config.read_text().replace('"stage"', '"overlap_com": true, "stage"'))
    launch = demo(tmp_path, config)
    assert launch.process.returncode == 2
    assert "zero_optimization.overlap_com: unknown key, did you mean overlap_comm?" in launch.err
    assert launch.out == "" and launch.events("spawn") == []


@pytest.mark.exhaustive
def test_the_example_trains_with_everything_offloaded(tmp_path: Path) -> None:
    config = json.loads((ROOT / "examples" / "ds_offload.json").read_text())
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "nvme")
    config["scheduler"]["params"]["warmup_num_steps"] = 4
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    launch = demo(tmp_path, path)
    shown = launch.out + launch.err
    assert launch.process.returncode == 0, shown
    assert " MiB offloaded, " in shown
    validation = re.search(r"validation loss (\S+) -> (\S+)", shown)
    assert validation is not None and float(validation[2]) < 4.5, shown
    assert list((tmp_path / "nvme").iterdir()) == []
