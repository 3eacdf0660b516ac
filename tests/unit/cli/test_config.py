"""Test `zlaunch config show`: the effective config, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zlaunch.cli.config import config as cli

SOURCE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "adamw", "params": {"lr": 1e-4, "weight_decay": "auto"}},
    "parallel": {"tensor": 2},
    "wandb": {"project": "secret-free"},
}


def show(folder: Path, source: dict[str, Any], *options: str) -> Result:
    file = folder / "ds.json"
    file.write_text(json.dumps(source), encoding="utf-8")
    return CliRunner().invoke(cli, ["show", str(file), *options])


def rows(text: str) -> dict[str, list[str]]:
    """Return key -> value and source of each line, as far as columns are apart."""
    split = [[word.strip() for word in line.split("  ") if word.strip()] for line in text.splitlines()]
    return {words[0]: words[1:] for words in split if len(words) == 3}


def test_every_value_with_its_source(tmp_path: Path) -> None:
    done = show(tmp_path, SOURCE, "--world-size", "4")
    assert done.exit_code == 0, done.output
    parts = done.output.split("\n\n")
    given, defaults, on_ranks = parts[:3]
    assert given.strip().startswith("Set by ds.json or derived from it:")
    assert rows(given)["train_batch_size"] == ["16", "ds.json"]
    assert rows(given)["train_micro_batch_size_per_gpu"][0] == "4"
    assert rows(given)["train_micro_batch_size_per_gpu"][1].startswith("derived: train_batch_size 16 / ")
    assert rows(given)["optimizer.params.weight_decay"] == ["0.01", "auto: torch's default for AdamW"]
    assert "fp16.enabled" not in given and rows(defaults)["fp16.enabled"] == ["false", "default"]
    assert len(rows(given)) + len(rows(defaults)) > 250
    assert on_ranks.startswith("On 4 ranks:")
    assert rows(on_ranks)["parallel axes"][0] == "data 2 * tensor 2"
    assert rows(on_ranks)["each loss is divided by"][0] == "2"
    assert rows(on_ranks)["the sum of gradients is divided by"][0] == "2"


def test_without_a_number_of_ranks(tmp_path: Path) -> None:
    done = show(tmp_path, {"train_batch_size": 3})
    assert done.exit_code == 0 and "On 1 rank (--world-size N for another number):" in done.output


def test_warnings_are_not_among_the_values(tmp_path: Path) -> None:
    done = show(tmp_path, {"train_batch_size": 3, "_note": 1, "gradient_clipping": "auto"})
    assert [line.partition(": ds.json: ")[0] for line in done.stderr.splitlines()] == ["warning", "warning"]
    assert "_note" not in done.stdout


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"bf16": True}, '"bf16": {"enabled": true}'),
        ({"train_batch_size": 6}, "6 is not a multiple of world size 4"),
        ({}, "no batch size is set"),
    ],
)
def test_a_config_that_is_no_good(tmp_path: Path, source: dict[str, Any], expected: str) -> None:
    done = show(tmp_path, source, "--world-size", "4")
    assert done.exit_code == 2 and expected in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ('{"train_batch_size": 1}', True),
        ('{"train_batch_size": 1}  // a comment', False),
        ('{"train_batch_size": 1,}', False),
    ],
)
def test_check_says_what_other_readers_do_not_take(tmp_path: Path, text: str, is_plain: bool) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(cli, ["check", str(file)])
    lines = done.output.splitlines()
    own = "ds.json: ok for your own loop, not for the Hugging Face Trainer and accelerate, which read plain"
    assert done.exit_code == 0 and len(lines) == 1
    assert lines[0] == "ds.json: ok" if is_plain else lines[0].startswith(own)


def test_check_refuses_auto_where_the_trainer_cannot_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_clipping": "auto"}  // mine', encoding="utf-8")
    done = CliRunner().invoke(cli, ["check", str(file)])
    assert done.exit_code == 2
    assert "ok" not in done.output and "plain JSON: remove comments" in done.output


@pytest.mark.parametrize(
    ("key", "value", "warns"),
    [
        ("gradient_clipping", "1.0", True),
        ("gradient_clipping", 1.0, False),
        ("gradient_clipping", "auto", False),
        ("optimizer", {"type": "AdamW", "params": {"lr": "1e-3"}}, True),
    ],
)
def test_check_warns_of_numbers_in_quotes(tmp_path: Path, key: str, value: Any, warns: bool) -> None:
    """zlaunch and DeepSpeed take them; the Trainer says that 1.0 is not 1.0."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 1, key: value}), encoding="utf-8")
    done = CliRunner().invoke(cli, ["check", str(file)])
    assert done.exit_code == 0
    assert ("compares it with its arguments as text" in done.output) == warns


def test_check_says_that_no_batch_size_is_set(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for text, is_told in (
        ("{}", True),
        ('{"train_batch_size": 1}', False),
        ('{"train_batch_size": "auto"}', False),
    ):
        file.write_text(text, encoding="utf-8")
        assert ("no batch size is set" in CliRunner().invoke(cli, ["check", str(file)]).output) == is_told


@pytest.mark.parametrize(
    ("micro", "steps", "wrong"),
    [
        (2, 3, ""),
        (6, None, ""),
        (4, None, "4, on any number of ranks; set it to 4 or 8"),
        (None, 5, "gradient_accumulation_steps 5, on any number of ranks; set it to 5 or 10"),
        (
            2,
            4,
            "* gradient_accumulation_steps 4 = 8, on any number of ranks; set it to 8 or a multiple of it",
        ),
    ],
)
def test_check_refuses_batch_sizes_of_no_number_of_ranks(
    tmp_path: Path, micro: int | None, steps: int | None, wrong: str
) -> None:
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    given = {"train_batch_size": 6, **{key: size for key, size in sizes.items() if size is not None}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given), encoding="utf-8")
    done = CliRunner().invoke(cli, ["check", str(file)])
    assert done.exit_code == (2 if wrong else 0), done.output
    assert ("ds.json: train_batch_size: 6 is not a multiple of" in done.stderr) == bool(wrong)
    assert wrong in done.stderr


def test_several_files_are_checked_and_one_mistake_fails(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    bad = tmp_path / "bad.json"
    good.write_text('{"train_batch_size": 4}')
    bad.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 4}}')
    done = CliRunner().invoke(cli, ["check", str(bad), str(good)])
    assert done.exit_code == 2 and "zero_optimization.stage" in done.stderr
    assert done.stdout.splitlines() == [f"{bad}:", f"{good}:", "good.json: ok"]
    alone = CliRunner().invoke(cli, ["check", str(good)])
    assert (alone.exit_code, alone.stdout) == (0, "good.json: ok\n")
    assert CliRunner().invoke(cli, ["check"]).exit_code == 2
