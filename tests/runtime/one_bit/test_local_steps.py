"""Test 0/1 Adam's local steps beside the paper's algorithm."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zlaunch
from tests.runtime.collective_step.models import data, error, make_engine, odd, section, train
from tests.runtime.one_bit.local_steps_reference import ReferenceLocalSteps
from tests.runtime.one_bit.test_one_bit import TOLERANCE, layouts_of
from tests.runtime.workers import join, run_workers
from zlaunch.optim import ZeroOneAdam
from zlaunch.runtime.optim.sign_exchange import BYTES

PARAMS: dict[str, Any] = {
    "lr": 3e-3,
    "weight_decay": 0.1,
    "eps": 1e-2,  # its few dense steps leave small variances, by which signs would send weights far away
    "var_freeze_step": 5,
    "var_update_scaler": 2,
    "local_step_scaler": 4,
    "local_step_clipper": 4,
}
ADAM = {"type": "ZeroOneAdam", "params": PARAMS}


def reference_of(engine: Any, model: nn.Module) -> ReferenceLocalSteps:
    options = {**PARAMS, "freeze_step": PARAMS["var_freeze_step"]}
    return ReferenceLocalSteps(model, layouts_of(engine), engine.world_size, **options)


def _train(accumulation: int) -> tuple[float, float, int, int]:
    """Return the errors among local steps and after an exchange, and in how many steps signs were sent."""
    rank = join()
    engine = make_engine(None, section(0), ADAM, gradient_accumulation_steps=accumulation)
    reference = reference_of(engine, odd())
    moved, sending = engine.comm.moved, 0
    for tokens in data()[:19]:
        before = moved[BYTES]
        train(engine, [tokens])
        sending += moved[BYTES] != before
    reference.train(data()[:19])
    assert reference.apart
    dense = 2 + 1  # of the first five steps: 1 and 2, then 4
    in_signs = sending - (PARAMS["var_freeze_step"] - dense if engine.world_size > 1 else 0)
    exchanges = reference.exchanges
    reference.show(rank)
    apart = error(engine, reference.model)
    train(engine, data()[19:])
    reference.train(data()[19:])
    assert not reference.apart
    together = error(engine, reference.model)
    engine.destroy()
    return apart, together, in_signs, exchanges


@pytest.mark.rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 1), (2, 3), (3, 1)])
def test_steps_are_those_of_the_paper(world: int, accumulation: int) -> None:
    for apart, together, in_signs, exchanges in run_workers(_train, world, accumulation):
        assert apart <= TOLERANCE and together <= TOLERANCE
        assert exchanges < 9, "of 14 steps"
        assert in_signs == (exchanges if world > 1 else 0)


def _save(folder: str) -> list[torch.Tensor]:
    """Save among local steps, in three ways."""
    rank = join()
    engine = make_engine(None, section(0), ADAM)
    reference = reference_of(engine, odd())
    train(engine, data()[:15])
    reference.train(data()[:15])
    own = engine.module.head.weight.detach().clone()
    assert reference.apart
    engine.save_checkpoint(folder, tag="apart")
    reference.meet()
    assert error(engine, reference.model) <= TOLERANCE
    if rank == 0:
        kept = {"m": reference.first.m, "v": reference.first.v, "x": reference.model.state_dict()}
        torch.save((kept, reference.interval, reference.counter), f"{folder}/reference.pt")
    met = engine.module.head.weight.detach().clone()
    train(engine, data()[15:18])  # at 16 they meet
    reference.train(data()[15:18])
    reference.show(rank)
    assert error(engine, reference.model) <= TOLERANCE
    engine.save_16bit_model(folder, "weights.bin")
    weights = torch.load(f"{folder}/weights.bin", weights_only=True)
    assert torch.equal(weights["head.weight"], engine.module.head.weight)
    engine.destroy()
    return [own, met]


def _resume(folder: str) -> float:
    join()
    engine = make_engine(None, section(0), ADAM)
    train(engine, data()[:14])  # the rank has weights and errors of its own, which do not count
    engine.load_checkpoint(folder, tag="apart")
    reference = reference_of(engine, odd())
    kept, reference.interval, reference.counter = torch.load(f"{folder}/reference.pt", weights_only=True)
    reference.first.m, reference.first.v, reference.first.t = kept["m"], kept["v"], 15
    reference.model.load_state_dict(kept["x"])
    train(engine, data()[15:])
    reference.train(data()[15:])
    reference.show(engine.global_rank)
    found = error(engine, reference.model)
    engine.destroy()
    return found


def _resume_sharded(folder: str) -> None:
    """Under stage 1 there are no local steps, whatever the checkpoint's run made."""
    join()
    params = {key: value for key, value in PARAMS.items() if not key.startswith("local")}
    engine = make_engine(None, section(1), {"type": "ZeroOneAdam", "params": params})
    engine.load_checkpoint(folder, tag="apart")
    assert engine.optimizer.param_groups[0]["local_step_clipper"] == 1
    train(engine, data()[15:18])
    weights = engine.comm.exchange(engine.module.head.weight.tolist())
    assert weights[0] == weights[1]
    engine.destroy()


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [1, 3])
def test_saves_have_what_ranks_agree_on(after: int, tmp_path: Path) -> None:
    first, second = run_workers(_save, 2, str(tmp_path))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert max(run_workers(_resume, after, str(tmp_path))) <= TOLERANCE
    run_workers(_resume_sharded, 2, str(tmp_path))


