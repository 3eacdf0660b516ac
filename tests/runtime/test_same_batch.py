"""Test that ranks which share a batch find out about another one in every pass, before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zlaunch
from tests.needs import needs_package
from tests.runtime.model_parallel import make
from tests.runtime.models import net
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.fingerprint import fingerprint

CPU = torch.device("cpu")
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
AXES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"plan": PLAN}},
    "pipeline": {},
    "sequence": {},
}
EQUAL = 12
"""Counts the steps before the first one that differs: more than the passes that are compared at once."""


def _number(*tensors: Tensor) -> int:
    return int(fingerprint(tensors, CPU))


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.uint8, torch.float64, torch.float32, torch.bfloat16, torch.complex64],
)
def test_a_fingerprint_is_of_every_bit(dtype: torch.dtype) -> None:
    values = torch.arange(1, 12).to(dtype)
    known = _number(values)
    assert known == _number(values.clone()) == _number(torch.stack([values, values], 1)[:, 0])
    found = {known}
    raw = values.view(torch.uint8)
    for bit in range(raw.numel() * 8):
        raw[bit // 8] ^= 1 << bit % 8
        found.add(_number(values))
        raw[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + raw.numel() * 8
    others = [values.flip(0), values[:-1], values.view(1, -1), torch.cat([values, values[:1] * 0])]
    assert len({known, _number(), _number(values, values), *map(_number, others)}) == 7


def test_a_fingerprint_sees_signs_that_change_together() -> None:
    values = torch.ones(64, dtype=torch.float32)
    found = set()
    for one in range(64):
        for other in range(one):
            flipped = values.clone()
            flipped[[one, other]] *= -1
            found.add(_number(flipped))
    assert len(found) == 64 * 63 // 2
    mask = torch.zeros(2**20 + 3, dtype=torch.bool)  # longer than a chunk
    mask[-1] = True
    assert _number(mask) != _number(mask.roll(-1)) != _number(mask.roll(-(2**20)))


def _engine(axis: str) -> Any:
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": {axis: 2},
        **AXES[axis],
    }
    model = make("llama", "sdpa") if axis == "sequence" else net(depth=2)
    return zlaunch.initialize(model=model, config=config)[0]


def _step(engine: Any, axis: str, micro_batches: list[Tensor]) -> None:
    if axis == "pipeline":
        engine.train_batch(iter([(each, each) for each in micro_batches]), lambda out, _: out.square().mean())
        return
    for each in micro_batches:
        is_llama = axis == "sequence"
        engine.backward(engine(each, labels=each).loss if is_llama else engine(each).square().mean())
        engine.step()


def _said() -> dict[str, list[str]]:
    rank = join()
    found = {}
    for axis in AXES:
        engine, said = _engine(axis), list[str]()
        whole = torch.arange(8).view(2, 4)
        other = whole.clone()
        other[1, 2] += rank
        for number in range(EQUAL):
            _step(engine, axis, [whole + number] * 2)
        for micro_batches in ([other, whole], [whole, whole], [other, other]):
            before = {name: each.clone() for name, each in engine.module.named_parameters()}
            try:
                _step(engine, axis, micro_batches)
                said.append("")
            except zlaunch.RankMismatchError as error:
                said.append(str(error))
                assert all(torch.equal(each, before[name]) for name, each in engine.module.named_parameters())
                engine.zero_grad()
        found[axis] = said
        engine.destroy()
    return found


@pytest.mark.rotated
@needs_package("transformers")
def test_another_batch_is_found_before_the_step_in_any_pass() -> None:
    for found in run_workers(_said, 2):
        for axis, (first, equal, last) in found.items():
            assert equal == "", axis
            for said in (first, last):
                assert "ranks 0" in said and "got different batches" in said, (axis, said)
