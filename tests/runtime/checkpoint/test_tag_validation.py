"""Test ``checkpoint.tag_validation``: what becomes of a save for which the ranks give different tags."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

CASES = [(how, asynchronous) for how in (None, "Warn", "Ignore", "Fail") for asynchronous in (False, True)]


def _save_each(folder: str) -> list[tuple[str, str, list[str]]]:
    return [_save(f"{folder}/{index}", *case) for index, case in enumerate(CASES)]


def _save(folder: str, how: str | None, asynchronous: bool) -> tuple[str, str, list[str]]:
    """What was raised, what was printed, and what is there."""
    zlaunch.init_distributed()
    checkpoint = {"asynchronous": asynchronous} | ({"tag_validation": how} if how else {})
    engine, *_ = zlaunch.initialize(model=net(), config=config(2, 2, checkpoint=checkpoint))
    train_engine(engine, batches(1, 4 * engine.world_size))
    said, problem = io.StringIO(), ""
    with redirect_stdout(said):
        try:
            engine.save_checkpoint(folder, tag=f"of{engine.global_rank}")
            engine.wait_for_checkpoint()
        except CheckpointError as error:
            problem = str(error)
    saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if not problem:
        train_engine(engine, batches(1, 4 * engine.world_size))
        engine.load_checkpoint(folder)
        assert all(torch.equal(value, saved[name]) for name, value in engine.module.state_dict().items())
    engine.save_checkpoint(folder, tag="same")  # nothing is left half-way
    engine.wait_for_checkpoint()
    engine.destroy()
    return problem, said.getvalue(), there


@pytest.mark.exhaustive
def test_different_tags(tmp_path: Path) -> None:
    tags = "rank 0 passes tag 'of0', rank 1 passes tag 'of1', rank 2 passes tag 'of2'"
    for case, *ranks in zip(CASES, *run_workers(_save_each, 3, str(tmp_path)), strict=True):
        first, second, third = ranks
        if case[0] == "Fail":
            assert first[0] == second[0] == third[0] and first[2] == [], case
            assert tags in first[0] and 'tag_validation is "Fail"' in first[0], case
            continue
        told = case[0] != "Ignore"
        assert first[0] == second[0] == third[0] == "", case
        assert "of0" in first[2] and "of1" not in first[2] and "of2" not in first[2], case
        assert (tags in first[1]) == told and ("saving under rank 0's tag 'of0'" in first[1]) == told, case
        assert "tag" not in second[1] + third[1], case


def _load(folder: str) -> str:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(2, 2))
    train_engine(engine, batches(1, 4 * engine.world_size))
    for tag in ("a", "b"):
        engine.save_checkpoint(folder, tag=tag)
    try:
        engine.load_checkpoint(folder, tag="ab"[engine.global_rank])
        return ""
    except zlaunch.RankMismatchError as error:
        return str(error)
    finally:
        engine.load_checkpoint(folder, tag="a")
        engine.destroy()


def test_no_rank_loads_another_checkpoint_than_it_asked_for(tmp_path: Path) -> None:
    for text in run_workers(_load, 2, str(tmp_path / "saved")):
        assert "rank 1 passes tag 'b', but rank 0 'a'" in text
