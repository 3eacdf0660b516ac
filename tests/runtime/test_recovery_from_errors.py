"""Test going on after something went wrong: either as if it had not happened, or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.limits import LIMIT_S
from tests.runtime.models import Net, batches, config, loss_of, net, train_engine
from tests.runtime.offload.test_offloaded_training import _engine, in_background
from tests.runtime.workers import run_workers
from zlaunch.runtime.errors import DiskError
from zlaunch.runtime.offload.disk import DiskEngine, ScratchFile

ROOT = Path(__file__).resolve().parents[2]


class Interrupted(Net):
    """Raises once, in the forward or in the backward pass."""

    error: Any = None
    backward = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embedding(tokens))
        error, self.error = self.error, None
        if error and not self.backward:
            raise error
        if error:
            x.register_hook(lambda grad: (_ for _ in ()).throw(error))
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return self.head(self.norm(x))


def _interrupted() -> list[str]:
    zlaunch.init_distributed()
    data = batches(4, 12)
    wrong = []
    for stage in (0, 1, 2, 3):
        for section in ("fp32", "fp16"):
            for backward in (False, True):
                options: dict[str, Any] = {section: {"enabled": True}} if section == "fp16" else {}
                wanted: list[float] = []
                for error in (None, KeyboardInterrupt(), ValueError("bad data")):
                    torch.manual_seed(7)
                    settings = config(stage, 6, 2, 0.1, **options)
                    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
                    model = Interrupted()
                    engine, *_ = zlaunch.initialize(model=model, config=settings)
                    losses = train_engine(engine, data[:2])
                    if error is not None:
                        model.error, model.backward = error, backward
                        with pytest.raises(type(error)):
                            engine.backward(loss_of(engine, data[3][:6]))
                        engine.zero_grad()
                    losses += train_engine(engine, data[2:])
                    engine.destroy()
                    wanted = wanted or losses
                    if losses != wanted:
                        wrong.append(f"stage {stage} {section} backward={backward} {error!r}")
    return wrong


@pytest.mark.rotated
def test_a_pass_that_was_interrupted_leaves_nothing_behind() -> None:
    assert run_workers(_interrupted, 1) == [[]]


class FailsOnce(Net):
    """Raises in the first backward pass, when a part of the gradients has arrived."""

    passes = 0

    def _fail(self, grad: torch.Tensor) -> None:
        self.passes += 1
        if self.passes == 1:
            raise ValueError("bad data")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embedding(tokens))
        x.register_hook(self._fail)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return self.head(self.norm(x))


def _twice_through_a_graph(model: Any, tokens: torch.Tensor) -> None:
    """Plain torch leaves the gradients of a failed pass, and adds the next pass's to them."""
    loss = loss_of(model, tokens)
    with pytest.raises(ValueError, match="bad data"):
        loss.backward(retain_graph=True)
    loss.backward()


def _graph_again() -> list[str]:
    zlaunch.init_distributed()
    tokens = batches(1, 8)[0]
    torch.manual_seed(7)
    plain = FailsOnce().double()
    _twice_through_a_graph(plain, tokens)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    wrong = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(7)
        optimizer = {"type": "SGD", "params": {"lr": 0.5}}
        engine, *_ = zlaunch.initialize(
            model=FailsOnce().double(), config=config(stage, 4, optimizer=optimizer)
        )
        half = slice(4 * engine.global_rank, 4 * engine.global_rank + 4)
        _twice_through_a_graph(engine, tokens[half].to(engine.device))
        engine.step()
        engine.destroy()
        for name, got in engine.module.state_dict().items():
            if not torch.allclose(got.cpu(), plain.state_dict()[name], rtol=1e-9, atol=1e-12):
                wrong.append(f"stage {stage} {name}")
    return wrong


def test_a_graph_is_used_again_after_a_failed_backward_pass() -> None:
    assert run_workers(_graph_again, 2) == [[], []]


