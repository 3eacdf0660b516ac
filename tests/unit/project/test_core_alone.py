"""Test that the core trains where no optional room exists, as after their folders are deleted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.project.test_shape import OPTIONAL

ALONE = """
import sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        rooms = tuple(f"zlaunch.runtime.{room}" for room in sys.argv[1].split(",")) + ("zlaunch.compat",)
        if name.startswith(rooms):
            raise ImportError(f"{name} has been deleted")

sys.meta_path.insert(0, Gone())

import torch
from torch import nn
import zlaunch.runtime.engine, zlaunch.runtime.loop, zlaunch.runtime.data, zlaunch.runtime.precision.policy
from zlaunch.runtime.comm.collectives import Comm
from zlaunch.runtime.comm.process_group import init_distributed
from zlaunch.runtime.optim.param_groups import groups_by_parameter
from zlaunch.runtime.optim.sharded_optimizer import ShardedOptimizer
from zlaunch.runtime.zero.hooks import ShardedModel
from zlaunch.runtime.zero.reduce import GradientOptions, GradientReducer
from zlaunch.runtime.zero.unit_policy import ShardingOptions, UnitFactory, plan_blocks

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()

def losses(model, step):
    torch.manual_seed(1)
    found = []
    for _ in range(5):
        x = torch.randn(4, 8, dtype=torch.float64)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        step()
        found.append(loss.item())
    return found

plain = model()
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
expected = losses(plain, lambda: (optimizer.step(), optimizer.zero_grad()))

comm = Comm(init_distributed())

def check(stage):
    sharded = model()
    client = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    options = ShardingOptions(
        shard_optimizer=stage >= 1, shard_grads=stage >= 2, shard_params=stage >= 3, minimum_numel=1
    )
    blocks = plan_blocks(sharded, options)
    UnitFactory(None, comm, options).build(blocks, groups_by_parameter(client.param_groups))
    units = [unit for block in blocks for unit in block.units]
    reducer = GradientReducer(units, comm, GradientOptions(transient=stage >= 2, dtype=None))
    driver = ShardedModel(
        sharded, blocks, reducer, comm, options,
        intercept=lambda module, gathered: lambda: None, prefetch_numel=10**6, max_live_numel=10**6,
    )
    stepper = ShardedOptimizer(client, units, reducer, comm)

    def step():
        driver.reshard_all()
        with torch.no_grad():
            nothing = torch.zeros(0, dtype=torch.float64)
            stepper.step(divisor=1.0, clip=0.0, check_finite=False, beside=nothing)

    torch.testing.assert_close(losses(sharded, step), expected, rtol=1e-12, atol=0)

for stage in (0, 3):
    check(stage)
loaded = [name for name in sys.modules if name.startswith("zlaunch.runtime.")]
print(len(loaded), "modules")
"""


@pytest.mark.exhaustive
def test_the_core_trains_alone() -> None:
    command = [sys.executable, "-c", ALONE, ",".join(OPTIONAL)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) > 20, "the core has been loaded"
