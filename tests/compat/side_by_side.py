"""Run a DeepSpeed script that must give equal results under both: ``side_by_side.py OUT.json``, on any ranks.

Nothing here knows zlaunch. ``python -m tests.data.side_by_side.record`` runs it under the real DeepSpeed and
writes down what it says; the test compares ours with that.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from side_by_side_net import batch, net


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, **more}


def train(engine: Any, steps: int, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(steps * accumulation):
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def cases(stage: int) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    found: dict[str, Any] = {}
    # the defaults: no key for clipping
    engine, *_ = deepspeed.initialize(model=net(), config=config(stage, optimizer=adam))
    found["config's AdamW"] = train(engine, 5)
    parameter = engine.module.blocks[1][2].weight
    engine.backward(engine(batch(9, dist.get_rank())))
    grad = safe_get_full_grad(parameter)
    found["gradient"] = float(grad.norm())
    engine.step()
    found["norm"] = float(engine.get_global_grad_norm()) if stage else 0.0
    found["master"] = float(safe_get_full_fp32_param(parameter).norm()) if stage else 0.0
    found["moment"] = float(safe_get_full_optimizer_state(parameter, "exp_avg").norm()) if stage else 0.0
    if stage:
        safe_set_full_fp32_param(parameter, torch.zeros(64, 64))
        found["after set"] = float(safe_get_full_fp32_param(parameter).norm())
    engine.destroy()

    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
    }
    more = {
        "optimizer": adam,
        "scheduler": warmup,
        "gradient_clipping": 0.1,
        "gradient_accumulation_steps": 2,
    }
    engine, optimizer, _, schedule = deepspeed.initialize(model=net(), config=config(stage, **more))
    found["accumulation, clipping, warmup"] = train(engine, 5, 2)
    found["rate"] = [engine.get_lr()[0], optimizer.param_groups[0]["lr"], schedule.get_last_lr()[0]]
    found["counters"] = [engine.global_steps, engine.micro_steps, engine.train_batch_size()]
    engine.destroy()

    model = net()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.002}]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        lr_scheduler=lambda optimizer: WarmupLR(optimizer, 0, 0.01, 3, "linear"),
        config=config(stage, gradient_clipping=1.0, zero_allow_untested_optimizer=True),
    )
    found["groups, client's optimizer, schedule from a function"] = train(engine, 5)
    engine.destroy()

    if stage:
        model = net()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=DeepSpeedCPUAdam(model.parameters(), lr=0.01, weight_decay=0.1, adamw_mode=False),
            config=config(stage, gradient_clipping=0.0, zero={"offload_optimizer": {"device": "cpu"}}),
        )
        found["offload, Adam with L2"] = train(engine, 5)
        engine.destroy()
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config(3)):
            model = net()
        shapes = [list(model.head.weight.shape), list(model.head.weight.ds_shape), model.head.weight.ds_numel]
        found["sharded"] = [shapes, model.head.weight.ds_status.name]
        with deepspeed.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            found["gathered"] = [list(model.head.weight.shape), model.head.weight.ds_status.name]
            if dist.get_rank() == 0:
                model.head.weight.data.mul_(0.5)
        engine, *_ = deepspeed.initialize(model=model, config=config(3, optimizer=adam))
        found["built in zero.Init, changed in GatheredParameters"] = train(engine, 5)
        engine.destroy()
    return found


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    assert FusedAdam is not None
    stages = [int(stage) for stage in sys.argv[2].split(",")] if len(sys.argv) > 2 else [0, 1, 2, 3]
    found = {str(stage): cases(stage) for stage in stages}
    everyone: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(everyone, file, indent=1)


if __name__ == "__main__":
    main()
