"""Test state and parameters in host memory and on disk: training equal bit for bit, and no wrong step."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.limits import LIMIT_S
from tests.runtime.models import batches, config, loss_of, net, train_engine
from tests.runtime.workers import run_workers
from zlaunch.runtime.errors import DiskError, MemoryPlanError
from zlaunch.runtime.offload.disk import ScratchFolder
from zlaunch.runtime.optim.lion import Lion
from zlaunch.runtime.zero.layout import TILE_NUMEL

STEPS = 3
TILES = {"sub_group_size": 4096}
"""Tiles of a few pages show what happens at their borders."""


def offloads(folder: str, stage: int) -> dict[str, dict[str, Any]]:
    """Every way to offload at a stage."""
    nvme = {"device": "nvme", "nvme_path": folder}
    found: dict[str, dict[str, Any]] = {
        "cpu": {"offload_optimizer": {"device": "cpu"}},
        "nvme": {"offload_optimizer": nvme},
        "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    }
    if stage == 3:
        found |= {
            "parameters in host": {"offload_param": {"device": "cpu"}},
            "both in host": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            "parameters on disk": {"offload_param": {**nvme, "max_in_cpu": 0}},
            "both on disk": {
                "offload_param": {**nvme, "max_in_cpu": 3000},
                "offload_optimizer": {**nvme, "buffer_count": 1},
            },
            "host and disk": {"offload_param": {"device": "cpu"}, "offload_optimizer": nvme},
        }
    return found


def train(zero: dict[str, Any], stage: int, steps: int = STEPS, **options: Any) -> tuple[list[float], Any]:
    """Losses, and the parameters afterwards."""
    torch.manual_seed(0)
    accumulation = options.pop("accumulation", 2)
    make = options.pop("make", None)
    world = torch.distributed.get_world_size()
    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 9000, **TILES, **zero}
    settings = config(stage, 12 // world, accumulation, options.pop("clip", 0.05), zero=small, **options)
    model = net(width=48)
    engine, *_ = zlaunch.initialize(model=model, config=settings, optimizer=make)
    losses = train_engine(engine, batches(steps, 12 * accumulation))
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return losses, state


def same(left: tuple[list[float], Any], right: tuple[list[float], Any], tolerance: float = 0.0) -> bool:
    if tolerance == 0.0:
        return left[0] == right[0] and all(torch.equal(left[1][k], right[1][k]) for k in right[1])
    close = [torch.allclose(left[1][k], right[1][k], rtol=tolerance, atol=tolerance) for k in right[1]]
    return all(close) and torch.allclose(torch.tensor(left[0]), torch.tensor(right[0]), rtol=tolerance)


def _equal(folder: str, accumulations: tuple[int, ...]) -> dict[str, bool]:
    zlaunch.init_distributed()
    results = {}
    for stage in (1, 2, 3):
        for accumulation in accumulations:
            without = train({}, stage, accumulation=accumulation)
            for name, zero in offloads(folder, stage).items():
                got = train(zero, stage, accumulation=accumulation)
                results[f"stage {stage} {name} accumulation {accumulation}"] = same(got, without)
    return results


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "accumulations", "env"),
    [
        *((1, (1, 2), {}), (2, (1,), {}), (2, (2,), {})),
        pytest.param(4, (1, 2), {}, marks=pytest.mark.exhaustive),
        pytest.param(2, (1, 2), {"ZLAUNCH_SHARED_MEMORY": "0"}, marks=pytest.mark.exhaustive),
    ],
    ids=["1", "2 with single gradients", "2 with sums", "4", "2 over gloo"],
)
def test_fp32_is_bit_for_bit_what_it_is_without_offload(
    tmp_path: Path, world: int, accumulations: tuple[int, ...], env: dict[str, str]
) -> None:
    for results in run_workers(_equal, world, str(tmp_path), accumulations, env=env):
        assert len(results) == len(accumulations) * (3 + 3 + 8)
        assert [name for name, equal in results.items() if not equal] == []
    assert list(tmp_path.iterdir()) == []


def _narrow(folder: str) -> dict[str, bool]:
    zlaunch.init_distributed()
    results = {}
    for kind in ("bf16", "fp16"):
        for stage in (1, 2, 3):
            options: dict[str, Any] = {kind: {"enabled": True}, "accumulation": 1}
            without = train({}, stage, **options)
            for name, zero in offloads(folder, stage).items():
                got = train(zero, stage, **options)
                results[f"{kind} stage {stage} {name}"] = same(got, without, 2e-2)
    return results


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_16_bit_training(tmp_path: Path, world: int) -> None:
    """The 16-bit results are rounded from masters that agree within 1e-6 (test_kernels): one step of bf16."""
    for results in run_workers(_narrow, world, str(tmp_path)):
        assert [name for name, equal in results.items() if not equal] == []


def _optimizers(folder: str) -> dict[str, bool]:
    zlaunch.init_distributed()
    makers: dict[str, Any] = {
        "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
        "Adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
        "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1),
        "Lion": lambda groups: Lion(groups, lr=0.001, weight_decay=0.1),
        "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
        "foreach": lambda groups: torch.optim.Adam(groups, lr=1e-3, foreach=True),
    }
    results = {}
    for title, make in makers.items():
        without = train({}, 3, make=make)
        for name, zero in offloads(folder, 3).items():
            results[f"{title} {name}"] = same(train(zero, 3, make=make), without)
    return results


@pytest.mark.exhaustive
def test_other_optimizers(tmp_path: Path) -> None:
    (results,) = run_workers(_optimizers, 1, str(tmp_path))
    assert [name for name, equal in results.items() if not equal] == []


class Branches(torch.nn.Module):
    """The second branch is used from the third step on; the last parameter never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.never = torch.nn.Parameter(torch.ones(5000))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(x) + (self.second(x) if self.calls > 2 else 0)


