"""Test config keys that change what a run does: refused unused parameters, bounds, the level of messages."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import Layer, batches, config, loss_of, net
from tests.runtime.workers import run_workers
from zlaunch.runtime import log
from zlaunch.runtime.errors import ParameterError


class Branches(nn.Module):
    """Two layers of which a call uses the first, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(24), Layer(24)
        self.second.norm.requires_grad_(False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _unused(stage: int) -> list[str]:
    zlaunch.init_distributed()
    torch.manual_seed(0)
    strict = config(stage, 1, zero={"ignore_unused_parameters": False})
    engine, *_ = zlaunch.initialize(model=Branches(), config=strict)
    messages_ = []
    differs = engine.global_rank == 0 if stage < 3 else False  # stage 3 wants the same branch everywhere
    for both in (True, differs, False, True):
        engine.backward(engine(torch.ones(1, 24), both).pow(2).mean())
        try:
            engine.step()
            messages_.append("")
        except ParameterError as error:
            messages_.append(str(error))
            engine.zero_grad()
    assert engine.global_steps == 2
    return messages_


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_refused_by_name(stage: int) -> None:
    for fine, one, all_ranks, again in run_workers(_unused, 2, stage):
        assert fine == again == ""
        where = " (on rank 1)" if stage < 3 else ""
        assert f"second.up.weight{where}, " in one and f"second.down.bias{where}: " in one
        assert "second.up.weight, " in all_ranks and "on rank" not in all_ranks
        assert "first" not in one + all_ranks and "second.norm" not in one + all_ranks
        assert "ignore_unused_parameters" in all_ranks


def _sharded(zero: dict[str, Any]) -> list[tuple[int, bool]]:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(model=net(), config=config(3, 1, zero=zero))
    engine.backward(loss_of(engine, batches(1, 1)[0]))
    engine.step()
    return [(sum(s.numel() for s in unit.shapes), unit.shard_params) for unit in engine.units]


def test_never_sharded_parameters_have_a_bound() -> None:
    def run(**zero: Any) -> list[tuple[int, bool]]:
        return run_workers(_sharded, 2, {"stage3_param_persistence_threshold": 10_000, **zero})[0]

    free = run()
    assert len(free) > 2 and not any(sharded for _, sharded in free)
    bound = free[0][0] + free[1][0]
    bounded = run(stage3_model_persistence_threshold=bound)
    assert [sharded for _, sharded in bounded[:2]] == [False, False]
    assert all(sharded for _, sharded in bounded[2:])
    assert sum(numel for numel, sharded in bounded if not sharded) <= bound
    assert all(sharded for _, sharded in run(stage3_model_persistence_threshold=0))


def _units(key: str) -> int:
    zlaunch.init_distributed()
    engine, *_ = zlaunch.initialize(
        model=net(), config=config(1, 1, zero={"reduce_bucket_size": 10**6, key: 5000})
    )
    return len(engine.units)


def test_both_bucket_sizes_bound_what_moves_together() -> None:
    (together,), (apart,) = (
        run_workers(_units, 1, "sub_group_size"),
        run_workers(_units, 1, "allgather_bucket_size"),
    )
    assert apart > together


def _said(level: str | None) -> str:
    zlaunch.init_distributed()
    source = config(1, 1, sparse_gradients=True)
    if level is not None:
        source["log_level"] = level
    with contextlib.redirect_stdout(io.StringIO()) as out:
        zlaunch.initialize(model=net(), config=source)
        log.warn("something")
    return out.getvalue()


@pytest.mark.parametrize(
    ("level", "info", "warning"),
    [(None, True, True), ("info", True, True), ("warning", False, True), ("error", False, False)],
)
def test_log_level_decides_what_is_said(level: str | None, info: bool, warning: bool) -> None:
    (said,) = run_workers(_said, 1, level)
    assert ("memory per rank" in said) is info
    assert ("warning: <dict>: sparse_gradients" in said) is ("warning: something" in said) is warning


def _open() -> str:
    zlaunch.init_distributed()
    try:
        zlaunch.initialize(model=net(), config={**config(1, 1), "gradient_clipping": "auto"})
    except zlaunch.ConfigError as error:
        return str(error)
    return ""


def test_an_open_gradient_clipping_is_refused() -> None:
    (message,) = run_workers(_open, 1)
    assert message.startswith("<dict>: gradient_clipping: ") and "without them, set a number" in message


def _logger_level() -> tuple[int, int]:
    from zlaunch.compat.deepspeed.engine import initialize
    from zlaunch.compat.deepspeed.tools import logger

    zlaunch.init_distributed()
    before = logger.level
    initialize(model=net(), config={**config(1, 1), "log_level": "error"})
    return before, logger.level


def test_log_level_is_also_the_deepspeed_logger_s() -> None:
    assert run_workers(_logger_level, 1) == [(logging.WARNING, logging.ERROR)]


def _overridden(passed: bool) -> str:
    zlaunch.init_distributed()
    model = net()
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    given = {
        **config(1, 1),
        "optimizer": {"type": "Lion", "params": {"lr": 0.5}},
        "scheduler": scheduler,
        "dump_state": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if passed else None
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer) if optimizer is not None else None
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        engine, *_ = zlaunch.initialize(model=model, config=given, optimizer=optimizer, lr_scheduler=schedule)
    engine.destroy()
    return out.getvalue()


def test_sections_that_the_script_overrides_are_named() -> None:
    (said,) = run_workers(_overridden, 1, True)
    assert "<dict>: optimizer Lion has no effect, because the script passes SGD: remove the section" in said
    assert "<dict>: scheduler WarmupLR has no effect, because the script passes its own scheduler" in said
    assert "optimizer.params.lr = 0.5  (no effect: the script passes SGD)" in said
    (said,) = run_workers(_overridden, 1, False)
    assert "no effect" not in said and "optimizer.params.lr = 0.5  (<dict>)" in said


def _collections() -> list[bool]:
    zlaunch.init_distributed()
    found = [gc.isenabled()]
    engines = [
        zlaunch.initialize(model=net(), config=config(1, 1, disable_python_gc=True))[0] for _ in range(3)
    ]
    found.append(gc.isenabled())
    engines[0].destroy()
    engines[0].destroy()
    engines.pop()  # is dropped without a call
    gc.collect()
    found.append(gc.isenabled())
    engines[1].destroy()
    found.append(gc.isenabled())
    gc.disable()  # the script's own choice stays
    zlaunch.initialize(model=net(), config=config(1, 1, disable_python_gc=True))[0].destroy()
    found.append(gc.isenabled())
    return found


def test_garbage_is_collected_again_when_the_last_engine_is_gone() -> None:
    assert run_workers(_collections, 1) == [[True, False, False, True, False]]
