"""Check that training under every stage equals plain single-process torch on one global batch.

It runs in double precision, where Adam does not blow rounding up. In fp32 the measure is the error that
plain DDP has in such a run, so that nothing depends on the instructions of a CPU.
"""

from __future__ import annotations

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, loss_of, net, relative_error, train_engine, train_plain
from tests.runtime.workers import run_workers

pytestmark = pytest.mark.multi_gpu
STEPS = 5
TOLERANCE = 1e-9
CLIP = 0.05
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}


def _all_stages() -> dict[str, float]:
    """Worst relative error of any parameter, per combination, in one set of processes."""
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    worst = {}
    for accumulation in (1, 4):
        data = batches(STEPS, 12 * accumulation)  # divisible by worlds 1 to 4
        for clip in (0.0, CLIP):
            plain = net().double()
            losses = train_plain(plain, data, clip)
            for stage in range(4):
                model = net().double()
                micro = 12 // world
                engine, *_ = zlaunch.initialize(model=model, config=config(stage, micro, accumulation, clip))
                mine = torch.tensor(train_engine(engine, data), dtype=torch.float64) / world
                torch.distributed.all_reduce(mine)
                state = engine.module.state_dict()
                wanted = plain.state_dict()
                assert state.keys() == wanted.keys()
                errors = [relative_error(state[name], wanted[name]) for name in wanted]
                errors.append(relative_error(mine, torch.tensor(losses, dtype=torch.float64)))
                worst[f"stage {stage} accumulation {accumulation} clip {clip}"] = max(errors)
                engine.destroy()
    return worst


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world_size", "env"),
    [
        *((1, {}), (2, {}), (3, {})),
        pytest.param(4, {}, marks=pytest.mark.exhaustive),
        pytest.param(3, GLOO, marks=pytest.mark.exhaustive),
    ],
    ids=["1", "2", "3", "4", "3 over gloo"],
)
def test_training_equals_plain_torch(world_size: int, env: dict[str, str]) -> None:
    results = run_workers(_all_stages, world_size, env=env)
    for worst in results:
        assert len(worst) == 16
        assert {name: error for name, error in worst.items() if not error <= TOLERANCE} == {}


def _errors_in_fp32() -> dict[str, float]:
    """Worst relative error of any parameter against double precision: plain DDP's, and that of each stage."""
    zlaunch.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = batches(STEPS, 12)
    exact = net().double()
    train_plain(exact, data, CLIP)
    wanted = exact.state_dict()

    def error(state: dict[str, torch.Tensor]) -> float:
        return max(relative_error(state[name], wanted[name]) for name in wanted)

    plain = net()
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    for batch in data:
        loss_of(ddp, batch.chunk(world)[rank]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    found = {"DDP": error(plain.state_dict())}
    for stage in range(4):
        engine, *_ = zlaunch.initialize(model=net(), config=config(stage, 12 // world, 1, CLIP))
        train_engine(engine, data)
        found[f"stage {stage}"] = error(engine.module.state_dict())
        engine.destroy()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_fp32_is_as_exact_as_ddp(world_size: int) -> None:
    for found in run_workers(_errors_in_fp32, world_size):
        assert 0 < found["DDP"] < 1e-2 and max(found.values()) <= 10 * found["DDP"], found
