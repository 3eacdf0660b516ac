"""Test snapshots in memory: what a restarted run goes on from, with the nodes that are left."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.limits import LIMIT_S
from tests.runtime.models import batches, config, loss_of, net
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.checkpoint import in_memory, save
from zlaunch.runtime.checkpoint.format.tensor_file import CheckpointError

EVERY = 4
STEPS = 10
BATCHES = batches(STEPS, 12)


def engine_of(folder: str, nodes: Sequence[int], stage: int, copies: int = 2) -> Any:
    """An engine whose rank believes to be on the node that ``nodes`` names for it."""
    os.environ["ZLAUNCH_MEMORY_DIR"] = f"{folder}/node{nodes[torch.distributed.get_rank()]}"
    world = torch.distributed.get_world_size()
    settings = config(stage, 12 // world) | {"checkpoint": {"in_memory": {"every": EVERY, "copies": copies}}}
    engine = zlaunch.initialize(model=net().double(), config=settings)[0]
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    found = []
    for tokens in BATCHES[first:last]:
        part = tokens.chunk(engine.world_size)[engine.global_rank]
        loss = loss_of(engine, part)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def _first(folder: str, nodes: Sequence[int], stage: int, copies: int = 2) -> list[float]:
    join()
    engine = engine_of(folder, nodes, stage, copies)
    engine.client_state = lambda: {"seen": engine.global_steps, "rank": engine.global_rank}
    losses = train(engine, 0, STEPS)
    engine.destroy()
    return losses


def _second(folder: str, nodes: Sequence[int], stage: int) -> tuple[int, dict[str, Any], list[float]]:
    join()
    engine = engine_of(folder, nodes, stage)
    path, state = engine.load_checkpoint(None)
    assert (path is None) == (engine.global_steps == 0)
    first = engine.global_steps
    engine.client_state = dict
    losses = train(engine, first, STEPS)
    engine.destroy()
    return first, state, losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_restart_goes_on_from_the_last_snapshot(stage: int, tmp_path: Path) -> None:
    whole = run_workers(_first, 2, str(tmp_path), [0, 0], stage)
    (kept,) = (tmp_path / "node0" / "engine_0").glob("global_step*")
    assert kept.name == "global_step8"
    for rank, (first, state, losses) in enumerate(run_workers(_second, 2, str(tmp_path), [0, 0], stage)):
        assert (first, state) == (8, {"seen": 8, "rank": rank})
        assert losses == whole[rank][8:]


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_node_s_part_comes_from_its_neighbour(stage: int, lost: int, tmp_path: Path) -> None:
    """Three nodes; another one takes the place of the one that is gone."""
    whole = run_workers(_first, 3, str(tmp_path), [0, 1, 2], stage)
    shutil.rmtree(tmp_path / f"node{lost}")
    nodes = [3 if node == lost else node for node in range(3)]
    for rank, (first, state, losses) in enumerate(run_workers(_second, 3, str(tmp_path), nodes, stage)):
        assert (first, state) == (8, {"seen": 8, "rank": rank})
        assert losses == whole[rank][8:]


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_fewer_nodes_go_on_from_what_they_have(stage: int, tmp_path: Path) -> None:
    whole = run_workers(_first, 3, str(tmp_path), [0, 1, 2], stage)
    shutil.rmtree(tmp_path / "node1")
    found = run_workers(_second, 2, str(tmp_path), [0, 2], stage)
    means = torch.tensor([losses for _, _, losses in found]).mean(0)
    assert [first for first, _, _ in found] == [8, 8]
    torch.testing.assert_close(means, torch.tensor([each[8:] for each in whole]).mean(0))


@pytest.mark.exhaustive
def test_two_lost_neighbours_are_too_many(tmp_path: Path) -> None:
    run_workers(_first, 3, str(tmp_path), [0, 1, 2], 3)
    shutil.rmtree(tmp_path / "node1")
    shutil.rmtree(tmp_path / "node2")
    found = run_workers(_second, 3, str(tmp_path), [0, 1, 2], 3)
    assert [first for first, _, _ in found] == [0, 0, 0]


@pytest.mark.exhaustive
def test_a_node_of_several_ranks_gives_copies_of_all(tmp_path: Path) -> None:
    whole = run_workers(_first, 3, str(tmp_path), [0, 0, 1], 3)
    shutil.rmtree(tmp_path / "node0")
    for rank, (first, _, losses) in enumerate(run_workers(_second, 3, str(tmp_path), [2, 2, 1], 3)):
        assert first == 8 and losses == whole[rank][8:]


def _disk(folder: str, last: int) -> tuple[int, str | None]:
    """Save on disk while an earlier step's snapshot is still being written in the background."""
    join()
    saved = threading.Event()
    write = save.write_manifest

    def write_late(path: Path, *entries: Any) -> None:
        if "disk" not in path.parts:
            saved.wait(LIMIT_S)
        write(path, *entries)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save, "write_manifest", write_late)
        engine = engine_of(folder, [0, 0], 2)
        engine.client_state = dict
        train(engine, 0, last)
        engine.save_checkpoint(f"{folder}/disk")
        saved.set()
        engine.destroy()
    os.environ["ZLAUNCH_MEMORY_DIR"] = f"{folder}/node0"
    again = engine_of(folder, [0, 0], 2)
    again.checkpoints._snapshots._memory = Path(f"{folder}/node0/engine_0")
    path, _ = again.load_checkpoint(f"{folder}/disk")
    found = again.global_steps, path
    again.load_checkpoint(f"{folder}/disk")  # a later load is what it says
    assert again.global_steps == last
    again.destroy()
    return found


