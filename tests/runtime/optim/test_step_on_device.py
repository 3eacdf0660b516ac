"""Check that the step decided on the device, as on a GPU, is the step that the host decides.

That the host waits for nothing meanwhile is what tests/pretend_gpu shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error
from tests.runtime.workers import run_workers


def _train(stage: int, on_device: bool, section: str) -> tuple[Any, list[Any]]:
    """Sections are dtypes; "fp64" is what fp32 is measured by."""
    from zlaunch.runtime import build
    from zlaunch.runtime.optim.step import ShardedOptimizer

    def deciding(*args: Any, **kwargs: Any) -> ShardedOptimizer:
        return ShardedOptimizer(*args, **{**kwargs, "on_device": on_device})

    options: dict[str, Any] = {"bf16": {"bf16": {"enabled": True}}}.get(section, {})
    if section == "fp16":  # begins with a scale that overflows, so that steps are skipped
        fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 3}
        options = {"fp16": fp16}
    options["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 3e-3}}
    world = torch.distributed.get_world_size()
    settings = config(stage, 12 // world, clip=0.1, **options)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    settings["steps_per_print"] = 1000
    build.ShardedOptimizer = deciding  # type: ignore[assignment,misc]
    model = net().double() if section == "fp64" else net()
    engine, *_ = zlaunch.initialize(model=model, config=settings)
    build.ShardedOptimizer = ShardedOptimizer  # type: ignore[misc]
    assert engine._shard_step is not None and engine._shard_step.decides_on_device is on_device
    rank = engine.global_rank
    for batch in batches(14 if section == "fp16" else 6, 12):
        engine.backward(loss_of(engine, batch.chunk(world)[rank]))
        engine.step()
    state = {name: value.double().clone() for name, value in engine.module.state_dict().items()}
    facts = [engine.skipped_steps, engine.loss_scale, engine.get_lr(), engine.get_global_grad_norm()]
    facts += [engine.overflow, engine.should_stop]
    engine.destroy()
    return state, facts


def _compare(section: str) -> list[str]:
    zlaunch.init_distributed()
    wrong = []
    for stage in range(4):
        wanted, facts = _train(stage, False, section)
        got, mine = _train(stage, True, section)
        if section == "fp32":
            exact, _ = _train(stage, False, "fp64")
            errors = [max(relative_error(state[k], exact[k]) for k in exact) for state in (got, wanted)]
            if not errors[0] <= 10 * errors[1] < 1e-2:
                wrong.append(f"stage {stage}: errors {errors}")
        elif not all(torch.allclose(got[k], wanted[k], rtol=1e-2, atol=1e-2) for k in wanted):
            wrong.append(f"stage {stage}: other values")
        if mine[:3] != facts[:3] or mine[4:] != facts[4:] or mine[3] != pytest.approx(facts[3], rel=1e-2):
            wrong.append(f"stage {stage}: {mine} != {facts}")
        if section == "fp16" and not mine[0]:
            wrong.append("no step was skipped")
    return wrong


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("section", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2])
def test_it_makes_the_same_step(section: str, world: int) -> None:
    # the kernels' twins, which read nothing, as the kernels do; the CPU's own step reads its scalars
    env = {"ZLAUNCH_SHARED_MEMORY": "0", "ZLAUNCH_KERNELS": "torch"}
    assert run_workers(_compare, world, section, env=env) == [[]] * world


def _floor() -> str:
    from zlaunch.runtime import build
    from zlaunch.runtime.errors import LossScaleFloorError
    from zlaunch.runtime.optim.step import ShardedOptimizer

    plain = ShardedOptimizer
    build.ShardedOptimizer = lambda *args, **kwargs: plain(*args, **{**kwargs, "on_device": True})  # type: ignore
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}
    engine, *_ = zlaunch.initialize(model=net(), config=config(1, 12, fp16=fp16))
    try:
        for batch in batches(6, 12):
            engine.backward(loss_of(engine, batch) * float("inf"))
            engine.step()
    except LossScaleFloorError as error:
        return f"{engine.global_steps} {error}"
    return "no error"


def test_the_floor_is_found_one_step_later() -> None:
    (message,) = run_workers(_floor, 1)
    assert message.startswith("2 gradients overflow at the minimum loss scale, 1")