def _unused(folder: str) -> list[str]:
    zlaunch.init_distributed()

    def go(zero: dict[str, Any], stage: int) -> dict[str, torch.Tensor]:
        settings = config(stage, 4, 1, 1.0, zero={"stage3_param_persistence_threshold": 0, **TILES, **zero})
        engine, *_ = zlaunch.initialize(model=Branches(), config=settings)
        for step in range(5):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(4, 64)).square().mean())
            engine.step()
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy()
        return state

    wrong = []
    for stage in (1, 2, 3):
        without = go({}, stage)
        assert torch.equal(without["never"], torch.ones(5000))
        for name, zero in offloads(folder, stage).items():
            got = go(zero, stage)
            wrong += [f"{stage} {name} {k}" for k in without if not torch.equal(without[k], got[k])]
    return wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_without_a_gradient_are_left_alone(tmp_path: Path, world: int) -> None:
    assert run_workers(_unused, world, str(tmp_path)) == [[]] * world


@contextmanager
def in_background(on: bool = True) -> Iterator[None]:
    """Engines made inside do offloaded steps in a thread of their own, as they do on a GPU."""
    from zlaunch.runtime.offload.step import BackgroundStep

    original = BackgroundStep.__init__

    def start_so(self: BackgroundStep, units: Any, comm: Any, _: bool) -> None:
        original(self, units, comm, on)

    BackgroundStep.__init__ = start_so  # type: ignore[method-assign,assignment]  # a test's own beginning
    try:
        yield
    finally:
        BackgroundStep.__init__ = original  # type: ignore[method-assign]


def _background(folder: str) -> list[str]:
    """A scheduler changes the rate while the step still goes on."""
    zlaunch.init_distributed()
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 4}}
    wrong = []
    for stage in (1, 2, 3):
        without = train({}, stage, scheduler=scheduler)
        for name, zero in offloads(folder, stage).items():
            with in_background():
                got = train(zero, stage, scheduler=scheduler)
            if not same(got, without):
                wrong.append(f"{stage} {name}")
    return wrong


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_in_the_background(tmp_path: Path, world: int) -> None:
    env = {"ZLAUNCH_SHARED_MEMORY": "0"}
    assert run_workers(_background, world, str(tmp_path), env=env) == [[]] * world


