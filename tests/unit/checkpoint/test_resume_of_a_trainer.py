"""Test that `zlaunch.resume_dir` returns the newest complete checkpoint of a Hugging Face Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import zlaunch
from zlaunch.runtime.checkpoint.convert.importer import read_foreign, write_foreign


def lay_out(output_dir: Path, step: int, *, engine: bool = True) -> Path:
    """Write a checkpoint's files as the Trainer of two ranks does."""
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    safetensors.torch.save_file({"weight": torch.ones(30)}, folder / "model.safetensors")
    torch.save({"lr": 0.1}, folder / "training_args.bin")
    if engine:
        write_foreign(read_foreign(str(folder / "model.safetensors")), str(folder), f"global_step{step}")
    else:
        torch.save({"state": {}}, folder / "optimizer.pt")
    for rank in range(2):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return folder


@pytest.fixture(autouse=True)
def _outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZLAUNCH_RESUME_DIR", "ZLAUNCH_RUN_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("engine", [True, False], ids=["under an engine", "without one"])
def test_the_largest_step_is_taken(tmp_path: Path, engine: bool) -> None:
    assert zlaunch.resume_dir(str(tmp_path / "out")) is None, "the first start"
    for step in (9, 10, 2):
        lay_out(tmp_path / "out", step, engine=engine)
    assert zlaunch.resume_dir(str(tmp_path / "out")) == str(tmp_path / "out" / "checkpoint-10")


def cut(name: str) -> Callable[[Path], None]:
    def shorten(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-20])

    return shorten


def without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for path in folder.glob(name):
            path.unlink()

    return remove


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("trainer_state.json"), "no trainer_state.json"),
        (cut("trainer_state.json"), "trainer_state.json: "),
        (without("rng_state*"), "no rng_state: saved with save_only_model, or interrupted"),
        (cut("rng_state_1.pth"), "rng_state_1.pth is cut off"),
        (cut("model.safetensors"), "model.safetensors is cut off"),
        (without("latest"), "no optimizer state, and no file latest"),
        (cut("global_step10/whole.safetensors"), "checkpoint-10/global_step10 is damaged"),
    ],
)
def test_an_incomplete_one_is_passed_over(
    damage: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = lay_out(tmp_path, 9)
    damage(lay_out(tmp_path, 10))
    assert zlaunch.resume_dir(str(tmp_path)) == str(complete)
    warned = capsys.readouterr().out
    assert f"checkpoint-10: is incomplete ({said}" in warned and "using checkpoint-9 instead" in warned
    without("trainer_state.json")(complete)
    assert zlaunch.resume_dir(str(tmp_path)) is None
    assert "using a new run instead" in capsys.readouterr().out


def write_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)