def _scaled(engine: Any, loss: torch.Tensor, **count: int) -> None:
    engine.scale(loss, **count).backward()


def _retried() -> list[str]:
    zlaunch.init_distributed()
    data = batches(3, 4)
    wrong = []
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "tokens": {"loss_reduction": "tokens"},
    }
    for kind, section in kinds.items():
        for stage in (0, 3):
            found = []
            for fails in (None, zlaunch.Engine.backward, _scaled):
                torch.manual_seed(7)
                model = FailsOnce()
                model.passes = 1 if fails is None else 0
                engine, *_ = zlaunch.initialize(model=model, config=config(stage, 4, 2, 0.1, **section))
                count: dict[str, Any] = {"num_tokens": 24} if kind == "tokens" else {}
                losses = [loss_of(engine, tokens) for tokens in data[:3]]
                if fails is not None:
                    with pytest.raises(ValueError, match="bad data"):
                        fails(engine, losses[0], **count)
                    engine.zero_grad()
                for loss in losses[1:]:  # no forward pass comes between
                    engine.backward(loss, **count)
                    engine.step()
                engine.destroy()
                found.append(engine.module.state_dict())
            for trained in found[1:]:
                wrong += [
                    f"{kind} {stage} {key}" for key in trained if not torch.equal(trained[key], found[0][key])
                ]
    return wrong


def test_a_pass_after_a_failed_one_is_scaled_once() -> None:
    assert run_workers(_retried, 1) == [[]]


def _write_fails(folder: str, background: bool) -> list[str]:
    zlaunch.init_distributed()
    with in_background(background):
        engine = _engine(Path(folder))
    train_engine(engine, batches(1, 12))
    plain, count = DiskEngine._write_block, 0

    def fails(self: DiskEngine, file: ScratchFile, block: memoryview, offset: int) -> None:
        nonlocal count
        here = file.path.name == "optimizer.bin"
        count += here
        if here and count == 9:
            raise DiskError(errno.EIO, f"{file.path}: write failed")
        plain(self, file, block, offset)

    DiskEngine._write_block = fails  # type: ignore[method-assign]
    messages: list[str] = []
    for _ in range(50):  # a step in the background may fail a few steps later
        with suppress(DiskError):
            train_engine(engine, batches(1, 12))
            continue
        break
    for _ in range(3):  # who catches it and goes on gets it again
        with pytest.raises(DiskError) as error:
            train_engine(engine, batches(1, 12))
        messages.append(str(error.value))
    with suppress(DiskError):  # values that cannot be read cannot be given back
        engine.destroy()
    return messages


