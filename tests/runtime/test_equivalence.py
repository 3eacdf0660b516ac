"""Training under every stage equals plain single-process torch on the same global batch."""

from __future__ import annotations

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, net, relative_error, train_engine, train_plain
from tests.runtime.workers import run_workers

STEPS = 20
GLOO = {"ZLAUNCH_SHARED_MEMORY": "0"}


def _all_stages() -> dict[str, float]:
    """Worst relative error of any parameter, per combination, in one set of processes."""
    zlaunch.init_distributed()
    world = torch.distributed.get_world_size()
    worst = {}
    for accumulation in (1, 4):
        data = batches(STEPS, 12 * accumulation)  # divisible by worlds 1 to 4
        for clip in (0.0, 0.05):
            plain = net()
            losses = train_plain(plain, data, clip)
            for stage in range(4):
                model = net()
                micro = 12 // world
                engine, *_ = zlaunch.initialize(model=model, config=config(stage, micro, accumulation, clip))
                mine = torch.tensor(train_engine(engine, data)) / world
                torch.distributed.all_reduce(mine)
                state = engine.module.state_dict()
                wanted = plain.state_dict()
                assert state.keys() == wanted.keys()
                errors = [relative_error(state[name], wanted[name]) for name in wanted]
                errors.append(relative_error(mine, torch.tensor(losses)))
                worst[f"stage {stage} accumulation {accumulation} clip {clip}"] = max(errors)
                engine.destroy()
    return worst


@pytest.mark.parametrize(
    ("world_size", "env"),
    [(1, {}), (2, {}), (3, {}), (4, {}), (3, GLOO)],
    ids=["1", "2", "3", "4", "3 over gloo"],
)
def test_fp32_equals_plain_torch(world_size: int, env: dict[str, str]) -> None:
    results = run_workers(_all_stages, world_size, env=env)
    for worst in results:
        assert len(worst) == 16
        assert {name: error for name, error in worst.items() if not error <= 1e-5} == {}
