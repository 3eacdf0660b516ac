"""Run the tiny variant of each recipe of examples/recipes on CPU workers, and the notebook's cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.helpers import ROOT, Launch, run
from tests.limits import LIMIT_S
from tests.needs import needs_package

RECIPES = ROOT / "examples" / "recipes"
MIXTURE = ("--model", "models/moe-8x7b")
OWN_LOOP = {
    "pretrain_7b": ("pretrain.py", "--config", "pretrain_7b.json"),
    "moe": ("pretrain.py", "--config", "moe_tiny.json", *MIXTURE),
    "long_context": ("pretrain.py", "--config", "long_context_tiny.json"),
}
TRAINER = {
    "full_7b": ("finetune.py", "--deepspeed", "full_7b.json", "--bf16", "true"),
    "lora_7b": ("finetune.py", "--lora", "--deepspeed", "lora_7b.json", "--bf16", "true"),
}
if find_spec("trl") is not None:  # no dependency of the tests: where it is installed, its recipe runs, too
    TRAINER["grpo_7b"] = ("grpo.py", "--deepspeed", "grpo_7b.json", "--bf16", "true")


def run_tiny(folder: Path, script: str, *words: str) -> Launch:
    """Run a recipe's tiny variant, whose steps are seen in the run's events."""
    arguments = [str(RECIPES / word) if (RECIPES / word).exists() else word for word in words]
    launch = run(folder, "--num_gpus=2", "--no_local_rank", str(RECIPES / script), *arguments, "--tiny")
    assert launch.process.returncode == 0, launch.err
    steps = {event["values"].get("step") for event in launch.events("metrics") if event["rank"] == 0}
    assert 3 in steps, "the recipe reports its steps"
    return launch


@needs_package("transformers")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OWN_LOOP)
def test_the_tiny_variant(tmp_path: Path, name: str) -> None:
    assert "after 3 steps" in run_tiny(tmp_path, *OWN_LOOP[name]).out


@needs_package("transformers")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRAINER)
def test_the_tiny_variant_with_the_trainer(tmp_path: Path, name: str) -> None:
    more = ("--output_dir", "trained", "--save_strategy", "no", "--report_to", "none")
    launch = run_tiny(tmp_path, *TRAINER[name], *more)
    assert "training loss" in launch.out or "3 steps" in launch.out


def test_every_config_of_a_recipe_is_run_or_has_a_tiny_one() -> None:
    commands = (*OWN_LOOP.values(), *TRAINER.values())
    tested = {word.removesuffix(".json") for words in commands for word in words}
    for path in RECIPES.glob("*.json"):
        if path.stem != "grpo_7b":
            assert path.stem in tested or f"{path.stem}_tiny" in tested, path.name
    for path in RECIPES.glob("*_tiny.json"):  # nothing but the size of an axis differs
        full = json.loads((path.parent / f"{path.stem.removesuffix('_tiny')}.json").read_text())
        tiny = json.loads(path.read_text())
        axes, small = full.pop("parallel"), tiny.pop("parallel")
        assert full == tiny and axes.keys() == small.keys() and set(small.values()) == {2}


@pytest.mark.exhaustive
def test_the_cells_of_the_notebook(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 3 and all(not cell["outputs"] for cell in notebook["cells"] if "outputs" in cell)
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0: loss" in done.stdout and "losses of 2 ranks" in done.stdout