INDEX = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("model.safetensors"), "no weights, such as model.safetensors"),
        (lambda folder: write_index(folder, INDEX), "no model-2.safetensors, which model.safetensors.index"),
        (lambda folder: write_index(folder, "[]"), "model.safetensors.index.json is damaged"),
        (lambda folder: write_index(folder, '{"weight_map": {"a": 1}}'), "index.json is damaged"),
    ],
    ids=["none", "a shard", "another structure", "no name"],
)
def test_without_an_engine_the_weights_are_needed(
    damage: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = lay_out(tmp_path, 9, engine=False)
    damage(lay_out(tmp_path, 10, engine=False))
    assert zlaunch.resume_dir(str(tmp_path)) == str(complete)
    assert said in capsys.readouterr().out
    damage(lay_out(tmp_path, 11, engine=True))
    assert zlaunch.resume_dir(str(tmp_path)) == str(tmp_path / "checkpoint-11"), "the engine has them"


@pytest.mark.parametrize(
    "name",
    [
        *("adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin", "pytorch_model_fsdp.bin"),
        *("pytorch_model_fsdp_0/.metadata", "reference/adapter_model.safetensors"),
    ],
)
def test_weights_under_other_names_count(name: str, tmp_path: Path) -> None:
    folder = lay_out(tmp_path, 10, engine=False)
    (folder / name).parent.mkdir(exist_ok=True)
    if name.endswith(".bin"):
        torch.save({}, folder / name)
        (folder / "model.safetensors").unlink()
    else:
        (folder / "model.safetensors").rename(folder / name)
    assert zlaunch.resume_dir(str(tmp_path)) == str(folder)


def test_all_shards_of_an_index_make_a_complete_one(tmp_path: Path) -> None:
    folder = lay_out(tmp_path, 10, engine=False)
    write_index(folder, INDEX.replace("model-2", "model-1"))
    assert zlaunch.resume_dir(str(tmp_path)) == str(folder)


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b'{"a": 3}', b'{"a": {}}', b'{"a": {"data_offsets": []}}', b'{"\xff": 1}'),
        b'{"a": {"data_offsets": [0, "8"]}}',
    ],
)
def test_a_damaged_header_is_named(header: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete = lay_out(tmp_path, 9, engine=False)
    file = lay_out(tmp_path, 10, engine=False) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert zlaunch.resume_dir(str(tmp_path)) == str(complete)
    assert "is incomplete (model.safetensors has a damaged header)" in capsys.readouterr().out


def test_a_file_that_another_process_removes_meanwhile_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = lay_out(tmp_path, 9)
    latest = lay_out(tmp_path, 10) / "latest"
    read_text = Path.read_text

    def removed_before(file: Path, encoding: str | None = None) -> str:
        if file == latest:
            latest.unlink(missing_ok=True)
        return read_text(file, encoding)

    monkeypatch.setattr(Path, "read_text", removed_before)
    assert zlaunch.resume_dir(str(tmp_path)) == str(complete)
    assert "checkpoint-10: is incomplete (no optimizer state, and no file latest)" in capsys.readouterr().out


def test_a_restart_takes_a_complete_one_instead_of_where_the_engine_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = lay_out(tmp_path / "out", 9)
    interrupted = lay_out(tmp_path / "out", 10)
    monkeypatch.setenv("ZLAUNCH_RESUME_DIR", str(interrupted))
    assert zlaunch.resume_dir() == zlaunch.resume_dir(str(tmp_path / "out")) == str(interrupted)
    without("trainer_state.json")(interrupted)
    assert zlaunch.resume_dir() == zlaunch.resume_dir(str(tmp_path / "out")) == str(complete)


def test_a_restart_stays_with_the_checkpoints_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = lay_out(tmp_path, 2, engine=False)
    saved = lay_out(tmp_path, 4, engine=False)
    other = lay_out(tmp_path, 6, engine=False)
    without("trainer_state.json")(lay_out(tmp_path, 8, engine=False))
    monkeypatch.setenv("ZLAUNCH_RESUME_DIR", str(saved))
    given = (None, str(tmp_path), str(start), str(other))
    assert [zlaunch.resume_dir(each) for each in given] == [str(saved)] * 4
    assert not capsys.readouterr().out, "what another run has left is no reason for a warning"
    without("trainer_state.json")(saved)
    assert zlaunch.resume_dir(str(tmp_path)) == str(start)
    assert (
        "checkpoint-4: is incomplete (no trainer_state.json): using checkpoint-2" in capsys.readouterr().out
    )


def test_a_checkpoint_that_is_named_is_taken_or_refused(tmp_path: Path) -> None:
    named = lay_out(tmp_path, 2, engine=False)
    lay_out(tmp_path, 6, engine=False)
    assert zlaunch.resume_dir(str(named)) == str(named)
    cut("optimizer.pt")(named)
    refused = f"{named} is incomplete (optimizer.pt is cut off): pass {tmp_path} to resume from the newest"
    with pytest.raises(zlaunch.CheckpointError, match=re.escape(refused)):
        zlaunch.resume_dir(str(named))


def test_a_loop_that_names_its_folders_likewise_is_no_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lay_out(tmp_path, 10)
    without("tr*")(folder)
    monkeypatch.setenv("ZLAUNCH_RESUME_DIR", str(folder))
    assert zlaunch.resume_dir(str(tmp_path)) == str(folder)


@pytest.mark.parametrize(
    ("trial", "described", "search"),
    [
        ("sweep/001", "sweep/sweep.json", "the sweep"),
        ("tune/runs/001", "tune/tuned.json", "zlaunch tune"),
    ],
)
def test_a_trial_of_a_search_does_not_resume_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial: str, described: str, search: str
) -> None:
    lay_out(tmp_path / "shared", 10)
    (tmp_path / trial).mkdir(parents=True)
    (tmp_path / described).touch()
    monkeypatch.setenv("ZLAUNCH_RUN_DIR", str(tmp_path / trial))
    with pytest.raises(RuntimeError, match=f"trial 001 of {search} shares that folder"):
        zlaunch.resume_dir(str(tmp_path / "shared"))
