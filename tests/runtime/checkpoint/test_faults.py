"""Test checkpoints under kill -9, damage, full disks and dying ranks; saving in the background."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.limits import LIMIT_S
from tests.ports import reserved_port
from tests.runtime.checkpoint.test_save_load import content, differences, engine_of, rich, settings
from tests.runtime.models import batches, config, net, train_engine
from tests.runtime.workers import WorkerError, _context, run_workers
from zlaunch.runtime.checkpoint import save as saving
from zlaunch.runtime.checkpoint.format import commit as folders
from zlaunch.runtime.checkpoint.format.manifest import Checkpoint, find, newest_whole
from zlaunch.runtime.checkpoint.format.tensor_file import CHUNK_BYTES, CheckpointError

# -- kill -9


def _digest(engine: Any) -> float:
    return float(sum(value.double().abs().sum() for value in engine.module.state_dict().values()))


def _save_for_ever(folder: str, port: int, rank: int, world: int, asynchronous: bool, ready: Any) -> None:
    """Go on from the newest whole checkpoint, which has to be what its client_state says, and save at every
    step.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    given = config(1, 12 // world, checkpoint={"asynchronous": asynchronous, "keep_last": 3})
    engine, *_ = zlaunch.initialize(model=net(), config=given)
    path, client = engine.load_checkpoint(folder, tag="auto")
    if path is not None and client["digest"] != _digest(engine):
        os._exit(17)
    data = batches(1, 12)
    ready.put(engine.global_steps)
    while True:
        train_engine(engine, data)
        engine.save_checkpoint(folder, client_state={"digest": _digest(engine)})
        ready.put(engine.global_steps)


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_kills_at_random_instants(tmp_path: Path, count: int) -> None:
    """Every time the newest whole checkpoint verifies, loads, and is what was saved; nothing goes back."""
    chance = random.Random(1)
    reached, saves, pointed = 0, 0, False
    for number in range(count):
        world, asynchronous = (2 if number % 10 == 9 else 1), number % 2 == 1
        ready = _context.Queue()
        with reserved_port() as port:
            jobs = [
                _context.Process(
                    target=_save_for_ever, args=(str(tmp_path), port, rank, world, asynchronous, ready)
                )
                for rank in range(world)
            ]
            try:
                for job in jobs:
                    job.start()
                assert min(ready.get(timeout=LIMIT_S) for _ in jobs) >= reached
                wanted = chance.choice([0, 1, 2])  # a busy machine has less done in a given time
                for _ in range(wanted):
                    ready.get(timeout=LIMIT_S)
                time.sleep(chance.uniform(0, 0.03))
            finally:
                chance.shuffle(jobs)
                for job in jobs:
                    with suppress(ProcessLookupError):  # the other rank may have noticed and ended
                        assert job.pid is not None
                        os.kill(job.pid, signal.SIGKILL)
                    time.sleep(chance.choice([0, 0, 0.02]))
            for job in jobs:
                job.join()
                # not 17: what it began with was right; 1: the other rank had gone before
                assert job.exitcode in ((-signal.SIGKILL, 1) if world > 1 else (-signal.SIGKILL,))
        saves += wanted if world == 1 and not asynchronous else 0
        path, problems = newest_whole(tmp_path)
        assert problems == []
        if path is not None:
            steps = Checkpoint(path).manifest["engine"]["global_steps"]
            assert steps >= reached
            reached = steps
            named = find(tmp_path)
            pointed = pointed or named is not None  # the very first may be killed before it is named
            assert (named is not None) == pointed and (named is None or Checkpoint(named).verify() > 0)
    assert reached >= saves > 0
    left = [p.name for p in tmp_path.iterdir() if p.is_dir() and not p.name.startswith(".")]
    assert 3 <= len(left) <= 5
    for dead in tmp_path.glob(".*.tmp"):  # the next save removes what the dead have left, after a while
        for entry in (*dead.iterdir(), dead):
            os.utime(entry, (1, 1))
        folders._remove_left(dead)
        assert not dead.exists()


def test_between_putting_the_old_one_aside_and_the_new_one_in_its_place(tmp_path: Path) -> None:
    """The only moment in which a tag that is saved again is not under its name."""
    assert run_workers(_same_tag, 1, str(tmp_path)) == [[True, True]]


def _same_tag(folder: str) -> list[bool]:
    engine = engine_of("stage1", "")
    engine.save_checkpoint(folder, tag="best")
    before = content(Path(folder, "best"))
    train_engine(engine, batches(1, 12))
    real = os.rename

    def killed(source: Any, target: Any) -> None:
        if Path(target).name == "best":
            raise KeyboardInterrupt
        real(source, target)

    folders.os.rename = killed  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(folder, tag="best")
    folders.os.rename = real  # type: ignore[attr-defined]
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    found = differences(before, content(path))
    train_engine(engine, batches(1, 12))
    engine.save_checkpoint(folder, tag="best")
    names = sorted(p.name for p in Path(folder).iterdir())
    return [found == [], names == ["best", "latest", "zero_to_fp32.py"]]


# -- damage


def _damage(folder: str, scratch: str) -> list[str]:
    """Flip bits in, cut and remove every file; which of it was not noticed."""
    engine = engine_of("stage2", scratch)
    train_engine(engine, batches(2, 12))
    engine.save_checkpoint(folder, tag="good", client_state={"x": torch.arange(9)})
    good = content(Path(folder, "good"))
    chance = random.Random(2)
    unnoticed: list[str] = []
    broken = Path(folder, "broken")

    def attempt(what: str, may_be_whole: bool = False) -> None:
        def verify() -> None:
            Checkpoint(broken).verify()

        for load in (lambda: engine.load_checkpoint(folder, tag="broken"), verify):
            try:
                load()
            except CheckpointError as error:
                offered = "'good' looks whole" in str(error) or load is verify
                if "broken" not in str(error) or "\n" in str(error) or not offered:
                    unnoticed.append(f"{what}: {error}")
            else:
                if not may_be_whole or differences(good, content(broken)):
                    unnoticed.append(what)

    names = sorted(path.name for path in Path(folder, "good").iterdir())
    assert names == ["manifest.json", *(f"rank_{r:05d}.safetensors" for r in range(1)), "whole.safetensors"]
    for name in names:
        original = Path(folder, "good", name).read_bytes()
        positions = [chance.randrange(len(original)) for _ in range(12)] + [0, 7, 8, 9, len(original) - 1]
        for position in positions:
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(Path(folder, "good"), broken)
            data = bytearray(original)
            data[position] ^= 1 << chance.randrange(8)
            (broken / name).write_bytes(data)
            # a space of the manifest turned into another one changes nothing
            attempt(f"{name} bit at {position}", may_be_whole=name.startswith("manifest"))
        for length in (0, 1, 100, 4096, len(original) // 2, len(original) - 1, len(original) + 1):
            (broken / name).write_bytes((original + b"x")[:length])
            attempt(f"{name} of {length} bytes")
        (broken / name).unlink()
        attempt(f"no {name}")
        (broken / name).write_bytes(original)
    (broken / "whole.safetensors").write_bytes(b"")
    path, client = engine.load_checkpoint(folder, tag="auto")
    assert path == str(Path(folder, "good")) and torch.equal(client["x"], torch.arange(9))
    engine.save_checkpoint(folder, tag="again")
    if differences(good, content(Path(folder, "again"))):
        unnoticed.append("the good one after the bad ones")
    Path(folder, "latest").write_text("lost")
    try:
        engine.load_checkpoint(folder)
        unnoticed.append("latest names nothing")
    except CheckpointError as error:
        assert "has no checkpoint 'lost'; 'again' looks whole: use it, or tag=\"auto\"" in str(error)
    train_engine(engine, batches(1, 12))
    return unnoticed


def test_every_damage_is_an_error_and_never_wrong_weights(tmp_path: Path) -> None:
    assert run_workers(_damage, 1, str(tmp_path / "saved"), str(tmp_path)) == [[]]


def _save_damaged(folder: str) -> None:
    """Only rank 1's part is damaged."""
    engine = engine_of("stage3", "")
    engine.save_checkpoint(folder)
    file = Path(folder, "global_step0", "rank_00001.safetensors")
    if engine.global_rank == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    engine.destroy()


def _load_damaged(folder: str) -> list[str]:
    engine = engine_of("stage3", "")
    train_engine(engine, batches(1, 12))
    messages = []
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    messages.append(str(caught.value))
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is complete"):
        engine.load_checkpoint(folder, tag="auto")
    try:
        train_engine(engine, batches(1, 12))
    except CheckpointError as error:
        messages.append(str(error))
    return messages


@pytest.mark.rotated
def test_damage_that_one_rank_meets_is_every_ranks_error(tmp_path: Path) -> None:
    """With as many ranks it is met before anything is changed; with others half-way, and training refuses."""
    run_workers(_save_damaged, 2, str(tmp_path))
    for world in (2, 3):
        found = run_workers(_load_damaged, world, str(tmp_path))
        assert all(messages == found[0] for messages in found)
        assert "rank_00001.safetensors: is damaged between bytes" in found[0][0]
        assert len(found[0]) == (1 if world == 2 else 2)
    assert "the last load_checkpoint failed halfway" in found[0][1]


# -- faults while saving


def _disk_full(folder: str, asynchronous: bool) -> list[Any]:
    zlaunch.init_distributed()
    given = {**settings("stage2", 2, ""), "checkpoint": {"asynchronous": asynchronous}}
    engine, *_ = zlaunch.initialize(model=rich(), config=given)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    before = content(Path(folder, "global_step0"))
    train_engine(engine, batches(1, 12))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    names = sorted(path.name for path in Path(folder).iterdir())
    engine.load_checkpoint(folder)
    same = differences(before, content(Path(folder, "global_step0")))
    train_engine(engine, batches(1, 12))
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    return [str(caught.value), names, same, Path(folder, "latest").read_text()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_that_cannot_write(tmp_path: Path, asynchronous: bool) -> None:
    first, second = run_workers(_disk_full, 2, str(tmp_path), asynchronous)
    assert first == second
    message, names, same, latest = first
    assert "rank 1:" in message and "File too large" in message
    assert names == ["global_step0", "latest", "zero_to_fp32.py"] and same == [] and latest == "global_step1"


def _no_space(folder: str) -> str:
    engine = engine_of("stage1", "")
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    torch.distributed.barrier()
    assert list(Path(folder).iterdir()) == []
    return str(caught.value)


@pytest.mark.needs("root", "mounts")
def test_a_full_disk(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)], check=True)
    try:
        messages = run_workers(_no_space, 2, str(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert messages[0] == messages[1] and "no space left on the disk: free space" in messages[0]


def _dies(folder: str) -> str:
    engine = engine_of("stage2", "")
    engine.save_checkpoint(folder)
    if engine.global_rank == 1:
        saving.FileWriter.close = lambda self: os._exit(0)  # type: ignore[method-assign]
    train_engine(engine, batches(1, 12))
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder)
    Path(folder, "message").write_text(str(caught.value))
    return ""


def test_a_rank_that_dies_while_it_saves(tmp_path: Path) -> None:
    with suppress(WorkerError, TypeError):  # rank 1 brings no result
        run_workers(_dies, 2, str(tmp_path))
    assert "another rank failed during the checkpoint" in (tmp_path / "message").read_text()
    assert Path(tmp_path, "latest").read_text() == "global_step0"
    path, problems = newest_whole(tmp_path)
    assert path is not None and path.name == "global_step0" and problems == []


# -- beside training


def _background(folder: str, scratch: str, name: str) -> list[Any]:
    """The files hold the state at the call, though training has gone on while they were written."""
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    given = {**settings(name, world, scratch), "checkpoint": {"asynchronous": True}}
    engine, *_ = zlaunch.initialize(model=rich(), config=given)
    train_engine(engine, batches(1, 12))
    engine.save_checkpoint(folder, tag="first", client_state={"x": engine.module.count})
    engine.wait_for_checkpoint()
    wait, real = threading.Event(), saving.Save._finish

    def slow(self: Any) -> Any:
        wait.wait(LIMIT_S)
        return real(self)

    saving.Save._finish = slow  # type: ignore[method-assign]
    want = {key: value.clone() for key, value in engine.module.state_dict().items()}
    engine.save_checkpoint(folder, tag="second", client_state={"x": engine.module.count})
    there = Path(folder, "second").exists()
    train_engine(engine, batches(3, 12))
    wait.set()
    first = content(Path(folder, "first"))
    engine.save_checkpoint(folder, tag="third")  # waits for the second
    different = differences(first, content(Path(folder, "second")))
    _, client = engine.load_checkpoint(folder, tag="second")
    same = all(torch.equal(value, want[key]) for key, value in engine.module.state_dict().items())
    engine.load_checkpoint(folder)  # waits for the third
    engine.destroy()
    return [there, different, int(client["x"]), same, sorted(p.name for p in Path(folder).iterdir())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["stage0", "stage2", "stage3 all in host", "stage3 all on disk"])
def test_a_save_beside_training_has_the_state_of_its_call(tmp_path: Path, world: int, name: str) -> None:
    for found in run_workers(_background, world, str(tmp_path / "a"), str(tmp_path), name):
        assert found == [False, [], 1, True, ["first", "latest", "second", "third", "zero_to_fp32.py"]]


def _fails_later(folder: str) -> list[Any]:
    zlaunch.init_distributed()
    given = {**settings("stage2", 2, ""), "checkpoint": {"asynchronous": True}}
    engine, *_ = zlaunch.initialize(model=rich(), config=given)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    stepped = threading.Event()
    if engine.global_rank == 1:
        real = saving.Save._finish

        def fails(self: Any) -> Any:
            stepped.wait(LIMIT_S)
            raise OSError(28, "No space left on device", "rank 1's disk")

        saving.Save._finish = fails  # type: ignore[method-assign]
    engine.save_checkpoint(folder)
    steps = 0
    with pytest.raises(CheckpointError) as caught:
        while steps < 2000:
            train_engine(engine, batches(1, 12))
            steps += 1
            stepped.set()
    if engine.global_rank == 1:
        saving.Save._finish = real  # type: ignore[method-assign]
    # told once; training may go on
    train_engine(engine, batches(1, 12))
    engine.save_checkpoint(folder)
    engine.destroy()
    return [str(caught.value), steps, Path(folder, "latest").read_text()]


def test_a_failure_in_the_background_is_raised_by_the_same_step_on_every_rank(tmp_path: Path) -> None:
    first, second = run_workers(_fails_later, 2, str(tmp_path))
    assert first == second
    message, steps, latest = first
    assert "rank 1's disk: no space left on the disk" in message and 0 < steps < 2000
    assert latest == f"global_step{steps + 2}"  # the step that raised has been made


@pytest.mark.exhaustive
def test_a_script_that_ends_at_once_still_has_its_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, zlaunch, sys\n"
        "given = {'train_micro_batch_size_per_gpu': 1, 'checkpoint': {'asynchronous': True}}\n"
        "engine, *_ = zlaunch.initialize(model=torch.nn.Linear(300, 9000), config=given)\n"
        "engine.save_checkpoint(sys.argv[1])\n"
    )
    folder = tmp_path / "saved"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=LIMIT_S)
    path = find(folder)
    assert path is not None
    assert Checkpoint(path).verify() > 2 * CHUNK_BYTES
    assert json.loads((path / "manifest.json").read_text())["format"] == "zlaunch checkpoint"
