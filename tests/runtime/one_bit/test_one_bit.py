"""Test 1-bit optimizers beside the papers' formulas, and what they send."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from tests.runtime.collective_step.models import (
    cases_of,
    data,
    error,
    loss_of,
    make_engine,
    odd,
    offloads,
    section,
    train,
)
from tests.runtime.one_bit.one_bit_reference import ReferenceOneBit
from tests.runtime.workers import join, run_workers
from zlaunch.cuda_ops import loader
from zlaunch.optim import OneBitAdam, OneBitLamb
from zlaunch.runtime.optim.sign_exchange import BYTES

KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6, "freeze_step": 6},
    "OneBitLamb": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6, "freeze_step": 6},
    "ZeroOneAdam": {
        **{"lr": 3e-3, "eps": 1e-6, "var_freeze_step": 13, "var_update_scaler": 3},
        "local_step_clipper": 1,
    },
}
TOLERANCE = 1e-6
"""A scale is rounded to fp32."""


def layouts_of(engine: Any) -> list[tuple[int, list[tuple[str, int, int]]]]:
    return [
        (unit.numel, [(n, s.offset, s.numel) for n, s in zip(unit.names, unit.layout.slots, strict=True)])
        for unit in engine.units
        if unit.trainable
    ]


def reference_of(engine: Any, kind: str, model: Any) -> ReferenceOneBit:
    options = {"kind": kind, **KINDS[kind]}
    options.setdefault("freeze_step", options.get("var_freeze_step"))
    return ReferenceOneBit(model, layouts_of(engine), engine.world_size, **options)


def train_reference(reference: ReferenceOneBit, model: Any, steps: Sequence[Tensor]) -> None:
    for tokens in steps:
        grads = []
        for part in tokens.chunk(reference.world):
            model.zero_grad()
            loss_of(model, part).backward()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        reference.step(grads)


def _train(folder: str, kind: str) -> dict[str, float]:
    join()
    found = {}
    for stage in (0, 1, 2, 3):
        for name, extra in offloads(folder).items():
            if (stage, name) not in cases_of(torch.distributed.get_world_size()):
                continue
            engine = make_engine(None, section(stage, **extra), {"type": kind, "params": KINDS[kind]})
            plain = odd()
            train_reference(reference_of(engine, kind, plain), plain, data())
            train(engine, data())
            found[f"{stage} {name}"] = error(engine, plain)
            engine.destroy()
    return found


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_offload_equals_the_paper(kind: str, world: int, tmp_path: Path) -> None:
    for found in run_workers(_train, world, str(tmp_path), kind):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _save(folder: str, kind: str) -> None:
    join()
    for stage, name, steps in ((0, "", 10), (3, "", 10), (1, "nvme", 10), (2, "", 4)):
        zero = section(stage, **offloads(folder)[name])
        engine = make_engine(None, zero, {"type": kind, "params": KINDS[kind]})
        train(engine, data()[:steps])
        engine.save_checkpoint(f"{folder}/saved", tag=f"{stage}{name}")
        engine.destroy()


def _resume(folder: str, kind: str, before: int) -> dict[str, float]:
    """Errors of compression begin anew, and the first step is dense: the averaged gradient is there."""
    rank = join()
    found = {}
    for tag, stage, name, steps in (
        ("0", 3, "", 10),
        ("3", 0, "", 10),
        ("1nvme", 2, "", 10),
        ("2", 1, "host", 4),
    ):
        zero = section(stage, **offloads(folder)[name])
        engine = make_engine(None, zero, {"type": kind, "params": KINDS[kind]})
        if tag == "3":  # this one has been in a later phase before: what it has kept is not to count
            train(engine, data()[:13])
        engine.load_checkpoint(f"{folder}/saved", tag=tag)
        plain = odd()
        reference = reference_of(engine, kind, plain)
        others = torch.load(f"{folder}/layouts{tag}.pt", weights_only=True)
        first = ReferenceOneBit(plain, others, before, **reference.o)
        train_reference(first, plain, data()[:steps])
        for key in ("m", "v", "fresh", "coefficient", "factor", "t", "interval", "counter"):
            setattr(reference, key, getattr(first, key))
        reference.dense_next = not (tag == "3" and engine._reducer.skips_reduction)
        train_reference(reference, plain, data()[steps:])
        train(engine, data()[steps:])
        found[f"{tag} {rank}"] = error(engine, plain)
        engine.destroy()
    return found


def _write_layouts(folder: str, kind: str) -> None:
    """The units of the saving world, which the reference needs."""
    join()
    for tag, stage, name in (("0", 0, ""), ("3", 3, ""), ("1nvme", 1, "nvme"), ("2", 2, "")):
        zero = section(stage, **offloads(folder)[name])
        engine = make_engine(None, zero, {"type": kind, "params": KINDS[kind]})
        if engine.global_rank == 0:
            torch.save(layouts_of(engine), f"{folder}/layouts{tag}.pt")
        engine.destroy()


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_resume_in_another_world(kind: str, before: int, after: int, tmp_path: Path) -> None:
    run_workers(_write_layouts, before, str(tmp_path), kind)
    run_workers(_save, before, str(tmp_path), kind)
    for found in run_workers(_resume, after, str(tmp_path), kind, before):
        assert {name: each for name, each in found.items() if not each <= TOLERANCE} == {}


def _in_one_pass() -> list[dict[str, Tensor]]:
    """Values after the first step among signs, in fp32: by numba's kernels, and by torch's operations."""
    join()
    found = []
    for mode in ("auto", "torch"):
        loader.set_mode(mode)
        given = {
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": section(1),
            "optimizer": {"type": "OneBitAdam", "params": KINDS["OneBitAdam"]},
        }
        engine, *_ = zlaunch.initialize(model=odd().float(), config=given)
        train(engine, data()[:7])
        found.append({name: value.clone() for name, value in engine.module.state_dict().items()})
        engine.destroy()
    return found


def test_one_pass_over_memory_steps_as_torch_does() -> None:
    for by_numba, by_torch in run_workers(_in_one_pass, 2):
        for name, value in by_torch.items():
            torch.testing.assert_close(by_numba[name], value, rtol=1e-5, atol=1e-6, msg=name)


def _bytes() -> dict[int, tuple[int, int, int]]:
    """Bytes of gradients (dense), of signs, and the parameters, at each stage."""
    join()
    found = {}
    for stage in (0, 1, 2, 3):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        given = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": section(stage, reduce_bucket_size=10**6),
            "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}},
        }
        engine, *_ = zlaunch.initialize(model=model, config=given)
        comm = engine.comm
        counts = []
        for _ in range(4):
            before = comm.moved["all_reduce"] + comm.moved["reduce_scatter"], comm.moved[BYTES]
            engine.backward(engine(torch.randn(1, 256)).square().mean())
            engine.step()
            after = comm.moved["all_reduce"] + comm.moved["reduce_scatter"], comm.moved[BYTES]
            counts.append((4 * (after[0] - before[0]), after[1] - before[1]))
        assert counts[0] == counts[1] and counts[0][1] == 0 and counts[3][0] == 0
        numel = sum(unit.numel for unit in engine.units)
        found[stage] = counts[0][0], counts[3][1], numel
        engine.destroy()
    return found


def test_signs_are_a_thirtieth_of_the_bytes() -> None:
    """Counted by the rules of Comm.moved: a reduction and a gather of n elements, n each."""
    for found in run_workers(_bytes, 2):
        for stage, (dense, signs, numel) in found.items():
            assert signs == 2 * (numel // 8 + numel // 256 * 4), stage
            assert dense == numel * (8 if stage == 0 else 4), stage
            assert signs * 5 <= dense, stage


def _rims() -> dict[str, Any]:
    """Overflows, accumulation, no_sync and clipping after the warm-up."""
    rank = join()
    found: dict[str, Any] = {}
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "OneBitAdam", "params": {**KINDS["OneBitAdam"], "freeze_step": 3}},
    }
    for stage in (0, 1, 2, 3):
        engine, *_ = zlaunch.initialize(model=odd(), config={**given, "zero_optimization": section(stage)})
        train(engine, data()[:8])
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        found[str(stage)] = state, engine.get_global_grad_norm()
        engine.destroy()
    narrow = {**given, "fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": section(1)}
    engine, *_ = zlaunch.initialize(model=odd().float(), config=narrow)
    train(engine, data()[:6])
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for _ in range(3):
        # only one rank's gradients overflow: every rank has to skip
        engine.backward(loss_of(engine, data()[0].chunk(2)[rank][:1]) * (1e30 if rank == 1 else 1.0))
        engine.step()
    after = engine.module.state_dict()
    found["skipped"] = engine.overflow, all(torch.equal(before[name], after[name]) for name in before)
    engine.destroy()
    return found


@pytest.mark.exhaustive
def test_accumulation_clipping_and_overflows() -> None:
    first, *_ = results = run_workers(_rims, 2)
    for found in results:
        assert found["skipped"] == (True, True)
        norms = [found[stage][1] for stage in "0123"]
        assert all(0.1 < norm < 100 for norm in norms), "clipped"
        for stage in "12":  # the units of stage 3 are others, and with them the blocks that share a scale
            assert norms[int(stage)] == pytest.approx(norms[0], rel=1e-9)
            for name, value in first["0"][0].items():
                torch.testing.assert_close(found[stage][0][name], value, rtol=1e-9, atol=1e-12)


def test_what_is_not_possible_is_refused(tmp_path: Path) -> None:
    weight = [torch.nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ValueError, match="OneBitAdam: freeze_step 0"):
        OneBitAdam(weight, freeze_step=0)
    with pytest.raises(ValueError, match="OneBitLamb: coeff"):
        OneBitLamb(weight, factor_min=5.0)
    with pytest.raises(zlaunch.OptimizerError, match=r"pass it to zlaunch\.initialize"):
        OneBitAdam(weight).step()
    assert run_workers(_refused, 2) == [None, None]


def _refused() -> None:
    join()
    groups: Any = lambda model: OneBitAdam(  # noqa: E731
        [{"params": [p], "betas": (0.9, 0.9 + i / 1000)} for i, p in enumerate(model.parameters())]
    )
    with pytest.raises(zlaunch.OptimizerError, match="same betas in all groups"):
        make_engine(groups, section(1))
    with pytest.raises(zlaunch.OptimizerError, match="mics_shard_size"):
        make_engine(one_bit_adam_of, section(3, mics_shard_size=1))


def one_bit_adam_of(model: Any) -> OneBitAdam:
    return OneBitAdam(model.parameters())


def _gradients_apart() -> None:
    """Among signs the average of the ranks' gradients exists nowhere."""
    join()
    engine = make_engine(None, section(1), {"type": "OneBitAdam", "params": KINDS["OneBitAdam"]})
    train(engine, data()[:6])
    engine.backward(loss_of(engine, data()[6].chunk(2)[engine.global_rank]))
    weight = engine.module.head.weight
    with pytest.raises(zlaunch.UnsupportedError, match="each rank has its own gradients"):
        zlaunch.safe_get_full_grad(weight)
    engine.step()
    engine.destroy()


def test_gradients_of_single_ranks_are_not_handed_out() -> None:
    run_workers(_gradients_apart, 2)