def test_the_newer_one_of_disk_and_memory_is_loaded(tmp_path: Path) -> None:
    for steps, path in run_workers(_disk, 2, str(tmp_path), 6):
        assert steps == 6 and path == f"{tmp_path}/disk/global_step6"


def _without_room(folder: str) -> tuple[str, list[float]]:
    rank = join()
    engine = engine_of(folder, [0, 1], 3)
    engine.client_state = lambda: {"seen": engine.global_steps, "rank": engine.global_rank}

    def full(path: Path, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    losses = train(engine, 0, EVERY + 1)
    engine.checkpoints._snapshots.wait()
    if rank == 1:
        in_memory._make_room = full
    with redirect_stdout(io.StringIO()) as out:
        losses += train(engine, EVERY + 1, STEPS)
        engine.destroy()
    return out.getvalue(), losses


@pytest.mark.rotated
def test_where_a_node_has_no_room_for_a_copy_the_snapshot_before_stays(tmp_path: Path) -> None:
    said, losses = zip(*run_workers(_without_room, 2, str(tmp_path)), strict=True)
    assert said[0].count("in-memory snapshot failed, training continues: rank 1: ") == 1 and not said[1]
    assert "node1/engine_0" in said[0] and "no space left" in said[0]
    for rank, found in enumerate(run_workers(_second, 2, str(tmp_path), [0, 1], 3)):
        first, state, again = found
        assert (first, state) == (EVERY, {"seen": EVERY, "rank": rank}) and again == losses[rank][EVERY:]


def _damage(folder: Path) -> None:
    (path,) = (folder / "node0" / "engine_0").glob("global_step8/rank_00001.safetensors")
    content = bytearray(path.read_bytes())
    content[-20:] = bytes(20 * [255])
    path.write_bytes(content)


def _damaged(folder: str, disk: str | None) -> str:
    join()
    engine = engine_of(folder, [0, 0], 2)
    with redirect_stdout(io.StringIO()) as out:
        try:
            path, _ = engine.load_checkpoint(disk)
        except CheckpointError as error:
            return str(error)
    engine.client_state = dict
    engine.destroy()
    return f"{path} {engine.global_steps} {out.getvalue().count('ignoring the in-memory snapshot: ')}"


def _saved(folder: str) -> None:
    join()
    engine = engine_of(f"{folder}/other", [0, 0], 2)
    engine.client_state = dict
    train(engine, 0, 3)
    engine.save_checkpoint(f"{folder}/disk")
    engine.destroy()


@pytest.mark.rotated
def test_a_damaged_snapshot_is_left_for_the_disk_s(tmp_path: Path) -> None:
    run_workers(_saved, 2, str(tmp_path))
    run_workers(_first, 2, str(tmp_path), [0, 0], 2)
    _damage(tmp_path)
    said = run_workers(_damaged, 2, str(tmp_path), str(tmp_path / "disk"))
    assert said == [f"{tmp_path}/disk/global_step3 3 {count}" for count in (1, 0)]


@pytest.mark.rotated
def test_a_damaged_snapshot_holds_up_one_restart(tmp_path: Path) -> None:
    run_workers(_first, 2, str(tmp_path), [0, 0], 2)
    _damage(tmp_path)
    for said in run_workers(_damaged, 2, str(tmp_path), None):
        assert "is damaged" in said and "the next restart does not use this snapshot" in said
    assert run_workers(_damaged, 2, str(tmp_path), None) == ["None 0 0"] * 2


def _without_state(folder: str) -> str:
    join()
    engine = engine_of(folder, [0, 0], 2)
    with pytest.raises(CheckpointError) as caught:
        train(engine, 0, STEPS)
    return f"{engine.global_steps} {caught.value}"


def test_a_script_has_to_say_what_its_state_is(tmp_path: Path) -> None:
    for said in run_workers(_without_state, 2, str(tmp_path)):
        assert said.startswith("1 "), "at the first step, not at the first snapshot"
        assert "set engine.client_state" in said


def _without_memory() -> str:
    join()
    settings = config(2, 6) | {"checkpoint": {"in_memory": {"every": 1}}}
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        engine: Any = zlaunch.initialize(model=net().double(), config=settings)[0]
    train(engine, 0, 2)
    return said.getvalue()


def test_without_agents_there_is_no_memory() -> None:
    first, _ = run_workers(_without_memory, 2)
    assert "checkpoint.in_memory has no effect" in first