@pytest.mark.parametrize("background", [False, True])
def test_an_incomplete_step_is_the_end(tmp_path: Path, background: bool) -> None:
    (messages,) = run_workers(_write_fails, 1, str(tmp_path), background)
    assert len(messages) == 3 and all("optimizer.bin: write failed" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


def _momentum_later(folder: str) -> str:
    zlaunch.init_distributed()
    nvme = {"device": "nvme", "nvme_path": folder}
    settings = config(2, 12, zero={"offload_optimizer": nvme})
    engine, *_ = zlaunch.initialize(
        model=net(), config=settings, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    train_engine(engine, batches(1, 12))
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    try:
        train_engine(engine, batches(1, 12))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_state_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    (message,) = run_workers(_momentum_later, 1, str(tmp_path))
    assert "momentum_buffer" in message and "before zlaunch.initialize" in message


class Alternating(torch.nn.Module):
    """Two branches, used in turn: a step of one goes on while the next pass uses the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.left if self.calls % 2 else self.right)(x)


def _alternating(folder: str) -> list[str]:
    zlaunch.init_distributed()
    wrong = []
    for stage in (1, 2, 3):
        for device in ("cpu", "nvme"):
            found = []
            for background in (False, True):
                place = {"device": device, "nvme_path": folder}
                zero = {"stage3_param_persistence_threshold": 0, "offload_optimizer": place}
                zero |= {"reduce_bucket_size": 100}
                with in_background(background):
                    engine, *_ = zlaunch.initialize(
                        model=Alternating(), config=config(stage, 4, zero=zero, clip=1.0)
                    )
                for step in range(12):
                    torch.manual_seed(step)
                    x = torch.randn(4, 128).to(engine.device)
                    engine.backward(engine(x).square().mean())
                    engine.step()
                found.append({k: v.clone() for k, v in engine.module.state_dict().items()})
                engine.destroy()
            if any(not torch.equal(found[0][k], found[1][k]) for k in found[0]):
                wrong.append(f"{stage} {device}")
    return wrong


@pytest.mark.rotated
@pytest.mark.multi_gpu
def test_a_gradient_is_not_replaced_while_a_step_reads_it(tmp_path: Path) -> None:
    assert run_workers(_alternating, 1, str(tmp_path)) == [[]]


def _refused(folder: str) -> list[bool]:
    zlaunch.init_distributed()
    model, nvme = net(), {"device": "nvme", "nvme_path": folder}
    settings = config(3, 12, zero={"offload_optimizer": nvme})
    shampoo = type("Shampoo", (torch.optim.SGD,), {})
    with pytest.raises(ValueError, match="Shampoo needs whole tensors"):
        zlaunch.initialize(model=model, config=settings, optimizer=lambda p: shampoo(p))
    empty = not list(Path(folder).iterdir())
    engine, *_ = zlaunch.initialize(model=model, config=settings)  # the model is a plain one again
    train_engine(engine, batches(1, 12))
    engine.destroy()
    return [empty]


def test_a_refused_optimizer_leaves_a_plain_model_and_no_folder(tmp_path: Path) -> None:
    assert run_workers(_refused, 1, str(tmp_path)) == [[True]]


TERMINATED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import zlaunch
from tests.runtime.offload.test_offloaded_training import _engine
zlaunch.init_distributed()
engine = _engine(Path(sys.argv[1]))
assert len(os.listdir(sys.argv[1])) == 1
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.exhaustive
def test_sigterm_removes_the_folder(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", TERMINATED, str(tmp_path), str(root)], timeout=LIMIT_S)
    assert run.returncode == -15
    assert list(tmp_path.iterdir()) == []


UNFINISHED = """
import sys, traceback, torch, zlaunch, torch.distributed as dist
zlaunch.init_distributed()
caught = len(sys.argv) > 1
group = dist.new_group([0, 1])
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1000), group=group)
work = dist.all_reduce(torch.ones(1000), async_op=True)
try:
    raise ValueError("this rank gives up")
except ValueError as error:
    if caught:
        traceback.print_exc()
        sys.exit(1)
    raise
"""


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("starter", "more"),
    [
        ("torch.distributed.run --nproc_per_node=2", []),
        ("zlaunch --num_gpus 2 --no_local_rank", []),
        ("zlaunch --num_gpus 2 --no_local_rank", ["catch"]),
    ],
)
def test_a_rank_that_gives_up_waits_for_nothing(tmp_path: Path, starter: str, more: list[str]) -> None:
    """Not even for what it has begun: torch's own end of a process group would wait for that for ever."""
    (tmp_path / "train.py").write_text(UNFINISHED)
    command = [sys.executable, "-m", *starter.split(), "train.py", *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 1, run.stderr
    assert "ValueError: this rank gives up" in run.stderr + run.stdout


AGAIN = """
import sys, zlaunch.compat.deepspeed
zlaunch.compat.deepspeed.install()
import deepspeed, torch.distributed as dist
sys.last_value = ValueError("of an earlier cell")
for _ in range(2):
    deepspeed.init_distributed()
    deepspeed.comm.destroy_process_group()
    assert not dist.is_initialized()
"""


@pytest.mark.exhaustive
def test_an_error_of_an_earlier_cell_keeps_nothing_from_ending(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", AGAIN], env=env, check=True, timeout=LIMIT_S)
