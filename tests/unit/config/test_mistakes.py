"""Test that each mistake of a new user's config gets the right advice; the mistakes are data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from zlaunch.cli.config import config as cli
from zlaunch.runtime.config import ConfigError, load

DATA = Path(__file__).parents[2] / "data" / "config_mistakes.yaml"
MISTAKES: list[dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("mistake", [pytest.param(each, id=each["name"]) for each in MISTAKES])
def test_advice(mistake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(mistake.get("file", "ds.json"))
    text = mistake.get("text")
    if text == "dir":
        file.mkdir()
    elif text is not None:
        file.write_text(text, encoding="utf-8")
    ranks = ["--world-size", str(mistake["ranks"])] if "ranks" in mistake else []
    done = CliRunner().invoke(cli, ["check", str(file), *ranks])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    ends = "error" if done.exit_code else "warning" if "warning:" in done.output else "ok"
    assert ends == mistake["ends"], done.output
    for words in mistake.get("says", ()):
        assert words in done.output
    for words in mistake.get("never", ()):
        assert words not in done.output


def test_the_data_names_each_mistake_once() -> None:
    assert len({each["name"] for each in MISTAKES}) == len(MISTAKES) >= 30


@pytest.mark.parametrize("stage", [5, "two"])
def test_a_rejected_stage_has_no_other_errors(stage: object) -> None:
    zero = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "step_in_backward": True,
    }
    del zero["offload_optimizer" if stage == "two" else "step_in_backward"]
    del zero["offload_param"]
    with pytest.raises(ConfigError) as error:
        load({"train_batch_size": 8, "zero_optimization": zero})
    (line,) = str(error.value).splitlines()
    assert "zero_optimization.stage: " in line
