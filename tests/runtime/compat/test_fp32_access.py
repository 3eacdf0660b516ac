"""Test values, gradients and states of single parameters, read and changed, beside plain torch.

They run in double precision, so that the comparison can be sharp on any machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, config, grad_of, loss_of, net
from tests.runtime.workers import run_workers
from zlaunch.compat import fp32_access as access

_PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
}
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
ROUNDED: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
"""Gradients are handed out in fp32."""
_NAMES = ("embedding.weight", "layers.1.up.weight", "norm.bias")


def _plain(world: int, steps: int) -> tuple[Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model after ``steps`` steps on all samples, and the gradients of the step after that."""
    model = net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step, data in enumerate(batches(steps + 1, 2 * world)):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        if step < steps:
            optimizer.step()
    return model, optimizer, {name: grad_of(p).clone() for name, p in model.named_parameters()}


def _engine(stage: int, place: str, folder: str) -> Any:
    given = config(stage, 2, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    for name, section in _PLACES[place].items():
        path = {"nvme_path": folder} if section["device"] == "nvme" else {}
        given["zero_optimization"][name] = {**section, **path}
    return zlaunch.initialize(model=net().double(), config=given)[0]


def _read_and_change(stage: int, place: str, folder: str) -> str:
    engine = _engine(stage, place, folder)
    world, rank = engine.world_size, engine.global_rank
    parameters = dict(engine.module.named_parameters())
    zeros = access.safe_get_full_optimizer_state(parameters[_NAMES[0]], "exp_avg")
    assert zeros is not None and not zeros.any()
    for data in batches(3, 2 * world)[:2]:
        engine.backward(loss_of(engine, data[2 * rank : 2 * rank + 2]))
        engine.step()
    last = batches(3, 2 * world)[2]
    engine.backward(loss_of(engine, last[2 * rank : 2 * rank + 2]))
    model, optimizer, gradients = _plain(world, 2)
    for name, plain in model.named_parameters():
        mine = parameters[name]
        value = access.safe_get_full_fp32_param(mine)
        assert value is not None and value.shape == plain.shape
        torch.testing.assert_close(value, plain.detach(), **CLOSE)
        for key in ("exp_avg", "exp_avg_sq"):
            state = access.safe_get_full_optimizer_state(mine, key)
            torch.testing.assert_close(state, optimizer.state[plain][key], **CLOSE)
        parts = [torch.zeros(0, dtype=torch.float64)] * world
        torch.distributed.all_gather_object(parts, access.safe_get_local_fp32_param(mine))
        joined = parts[0] if stage == 0 else torch.cat(parts)
        assert torch.equal(joined, value.reshape(-1))
        if place != "nvme":
            grad = access.safe_get_full_grad(mine)
            torch.testing.assert_close(grad, gradients[name], **ROUNDED)
    assert access.safe_get_full_fp32_param(torch.nn.Parameter(torch.zeros(3))) is None
    assert access.safe_get_full_optimizer_state(parameters[_NAMES[0]], "nothing") is None
    with pytest.raises(KeyError, match="exp_avg"):
        access.safe_set_full_optimizer_state(
            parameters[_NAMES[0]], torch.zeros_like(model.embedding.weight), "nothing"
        )
    with pytest.raises(ValueError, match="elements"):
        access.safe_set_full_fp32_param(parameters[_NAMES[0]], torch.zeros(3))

    # what is set is what the next step starts from: plain torch with the same changes
    chance = torch.Generator().manual_seed(5)
    for name in _NAMES:
        mine, plain = parameters[name], dict(model.named_parameters())[name]
        new = {
            key: torch.rand(plain.shape, generator=chance, dtype=torch.float64)
            for key in ("value", "exp_avg", "exp_avg_sq", "grad")
        }
        access.safe_set_full_fp32_param(mine, new["value"])
        plain.data.copy_(new["value"])
        for key in ("exp_avg", "exp_avg_sq"):
            access.safe_set_full_optimizer_state(mine, new[key], key)
            optimizer.state[plain][key].copy_(new[key])
            written = access.safe_get_full_optimizer_state(mine, key)
            assert written is not None and torch.equal(written, new[key])
        if place != "nvme":
            access.safe_set_full_grad(mine, new["grad"])
            plain.grad.copy_(new["grad"])
            torch.testing.assert_close(access.safe_get_full_grad(mine), new["grad"])
    engine.step()
    optimizer.step()
    for name, plain in model.named_parameters():
        value = access.safe_get_full_fp32_param(parameters[name])
        torch.testing.assert_close(value, plain.detach(), **CLOSE)
    data = batches(1, 2)[0]
    torch.testing.assert_close(loss_of(engine, data), loss_of(model, data), **CLOSE)
    engine.destroy()
    return "done"


def _read_everywhere(folder: str) -> list[str]:
    done = []
    for stage in (0, 1, 2, 3):
        for place in _PLACES:
            if (place == "nvme" and stage < 3) or (place == "cpu" and stage == 0):
                continue
            done.append(f"{stage} {place} {_read_and_change(stage, place, folder)}")
    return done


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, 2])
def test_reading_and_changing(tmp_path: Path, world: int) -> None:
    results = run_workers(_read_everywhere, world, str(tmp_path))
    assert all(len(result) == 8 for result in results)


def _set_before_the_first_step() -> list[Any]:
    engine = _engine(2, "device", "")
    mine = engine.module.embedding.weight
    assert access.safe_get_full_grad(mine) is None
    access.safe_set_full_optimizer_state(mine, torch.full_like(mine, 0.5), "exp_avg")
    state = access.safe_get_full_optimizer_state(mine, "exp_avg")
    other = access.safe_get_full_optimizer_state(engine.module.norm.bias, "exp_avg")
    engine.backward(loss_of(engine, batches(1, 2)[0]))
    engine.step()
    value = access.safe_get_full_fp32_param(mine)
    assert state is not None and other is not None and value is not None
    return [
        float(state.mean()),
        float(other.sum()),
        bool(torch.isfinite(value).all()),
    ]


def test_a_state_can_be_set_before_the_first_step() -> None:
    assert run_workers(_set_before_the_first_step, 2) == [[0.5, 0.0, True]] * 2


def _set_in_bf16() -> list[bool]:
    """Set gradients with more digits than bf16 has; tell whether they, and the step of SGD, have them."""
    zlaunch.init_distributed()
    kept = []
    for stage in (0, 1, 2, 3):
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        engine, *_ = zlaunch.initialize(
            model=net(), config=config(stage, 12, bf16={"enabled": True}, optimizer=sgd)
        )
        for batch in batches(2, 12):
            engine.backward(loss_of(engine, batch))
            mine = dict(engine.module.named_parameters())["layers.0.up.weight"]
            before = access.safe_get_full_fp32_param(mine)
            assert before is not None
            value = torch.full_like(before, 1 + 2.0**-12)
            access.safe_set_full_grad(mine, value)
            found = access.safe_get_full_grad(mine)
            engine.step()
            after = access.safe_get_full_fp32_param(mine)
            kept.append(found is not None and torch.equal(found, value) and after is not None)
            kept.append(after is not None and torch.equal(after, before - value))
        engine.destroy()
    return kept


def test_a_gradient_that_is_set_is_not_rounded_to_the_training_dtype() -> None:
    (kept,) = run_workers(_set_in_bf16, 1)
    assert kept == [True] * 16
