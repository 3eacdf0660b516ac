"""Test that what is estimated for a model is what a rank takes at most in a step, by torch's own records."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zlaunch
from tests.runtime.workers import run_workers
from zlaunch.runtime.memory.activations import of_module
from zlaunch.runtime.memory.choices import Choice, Machines, compare
from zlaunch.runtime.memory.model_sizes import ModelSizes, from_function

WIDTH, DEPTH, TOKENS, WORLD = 128, 6, 1024, 2
HERE = "tests.runtime.memory.test_estimate_measured"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _live_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not isinstance(thing, torch._subclasses.FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def _measure(stage: int, checkpointed: bool, half: bool) -> int:
    """Return the bytes of tensors that live before a step, and of what it allocates at most."""
    zlaunch.init_distributed()
    before = _live_bytes()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"enabled": checkpointed},
        "bf16": {"enabled": half},
    }
    engine, *_ = zlaunch.initialize(model=Model(), config=config)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16 if half else torch.float32)

    def step() -> None:
        engine.backward(engine(x).float().sum())
        engine.step()

    step()
    step()
    base = _live_bytes() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = most = 0
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    engine.destroy()
    return base + most


def sizes() -> ModelSizes:
    return from_function(f"{HERE}:Model")


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_estimate_is_what_a_step_takes(stage: int, checkpointed: bool, half: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    model = sizes()
    activations = of_module(model, 1, 1, dtype, f"{TOKENS},{WIDTH}")
    machines = Machines(nodes=1, gpus=WORLD, gpu_bytes=None, host_bytes=None)
    found = compare(model, machines, activations, dtype_bytes=dtype.itemsize)
    wanted = Choice(stage, checkpointed=checkpointed)
    estimated = next(each.device for each in found if each.choice == wanted)
    env = {"ZLAUNCH_SHARED_MEMORY": "0"}  # memory that ranks share is in no record of torch's
    for measured in run_workers(_measure, WORLD, stage, checkpointed, half, env=env):
        assert measured == pytest.approx(estimated, rel=0.1), f"{measured / estimated:.3f}"