def _overflow(folder: str) -> list[str]:
    zlaunch.init_distributed()
    wrong = []
    for stage in (1, 2, 3):
        for name, zero in offloads(folder, stage).items():
            fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
            settings = config(stage, 12, zero={"stage3_param_persistence_threshold": 0, **zero}, fp16=fp16)
            engine, *_ = zlaunch.initialize(model=net(), config=settings)
            data = batches(4, 12)
            train_engine(engine, data[:2])
            before = {k: v.clone() for k, v in engine.module.state_dict().items()}
            engine.backward(loss_of(engine, data[2]) * float("inf"))
            engine.step()
            after = engine.module.state_dict()
            if not engine.overflow or any(not torch.equal(before[k], after[k]) for k in before):
                wrong.append(f"{stage} {name} changed")
            losses = train_engine(engine, data[2:])
            # a skipped step leaves the moments, too: training goes on as if it had not been
            other, *_ = zlaunch.initialize(model=net(), config=settings)
            train_engine(other, data[:2])
            other._precision.scaler.scale /= 2
            if losses != train_engine(other, data[2:]):
                wrong.append(f"{stage} {name} differs afterwards")
            engine.destroy()
            other.destroy()
    return wrong


@pytest.mark.rotated
def test_an_overflow_leaves_the_state_untouched(tmp_path: Path) -> None:
    assert run_workers(_overflow, 1, str(tmp_path)) == [[]]


def _load(folder: str) -> list[str]:
    zlaunch.init_distributed()
    wrong = []
    for stage in (1, 2, 3):
        for name, zero in offloads(folder, stage).items():
            settings = config(stage, 12, zero={"stage3_param_persistence_threshold": 0, **zero})
            engine, *_ = zlaunch.initialize(model=net(depth=1), config=settings)
            torch.manual_seed(99)
            wanted = {k: torch.randn_like(v) for k, v in engine.module.state_dict().items()}
            engine.module.load_state_dict(wanted)
            engine.backward(loss_of(engine, batches(1, 12)[0]) * 0.0)
            for group in engine.optimizer.param_groups:
                group["weight_decay"] = 0.0
            engine.step()
            got = engine.module.state_dict()
            wrong += [f"{stage} {name} {k}" for k in wanted if not torch.equal(got[k], wanted[k])]
            engine.destroy()
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_loaded_values_reach_the_masters(tmp_path: Path, world: int) -> None:
    assert run_workers(_load, world, str(tmp_path)) == [[]] * world


# -- faults

NVME: dict[str, Any] = {"device": "nvme"}


def _engine(folder: Path, **zero: Any) -> Any:
    settings = config(
        3,
        12,
        zero={
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {**NVME, "nvme_path": str(folder)},
            "offload_param": {**NVME, "nvme_path": str(folder), "max_in_cpu": 0},
            **zero,
        },
    )
    engine, *_ = zlaunch.initialize(model=net(width=48), config=settings)
    return engine


def _held(folder: str) -> int:
    """Return the host memory that writing a layer's first values to disk has taken, in elements."""
    zlaunch.init_distributed()
    place = {**NVME, "nvme_path": folder}
    offload = {"offload_optimizer": place, "offload_param": {**place, "max_in_cpu": 0}}
    settings = config(3, 12, zero={**offload, "sub_group_size": 1 << 16})  # the optimizer's buffers are small
    layer = nn.Linear(8192, 4096, bias=False)
    engine, *_ = zlaunch.initialize(model=nn.Sequential(layer), config=settings)
    held: int = engine._offload.link.pool.statistics().held_bytes
    return held // layer.weight.itemsize


def test_a_large_layer_goes_to_disk_in_tiles(tmp_path: Path) -> None:
    (held,) = run_workers(_held, 1, str(tmp_path))
    assert 0 < held < 5 * TILE_NUMEL < 8192 * 4096


def _truncated(folder: str, file: str) -> tuple[str, str]:
    zlaunch.init_distributed()
    engine = _engine(Path(folder))
    data = batches(2, 12)
    train_engine(engine, data[:1])
    (path,) = Path(folder).glob(f"zlaunch-*/{file}")
    os.truncate(path, 4096)
    try:
        train_engine(engine, data[1:])
    except DiskError as error:
        message = str(error)
    else:
        message = "no error"
    return message, str(path)