def bf16_engine() -> Any:
    """Make an engine whose masters and parameters are not one memory."""
    join()
    given = {
        "train_micro_batch_size_per_gpu": 3,
        "bf16": {"enabled": True},
        "optimizer": ADAM,
        "zero_optimization": section(0),
    }
    return zlaunch.initialize(model=odd().float(), config=given)[0]


def _half() -> list[torch.Tensor]:
    """Return a weight on this rank after an exchange, one step later, and after the engine."""
    engine = bf16_engine()
    train(engine, data()[:16])
    found = [engine.module.head.weight.detach().clone()]
    train(engine, data()[16:17])
    found.append(engine.module.head.weight.detach().clone())
    engine.destroy()
    found.append(engine.module.head.weight.detach().clone())
    return found


def test_ranks_are_equal_to_the_bit_after_an_exchange_and_at_the_end() -> None:
    first, second = run_workers(_half, 2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2]), "destroyed, the model is the same on all ranks"


def _refused() -> None:
    join()
    for stage in (1, 3):
        with pytest.raises(
            zlaunch.ConfigError, match="local_step_clipper: local steps need different weights on each rank"
        ):
            make_engine(None, section(stage), ADAM)
        with pytest.raises(zlaunch.OptimizerError, match="local_step_clipper 16 needs whole weights"):
            make_engine(_sixteen, section(stage))
    engine = make_engine(None, section(0), ADAM)
    train(engine, data()[:16])
    with torch.no_grad():
        engine.module.head.weight.clamp_(-0.01, 0.01)  # all ranks are equal here, and may be changed
    train(engine, data()[16:17])
    with torch.no_grad():
        engine.module.head.weight.clamp_(-0.01, 0.01)
    with pytest.raises(
        zlaunch.OptimizerError,
        match=r"the script changed head\.weight, its variance or eps between two",
    ):
        train(engine, data()[17:18])
    engine.destroy()


def _sixteen(model: Any) -> ZeroOneAdam:
    return ZeroOneAdam(model.parameters(), local_step_clipper=16)


def test_what_cannot_be_is_refused() -> None:
    run_workers(_refused, 2)


def _rest() -> tuple[bool, bool]:
    """Train at a learning rate of 0; tell whether all stayed where it was, and stays finite later."""
    join()
    engine = make_engine(None, section(0), ADAM)
    train(engine, data()[:16])
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, data()[16:20])
    same = all(torch.equal(before[name], value) for name, value in engine.module.state_dict().items())
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    train(engine, data()[:4])
    finite = all(bool(value.isfinite().all()) for value in engine.module.state_dict().values())
    engine.destroy()
    return same, finite


def test_a_learning_rate_of_nothing() -> None:
    for same, finite in run_workers(_rest, 2):
        assert finite
        assert same


