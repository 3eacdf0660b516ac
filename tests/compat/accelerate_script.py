# ruff: noqa: E402, I001
"""Train by accelerate with its DeepSpeed plugin: state, unwrapping; the losses are those of plain torch."""

from __future__ import annotations

import sys
from typing import Any

import zlaunch.compat.deepspeed

zlaunch.compat.deepspeed.install()

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader, TensorDataset

import deepspeed


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = (
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )
    return torch.nn.Sequential(*layers)


def rows() -> TensorDataset:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def plain(steps: int) -> list[float]:
    """Plain torch on the batches of both ranks."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    losses = []
    for _, (x, y) in zip(range(steps), DataLoader(rows(), batch_size=8), strict=False):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def scene(stage: int, mode: str, folder: str) -> None:
    AcceleratorState._reset_state()
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    if mode == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    if mode == "dummy":
        given["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
        limits = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        given["scheduler"] = {"type": "WarmupLR", "params": limits}
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given), kwargs_handlers=[gloo])
    model: Any = net()
    if mode == "dummy":
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        schedule: Any = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = DataLoader(rows(), batch_size=4)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for step, (x, y) in enumerate(data):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        if step == 2:
            accelerator.save_state(folder)
    assert accelerator.num_processes == 2 and norm > 0 and not optimizer.step_was_skipped
    if mode != "dummy":
        expected = plain(len(losses))
        assert all(abs(a - b) < 1e-3 * b for a, b in zip(losses, expected, strict=True)), (losses, expected)
    accelerator.load_state(folder)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert {name: value.shape for name, value in state.items()} == {
            n: p.shape for n, p in net().named_parameters()
        }
        assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    assert isinstance(model, deepspeed.DeepSpeedEngine)
    assert type(accelerator.unwrap_model(model)) is torch.nn.Sequential
    if accelerator.is_main_process:
        print(stage, mode, "ends well", flush=True)
    accelerator.free_memory()


if __name__ == "__main__":
    for stage, mode in ((1, "dummy"), (2, "offload"), (3, "torch")):
        scene(stage, mode, f"{sys.argv[1]}_{stage}")
