"""Test that `zlaunch checkpoint` finds checkpoints in the output_dir of a Hugging Face Trainer."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import zlaunch
from tests.unit.checkpoint.test_resume_of_a_trainer import lay_out
from zlaunch.cli.main import main
from zlaunch.runtime.checkpoint.convert.importer import read_foreign, write_foreign
from zlaunch.runtime.checkpoint.export import script

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """Lay out three checkpoints as the Trainer does; the value of their weight is their step."""
    for step in (2, 9, 10):
        weights = tmp_path / "weights.bin"
        torch.save({"weight": torch.full((3,), float(step), dtype=torch.bfloat16)}, weights)
        folder = tmp_path / "out" / f"checkpoint-{step}"
        write_foreign(read_foreign(str(weights)), str(folder), f"global_step{step}")
        (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "out" / "checkpoint-best").mkdir()
    (tmp_path / "out" / "checkpoint-11").mkdir()  # a save of only the model
    return tmp_path / "out"


def test_all_are_listed_by_the_name_of_their_folder(
    output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "ls", str(output_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["tag"], each["latest"]) for each in found] == [
        ("checkpoint-10", True),
        ("checkpoint-9", False),
        ("checkpoint-2", False),
    ]
    assert main(["checkpoint", "verify", str(output_dir), "--all"]) == 0
    assert capsys.readouterr().out.count("whole") == 3


def test_the_newest_is_taken_or_the_named_one(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(output_dir)]) == 0
    said = capsys.readouterr()
    assert f"{output_dir}: using checkpoint-10; others: checkpoint-9, checkpoint-2" in said.err
    assert str(output_dir / "checkpoint-10" / "global_step10") in said.out
    assert main(["checkpoint", "show", str(output_dir), "--tag", "checkpoint-2"]) == 0
    said = capsys.readouterr()
    assert "checkpoint-2/global_step2" in said.out and not said.err
    assert main(["checkpoint", "show", str(output_dir), "--tag", "checkpoint-7"]) == 2
    assert "has no checkpoint 'checkpoint-7': use one of checkpoint-10, " in capsys.readouterr().err
    (output_dir / "checkpoint-10" / "global_step10" / "whole.safetensors").write_bytes(b"")
    assert main(["checkpoint", "verify", str(output_dir), "--tag", "auto"]) == 0
    assert "checkpoint-9/global_step9: whole" in capsys.readouterr().out
    state = zlaunch.get_fp32_state_dict_from_zero_checkpoint(output_dir, "checkpoint-9")
    assert state["weight"].tolist() == [9.0] * 3


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_exported_config_has_the_dtype_of_the_weights(output_dir: Path, dtype: str, name: str) -> None:
    out = output_dir / "exported"
    assert main(["checkpoint", "export", str(output_dir), str(out)]) == 0
    assert main(["checkpoint", "export", str(output_dir), str(out), "--dtype", dtype]) == 0
    expected = {"model_type": "llama", "dtype": name, "text_config": {"torch_dtype": name}}
    assert json.loads((out / "config.json").read_text()) == expected
    assert json.loads((output_dir / "checkpoint-10" / "config.json").read_text()) == CONFIG


def test_what_save_model_leaves_in_the_output_dir_is_one_of_them(
    output_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights.bin"
    torch.save({"weight": torch.full((3,), 20.0)}, weights)
    write_foreign(read_foreign(str(weights)), str(output_dir), "global_step20")
    assert (output_dir / "latest").read_text() == "global_step20"
    assert main(["checkpoint", "show", str(output_dir)]) == 0
    assert "using global_step20; others: checkpoint-10, " in capsys.readouterr().err
    torch.save({"weight": torch.full((3,), 30.0)}, weights)  # training continues
    write_foreign(read_foreign(str(weights)), str(output_dir / "checkpoint-30"), "global_step30")
    state = zlaunch.get_fp32_state_dict_from_zero_checkpoint(output_dir)
    assert state["weight"].tolist() == [30.0] * 3, "not the older one that `latest` names"
    state = zlaunch.get_fp32_state_dict_from_zero_checkpoint(output_dir, "global_step20")
    assert state["weight"].tolist() == [20.0] * 3
    capsys.readouterr()
    assert main(["checkpoint", "ls", str(output_dir), "--json"]) == 0
    tags = [each["tag"] for each in json.loads(capsys.readouterr().out)]
    assert tags == ["checkpoint-30", "global_step20", "checkpoint-10", "checkpoint-9", "checkpoint-2"]
    assert main(["checkpoint", "verify", str(output_dir), "--all"]) == 0
    assert capsys.readouterr().out.count("whole") == 5


def test_one_that_was_cut_off_in_the_engine_s_save_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kill -9` in the middle of the save leaves the hidden folder that it writes into."""
    out = tmp_path / "out"
    lay_out(out, 100)
    (out / "checkpoint-200" / ".global_step200.host-1-2-3.tmp").mkdir(parents=True)
    assert main(["checkpoint", "ls", str(out)]) == 0
    first, second = (row for row in capsys.readouterr().out.splitlines() if "checkpoint-" in row)
    assert "checkpoint-200" in first and "incomplete (no trainer_state.json)" in first
    assert "checkpoint-100" in second and "latest" in second
    assert main(["checkpoint", "ls", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "tag": "checkpoint-200",
        "incomplete": "no trainer_state.json",
        "latest": False,
    }


def test_an_incomplete_one_is_marked_and_the_newest_complete_one_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for step in (100, 200, 300):
        lay_out(out, step)
    for name in ("trainer_state.json", "latest", "rng_state_0.pth", "rng_state_1.pth"):
        (out / "checkpoint-300" / name).unlink()  # Ctrl-C during the save
    reason = "incomplete (no trainer_state.json)"
    assert main(["checkpoint", "ls", str(out)]) == 0
    first, second, third = (row for row in capsys.readouterr().out.splitlines() if "checkpoint-" in row)
    assert reason in first and "latest" not in first
    assert "checkpoint-200" in second and "latest" in second and "latest" not in third
    assert main(["checkpoint", "ls", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["incomplete"] for each in found] == ["no trainer_state.json", None, None]
    warning = f"zlaunch: warning: {out / 'checkpoint-300'} is {reason}"
    assert main(["checkpoint", "export", str(out), str(tmp_path / "weights")]) == 0
    said = capsys.readouterr().err
    assert f"{warning}: using checkpoint-200 instead\n" in said
    assert f"{out}: using checkpoint-200; others: checkpoint-300, checkpoint-100\n" in said
    named = ["--tag", "checkpoint-300"]
    assert main(["checkpoint", "export", str(out), str(tmp_path / "weights"), *named]) == 0
    assert f"{warning}: it has the weights, but the Trainer cannot resume" in capsys.readouterr().err
    for arguments in ([str(out), *named], [str(out), "--all"], [str(out / "checkpoint-300"), "-t", "auto"]):
        assert main(["checkpoint", "verify", *arguments]) == 1
        printed = capsys.readouterr()
        assert f"global_step300: is not whole: checkpoint-300 is {reason}\n" in printed.err
        assert "global_step300: whole" not in printed.out
    assert main(["checkpoint", "verify", str(out), "--tag", "auto"]) == 0
    assert "checkpoint-200/global_step200: whole" in capsys.readouterr().out
    for step in (100, 200):
        (out / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert main(["checkpoint", "export", str(out), str(tmp_path / "weights")]) == 0
    said = capsys.readouterr().err
    assert f"{out}: using checkpoint-300; others: checkpoint-200" in said and f"{warning}: it has the" in said


def test_the_best_is_named_where_the_newest_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for step in (100, 200, 300):
        lay_out(out, step)
    for best, told in (("out/checkpoint-200", True), ("out/checkpoint-300", False), (None, False)):
        (out / "checkpoint-300" / "trainer_state.json").write_text(
            json.dumps({"best_model_checkpoint": best})
        )
        assert main(["checkpoint", "export", str(out), str(tmp_path / "weights")]) == 0
        advice = ". The Trainer's best is checkpoint-200: --tag checkpoint-200" if told else ""
        assert f"others: checkpoint-200, checkpoint-100{advice}\n" in capsys.readouterr().err


def test_no_name_of_the_stand_alone_script_hides_another() -> None:
    counts = Counter(
        name
        for node in ast.parse(script.text()).body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and is_stored(each)]
        )
    )
    assert [name for name, count in counts.items() if count > 1] == ["_PIECE_NUMEL"]


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def test_a_list_of_many_checkpoints_tells_how_many_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(10, 90, 10):
        lay_out(tmp_path, step)
    assert main(["checkpoint", "show", str(tmp_path), "--tag", "checkpoint-7"]) == 2
    named = ", ".join(f"checkpoint-{step}" for step in (80, 70, 60, 50, 40))
    assert f"has no checkpoint 'checkpoint-7': use one of {named} and 3 more\n" in capsys.readouterr().err