def _states_and_loads(folder: str) -> dict[str, bool]:
    """Load states and weights among local steps; tell for each way whether ranks are equal again later."""
    join()
    found = {}
    for change in ("optimizer", "moment", "some", "weights", "recovered"):
        engine = make_engine(None, section(0), ADAM)
        train(engine, data()[:10])
        engine.save_checkpoint(folder, tag=change)
        train(engine, data()[10:15])
        weight = engine.module.head.weight
        if change == "optimizer":
            engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        elif change == "moment":
            moment = zlaunch.safe_get_full_optimizer_state(weight, "exp_avg")
            assert moment is not None
            zlaunch.safe_set_full_optimizer_state(weight, moment.clone(), "exp_avg")
        elif change == "some":
            engine.module.norm.register_buffer("more", torch.zeros(1))  # which the file does not have
            engine.load_checkpoint(folder, tag=change, load_module_strict=False)
        elif change == "weights":
            engine.load_checkpoint(folder, tag=change, load_optimizer_states=False)
        else:
            with torch.no_grad():
                weight.add_(1.0)
            with pytest.raises(zlaunch.OptimizerError, match="the script changed"):
                train(engine, data()[15:16])
            engine.load_checkpoint(folder, tag=change)
        group = engine.optimizer.param_groups[0]
        steps = data()[:8]
        while steps:
            train(engine, [steps.pop()])
            if group["step_count"] % 4 == 0:
                break
        both = engine.comm.exchange(weight.tolist())
        found[change] = both[0] == both[1]
        engine.destroy()
    return found


@pytest.mark.exhaustive
def test_loads_and_states_among_local_steps(tmp_path: Path) -> None:
    for found in run_workers(_states_and_loads, 2, str(tmp_path)):
        assert found == dict.fromkeys(("optimizer", "moment", "some", "weights", "recovered"), True)


def _half_saved(folder: str) -> None:
    """Save weights among local steps, with states away, and with a weight that the script has written."""
    engine = bf16_engine()
    train(engine, data()[:17])
    engine.offload_states(include=["optim_states"])
    with pytest.raises(zlaunch.OffloadedError, match="save_16bit_model"):
        engine.save_16bit_model(folder, "weights.bin")
    engine.reload_states()
    engine.module.head.weight.data.fill_(3.0)
    with pytest.raises(zlaunch.OptimizerError, match=r"head\.weight, its variance"):
        engine.save_16bit_model(folder, "weights.bin")
    engine.destroy()


def test_what_is_written_among_local_steps_is_not_lost(tmp_path: Path) -> None:
    run_workers(_half_saved, 2, str(tmp_path))


class Two(nn.Module):
    """Two weights, of which one may rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(256, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(256, dtype=torch.float64))

    def forward(self, factor: float, both: bool) -> torch.Tensor:
        return factor * (self.first.sum() + (self.second.sum() if both else 0.0))


def _momenta(rests: bool) -> tuple[float, list[float]]:
    """Train a weight that has no gradient for an interval, or all at a rate of 0; return its momenta."""
    rank = join()
    params = {**PARAMS, "weight_decay": 0.0}
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "ZeroOneAdam", "params": params},
    }
    model = Two()
    engine: Any = zlaunch.initialize(model=model, config=given)[0]
    for step in range(1, 25):
        if step > 20 and not rests:
            engine.optimizer.param_groups[0]["lr"] = 0.0
        engine.backward(engine(1.0 + rank, step <= 20 or not rests))
        engine.step()
        if step == 20:
            before = zlaunch.safe_get_full_optimizer_state(model.second, "exp_avg")
            assert before is not None
            kept = float(before[0])
    after = zlaunch.safe_get_full_optimizer_state(model.second, "exp_avg")
    assert after is not None
    both = engine.comm.exchange(float(after[0]))
    engine.destroy()
    return float(after[0]) / kept, both


def test_momentum_without_gradients_or_rates() -> None:
    for ratio, both in run_workers(_momenta, 2, True):
        assert ratio == pytest.approx(0.9**4, rel=1e-6) and both[0] == both[1]
    for _, both in run_workers(_momenta, 2, False):
        assert both[0] == both[1]
