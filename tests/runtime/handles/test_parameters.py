"""Test changes of a parameter between its uses: they reach the engine, or an error says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zlaunch
from tests.runtime.models import batches, config, grad_of, loss_of, net, relative_error
from tests.runtime.workers import join, run_workers


def options(stage: int, **extra: Any) -> dict[str, Any]:
    """A config with even the smallest blocks sharded."""
    return config(stage, 2, zero={"stage3_module_granularity_threshold": 0}, **extra)


def _freed() -> None:
    zlaunch.init_distributed()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=options(3))
    weight, gain = model.layers[1].up.weight, model.layers[1].norm.weight
    writes = {
        "fill_": lambda p: p.fill_(1.0),
        "zero_": lambda p: p.zero_(),
        "add_": lambda p: p.add_(1.0),
        "copy_": lambda p: p.copy_(torch.ones_like(p)),
        "item": lambda p: p.__setitem__(0, 1.0),
        "normal": lambda p: nn.init.normal_(p),
        "constant": lambda p: nn.init.constant_(p, 2.0),
        "xavier": lambda p: nn.init.xavier_uniform_(p),
        "data": lambda p: p.data.fill_(1.0),
        "data view": lambda p: p.data.view(-1)[3:5].mul_(0.5),
        "detach": lambda p: p.detach().clamp_(-1, 1),
        "out": lambda p: torch.add(p, 1.0, out=p),
        "foreach": lambda p: torch._foreach_mul_([p], 0.5),
        "set": lambda p: setattr(p, "data", torch.ones(p.shape)),
        "iadd": lambda p: p.__iadd__(1.0),
    }
    for name, write in writes.items():
        with (
            pytest.raises((zlaunch.ParameterError, RuntimeError), match=r"layers\.1\.up\.weight"),
            torch.no_grad(),
        ):
            write(weight)
        assert torch.isnan(weight).all() and torch.isnan(gain).all(), name
    for use in (lambda p: p.sum(), lambda p: p * 2, lambda p: nn.functional.linear(torch.ones(1, 24), p)):
        with pytest.raises(zlaunch.ParameterError, match=r"layers\.1\.up\.weight .*GatheredParameters"):
            use(weight)
    assert weight.detach().norm().isnan() and weight.data.mean().isnan() and weight.shape == (96, 24)
    with torch.no_grad():
        assert (weight + 1).isnan().all() and len(weight.tolist()) == 96

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def compute_loss(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.inner.head.weight).sum()

    engine, *_ = zlaunch.initialize(model=Functional(), config=options(3))
    with pytest.raises(zlaunch.ParameterError, match=r"inner\.head\.weight"):
        engine.compute_loss(torch.ones(1, 24))  # type: ignore[operator]  # it is the model's


def test_a_freed_parameter_is_read_as_nan_and_never_written() -> None:
    run_workers(_freed, 1)


def _taken(stage: int) -> None:
    zlaunch.init_distributed()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=options(stage))
    tokens = batches(1, 2)[0]
    assert all(p.grad is None for p in model.parameters())
    engine.backward(loss_of(engine, tokens))
    with pytest.raises(zlaunch.ParameterError, match=r"embedding\.weight\.grad .*gradient_clipping"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(zlaunch.ParameterError, match="safe_set_full_grad"):
        for p in model.parameters():
            grad_of(p).add_(1.0)
    with pytest.raises(zlaunch.ParameterError, match=r"head\.weight\.grad cannot be assigned"):
        model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(zlaunch.ParameterError, match=r"head\.weight\.data cannot|head\.weight is sharded"):
        model.head.weight.data = torch.ones(31, 24)
    engine.step()
    assert all(p.grad is None for p in model.parameters())
    if stage < 3:
        model.head.weight.data += 0.1  # the same memory
    with pytest.raises(RuntimeError, match="without a backward pass"):
        engine.step()

    model.extra = nn.Parameter(torch.ones(3))
    engine.backward(loss_of(engine, tokens))
    with pytest.raises(zlaunch.ParameterError, match="extra was replaced or added"):
        engine.step()
    del model.extra
    engine.step()
    former = model.layers[0].up
    model.layers[0].up = nn.Linear(24, 96)
    with pytest.raises(zlaunch.ParameterError, match=r"layers\.0\.up was replaced"):
        engine.save_checkpoint("never")
    model.layers[0].up = former
    if stage < 3:
        weight = model.layers[1].down.weight
        own = torch.Tensor.data.__get__(weight)  # type: ignore[attr-defined]
        torch.Tensor.data.__set__(weight, torch.ones_like(own))  # type: ignore[attr-defined]  # as a library in C++ might
        engine.backward(loss_of(engine, tokens))
        with pytest.raises(zlaunch.ParameterError, match=r"layers\.1\.down\.weight is no longer in"):
            engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_cannot_reach_the_engine_raises(stage: int) -> None:
    run_workers(_taken, 1, stage)


def _written(folder: str) -> dict[str, float]:
    """Weights changed in place between the steps of 16-bit training, against fp32 masters done by hand."""
    rank = join()
    world = torch.distributed.get_world_size()
    found = {}
    ways = {
        "data": lambda p: p.data.clamp_(-0.02, 0.02),
        "no_grad": lambda p: p.clamp_(-0.02, 0.02),
        "detach": lambda p: p.detach().clamp_(-0.02, 0.02),
        "copy": lambda p: p.copy_(p.clamp(-0.02, 0.02)),
    }
    for stage in (0, 1, 2):
        for place in ("device", "cpu", "nvme"):
            if stage == 0 and place != "device":
                continue
            for way, change in ways.items():
                given = options(stage, bf16={"enabled": True})
                if place != "device":
                    given["zero_optimization"]["offload_optimizer"] = {"device": place, "nvme_path": folder}
                model = net()
                engine, *_ = zlaunch.initialize(model=model, config=given)
                for batch in batches(3, 2 * world):
                    engine.backward(loss_of(engine, batch.chunk(world)[rank]))
                    engine.step()
                    with torch.no_grad():
                        for p in model.parameters():
                            change(p)
                engine.backward(loss_of(engine, batches(1, 2 * world)[0].chunk(world)[rank]))
                engine.step()
                # one step moves an element by about lr (3e-3), and decay by less
                largest = max(float(p.detach().abs().max()) for p in model.parameters())
                found[f"{stage} {place} {way}"] = largest
                master = zlaunch.safe_get_full_fp32_param(model.head.weight)
                assert master is not None
                assert relative_error(master.bfloat16(), model.head.weight.detach()) == 0
                with torch.no_grad():
                    model.head.weight.fill_(0.5)
                filled = zlaunch.safe_get_full_fp32_param(model.head.weight)
                assert filled is not None and bool((filled == 0.5).all())
                engine.destroy()
    return found


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2])
def test_changes_in_place_reach_the_masters(world: int, tmp_path: Any) -> None:
    for found in run_workers(_written, world, str(tmp_path)):
        assert {name: value for name, value in found.items() if not value <= 0.03} == {}


def _kept_digits() -> bool:
    """What nobody has changed keeps the digits that 16 bits do not show."""
    zlaunch.init_distributed()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=options(1, bf16={"enabled": True}))
    engine.backward(loss_of(engine, batches(1, 2)[0]))
    engine.step()
    before = zlaunch.safe_get_full_fp32_param(model.head.weight)
    with torch.no_grad():
        model.head.weight[0].zero_()
    after = zlaunch.safe_get_full_fp32_param(model.head.weight)
    assert before is not None and after is not None
    return torch.equal(before[1:], after[1:]) and not bool(after[0].any())


def test_other_elements_keep_their_digits() -> None:
    assert run_workers(_kept_digits, 1) == [True]


def _gathered() -> None:
    """When one of several units cannot be gathered, the others do not stay whole."""
    zlaunch.init_distributed()
    model = net()
    engine, *_ = zlaunch.initialize(model=model, config=options(3))
    first, second = engine.units[1], engine.units[2]

    def fails(*, rounded: bool = False) -> None:
        raise OSError("no such tensor")

    second.unshard = fails  # type: ignore[method-assign]
    for context in (
        lambda: zlaunch.zero.GatheredParameters([first.parameters[0], second.parameters[0]]),
        lambda: engine._sharded.gathered([first, second]),
    ):
        with pytest.raises(OSError, match="no such tensor"), context():
            pass
        assert first.state.name == "SHARDED" and first._storage.nbytes() == 0


def test_a_failed_gather_lets_go_of_the_others() -> None:
    run_workers(_gathered, 1)


def _hooks(stage: int) -> list[float]:
    """A parameter's hook sees a step's mean, whatever the accumulation."""
    zlaunch.init_distributed()
    seen = []
    for accumulation in (1, 4):
        model = net().double()
        sums = torch.zeros(31, 24, dtype=torch.float64)
        model.head.weight.register_hook(lambda grad, sums=sums: sums.add_(grad).mul(1.0))
        engine, *_ = zlaunch.initialize(model=model, config=options(stage, accumulation=accumulation))
        for micro in batches(1, 8)[0].chunk(accumulation):
            engine.backward(loss_of(engine, micro))
            engine.step()
        seen.append(sums)
        engine.destroy()
    return [relative_error(seen[1], seen[0])]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradient_hooks_see_the_mean_over_micro_batches(stage: int) -> None:
    assert max(run_workers(_hooks, 1, stage)[0]) <= 1e-9


def _wide_sums(stage: int) -> float:
    """The sum of several bf16 gradients is not rounded to bf16 before it is sent."""
    rank = join()
    model = net()
    wanted = torch.zeros(31, 24, dtype=torch.float64)

    def collect(grad: Tensor) -> None:
        wanted.add_(grad.double())

    model.head.weight.register_hook(collect)
    engine, *_ = zlaunch.initialize(
        model=model, config=options(stage, accumulation=4, bf16={"enabled": True})
    )
    for index, micro in enumerate(batches(1, 16)[0].chunk(8)[rank * 4 : rank * 4 + 4]):
        engine.backward(loss_of(engine, micro))
        if index == 3:
            torch.distributed.all_reduce(wanted)
            found = zlaunch.safe_get_full_grad(model.head.weight)
            assert found is not None
            return relative_error(found, wanted / 2)
        engine.step()
    raise AssertionError


@pytest.mark.parametrize("stage", [0, 1])
def test_sums_of_16_bit_gradients_are_sent_in_32(stage: int) -> None:
    assert max(run_workers(_wide_sums, 2, stage)) <= 1e-6