@pytest.mark.parametrize("file", ["optimizer.bin", "parameters.bin"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, file: str) -> None:
    ((message, path),) = run_workers(_truncated, 1, str(tmp_path), file)
    assert path in message and "truncated" in message


@pytest.mark.needs("root", "mounts")
def test_a_full_disk_is_found_at_the_start(tmp_path: Path) -> None:
    """A small file system: the state does not fit, and nothing is left there."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], check=True)
    try:
        (message,) = run_workers(_full, 1, str(tmp_path))
        assert "the model does not fit: disk (" in message and "128 KiB free" in message
        assert list(tmp_path.iterdir()) == []
        (message,) = run_workers(_full_later, 1, str(tmp_path))
        assert "no space left" in message and str(tmp_path) in message and "nvme_path" in message
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def _full_later(folder: str) -> str:
    """Somebody else takes the space between the plan and the files."""
    from zlaunch.runtime.memory import preflight

    preflight.check = lambda *args: None
    return _full(folder)


def _full_in_a_step(folder: str) -> tuple[str, bool]:
    """A file system that cannot set space aside; the first step's gradients fill it."""
    from zlaunch.runtime.memory import preflight

    def cannot(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    zlaunch.init_distributed()
    preflight.check = lambda *args: None
    os.posix_fallocate = cannot
    engine = _engine(Path(folder))
    (path,) = Path(folder).glob("zlaunch-*/optimizer.bin")
    try:
        train_engine(engine, batches(2, 12))
    except DiskError as error:
        return str(error), str(path) in str(error)
    finally:
        engine.destroy()
    return "no error", False


@pytest.mark.needs("root", "mounts")
def test_a_disk_that_fills_up_in_the_middle_of_a_step(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(tmp_path)], check=True)
    try:
        ((message, named),) = run_workers(_full_in_a_step, 1, str(tmp_path))
        assert "no space left" in message and named
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def _full(folder: str) -> str:
    zlaunch.init_distributed()
    try:
        _engine(Path(folder))
    except (DiskError, MemoryPlanError) as error:
        return str(error)
    return "no error"


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (message,) = run_workers(_full, 1, str(tmp_path / "file" / "below"))
    assert "nvme_path" in message and str(tmp_path / "file" / "below") in message


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import zlaunch
from tests.runtime.offload.test_offloaded_training import _engine
from tests.runtime.models import batches, train_engine
from zlaunch.runtime.offload.disk import DiskEngine
zlaunch.init_distributed()
engine = _engine(Path(sys.argv[1]))
train_engine(engine, batches(1, 12))
count = 0
write = DiskEngine._write_block
def die_in_the_middle(self, file, block, offset):
    global count
    count += file.path.name == "optimizer.bin"
    if count > 4:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, file, block, offset)
DiskEngine._write_block = die_in_the_middle
train_engine(engine, batches(1, 12))
"""


@pytest.mark.rotated
def test_kill_in_the_middle_of_a_step_and_restart(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(root)], timeout=LIMIT_S)
    assert run.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "optimizer.bin").stat().st_size > 0
    other = ScratchFolder(tmp_path, rank=0)  # the next run sweeps
    assert other.swept == [left] and list(tmp_path.iterdir()) == [other.path]
    again = ScratchFolder(tmp_path, rank=0)  # and never meets one that lives
    assert again.swept == [] and again.path != other.path
    other.remove()
    again.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "zero", "words"),
    [
        (0, {"offload_optimizer": {"device": "cpu"}}, "needs stage 1, 2 or 3, not 0"),
        (1, {"offload_optimizer": {"device": "nvme"}}, "nvme_path: is required"),
    ],
)
def test_settings_that_do_not_fit(stage: int, zero: dict[str, Any], words: str) -> None:
    with pytest.raises(zlaunch.ConfigError, match=words):
        zlaunch.initialize(model=net(), config=config(stage, 1, zero=zero))


@pytest.mark.exhaustive
def test_memory_with_everything_on_disk_is_that_of_the_buffers(tmp_path: Path) -> None:
    """The optimizer state alone is five times as large as the bound; ten times in ``benchmarks.offload``."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "benchmarks.offload", "--worker", "--path", str(tmp_path)]
    command += ["--layers", "100", "--tile", str(1 << 18), "--rounds", "0"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    bound = found["buffers_bytes"] + 200e6
    assert 12 * found["numel"] > 5 * bound
    assert found["peak_bytes"] < bound
