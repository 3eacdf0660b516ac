"""Measure what a rank takes at most in a real step, by torch's own records."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import zlaunch
from tests.runtime.memory.models import KINDS, TOKENS, VOCAB, Kind, builder
from zlaunch.runtime.memory.fake_step import parse_shape

WORLD = 2
ENV = {"ZLAUNCH_SHARED_MEMORY": "0"}
"""Makes workers keep no memory that they share: that is in no record of torch's."""
Setting = tuple[int, bool]
"""A stage, and whether blocks are checkpointed."""
SETTINGS: tuple[Setting, ...] = tuple((stage, each) for stage in range(4) for each in (False, True))
HALF: tuple[Setting, ...] = ((0, False), (1, True), (2, True), (3, False))
"""Has each stage once, for models that are like others."""
_STEPS, _ENOUGH, _MISSED = 4, 2, 4096
"""Limits the steps looked at, those whose records are whole, and the bytes that a record may lack."""


def peaks(name: str, half: bool | str, settings: Sequence[Setting]) -> dict[Setting, int]:
    """Return the peak of a model's step in this worker for each setting, in bytes of tensors."""
    zlaunch.init_distributed()
    setattr(dist.Work, "wait", _wait_until_released(dist.Work.wait))  # noqa: B010 - a method
    builder(KINDS[name])()  # imports what it needs
    gc.collect()
    gc.freeze()  # what is there stays: it need not be looked through for tensors again and again
    return {each: _peak(KINDS[name], *each, half) for each in settings}


def _live_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and not isinstance(thing, torch._subclasses.FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def _given(kind: Kind, half: bool | str) -> Any:
    if kind.config:
        ids = torch.randint(0, VOCAB, (kind.samples, TOKENS))
        return {"input_ids": ids, "labels": ids}
    sizes, dtype = parse_shape(kind.shape)
    if dtype is torch.int64:
        return torch.randint(0, VOCAB, list(sizes))
    return torch.randn(list(sizes), dtype=torch.bfloat16 if half is True else torch.float32)


def _peak(kind: Kind, stage: int, checkpointed: bool, half: bool | str) -> int:
    before = _live_bytes()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"enabled": checkpointed},
        "bf16": {"enabled": half is True},
        "torch_autocast": {"enabled": half == "autocast"},
    }
    engine, *_ = zlaunch.initialize(model=builder(kind)(), config=config)
    given = _given(kind, half)

    def step() -> None:
        output = engine(**given) if isinstance(given, dict) else engine(given)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = (output if isinstance(output, Tensor) else output.logits).float().sum()
        del output
        engine.backward(loss)
        engine.step()

    step()
    step()
    seen: list[int] = []
    for _ in range(_STEPS):
        if (found := _profiled(step)) is not None:
            seen.append(found)
        least = torch.tensor(len(seen))
        dist.all_reduce(least, dist.ReduceOp.MIN)
        if least >= _ENOUGH:
            break
    dist.barrier()  # the other rank may still be in the step
    engine.destroy()
    assert seen, f"in none of {_STEPS} steps all that was freed is in the profiler's records"
    return max(seen) - before


def _profiled(step: Callable[[], None]) -> int | None:
    """Return the most bytes that are alive in a step; None where some of what was freed is in no record: the
    profiler sees nothing of gloo's threads, which may be the last to hold a buffer.
    """
    base = _live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        # gloo's threads note the ends of collectives in the profiler, which must not have ended by then
        dist.barrier()
        time.sleep(0.1)
    now = most = 0
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return base + most if abs(now - (_live_bytes() - base)) < _MISSED else None


def _wait_until_released(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Work's wait that gives gloo's thread time to let go of the buffers."""

    def waits(*args: Any, **kwargs: Any) -> Any:
        found = wait(*args, **kwargs)
        time.sleep(0.002)
        return found

    return waits
