"""Test the time of a step that `zlaunch estimate --simulate` predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zlaunch.runtime.errors import MemoryPlanError
from zlaunch.runtime.memory.choices import Choice, Machines, choices
from zlaunch.runtime.memory.model import ModelSizes, from_function, from_numbers
from zlaunch.runtime.memory.step_time import (
    Operations,
    Speeds,
    StepTime,
    speeds_of_reports,
    step_time,
    work_of_module,
    work_of_numbers,
)
from zlaunch.runtime.offload.manager import Tier

FAST = Speeds(compute=1e30, link=1e30, host_link=1e30, host_memory=1e30, nvme_read=1e30, nvme_write=1e30)
GPT3 = from_numbers(174_600_000_000, 12288, 96, 50257)
GPT2_XL = from_numbers(1_557_611_200, 1600, 48, 50257)
WIDTH, DEPTH, BATCH = 64, 3, 32


def machines(nodes: int = 1, gpus: int = 4) -> Machines:
    return Machines(nodes=nodes, gpus=gpus, gpu_bytes=None, host_bytes=None)


def taken(model: ModelSizes, where: Machines, choice: Choice, tokens: int, **speeds: float) -> StepTime:
    """The time where only what is named takes any."""
    work = work_of_numbers(model, tokens, 1)
    return step_time(model, where, choice, work, replace(FAST, **speeds), 2)


def test_gpt3_takes_the_days_that_were_published() -> None:
    """34 days for 300 billion tokens on 1024 GPUs at 140 TFLOPS, with every layer checkpointed (Narayanan et
    al., 2021, section 5.1): batches of 1536 samples, which are one and a half for each GPU.
    """
    work = work_of_numbers(GPT3, 2048, 3)
    half = Operations(work.forward / 2, work.backward / 2, (work.recomputed or 0) / 2, work.units // 2)
    choice = Choice(3, checkpointed=True)
    found = step_time(GPT3, machines(128, 8), choice, half, replace(FAST, compute=140e12), 2)
    assert found.seconds is not None and found.bound == "compute"
    days = 300e9 / (1536 * 2048) * found.seconds / 86400
    assert days == pytest.approx(34, rel=0.05)


def test_operations_are_those_of_the_papers_formula() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) (Narayanan et al., 2021, equation 3)."""
    samples, s, layers, h, vocab = 4, 2048, 96, 12288, 50257
    work = work_of_numbers(GPT3, s, samples)
    assert work.recomputed is not None
    formula = 96 * samples * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert work.forward + work.backward + work.recomputed == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize(("stage", "elements"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_is_that_of_a_ring(stage: int, elements: int) -> None:
    """2 N elements, 3 N at stage 3 (Rajbhandari et al., 2020), times (w - 1) / w."""
    found = taken(GPT2_XL, machines(), Choice(stage), 1, link=10e9)
    assert found.seconds == pytest.approx(elements * 2 * GPT2_XL.numel * 3 / 4 / 10e9)
    assert found.bound == "link"


def test_offload_by_hand() -> None:
    n = GPT2_XL.numel
    everything = Choice(3, Tier.DISK, Tier.DISK)
    read = taken(GPT2_XL, machines(), everything, 1, nvme_read=1e9)
    assert read.seconds == pytest.approx((2 + 2 + 12 + 4) * n / 1e9) and read.bound == "NVMe"
    written = taken(GPT2_XL, machines(), everything, 1, nvme_write=1e9)
    assert written.seconds == pytest.approx((4 + 12 + 2) * n / 1e9)
    stepped = taken(GPT2_XL, machines(), Choice(2, Tier.HOST), 1, host_memory=1e9)
    assert stepped.seconds == pytest.approx((12 + 12 + 2 + 2) * n / 1e9) and stepped.bound == "CPU"
    moved = taken(GPT2_XL, machines(), Choice(2, Tier.HOST), 1, host_link=1e9)
    assert moved.seconds == pytest.approx(2 * 2 * n / 4 / 1e9) and moved.bound == "host link"
    gathered = taken(GPT2_XL, machines(), Choice(3, Tier.HOST, Tier.HOST), 1, host_link=1e9)
    assert gathered.seconds == pytest.approx(2 * 2 * n / 4 / 1e9)


def test_a_phase_takes_as_long_as_what_is_slowest() -> None:
    only_compute = taken(GPT2_XL, machines(), Choice(0), 1024, compute=100e12).seconds
    only_link = taken(GPT2_XL, machines(), Choice(0), 1024, link=10e9).seconds
    both = taken(GPT2_XL, machines(), Choice(0), 1024, compute=100e12, link=10e9).seconds
    assert only_compute is not None and only_link is not None
    assert both == pytest.approx(only_compute / 3 + max(only_link, only_compute * 2 / 3))


def test_only_what_a_row_needs_is_missing() -> None:
    work = work_of_numbers(GPT2_XL, 1024, 1)
    found = {
        each: step_time(GPT2_XL, machines(), each, work, Speeds(), 2).missing
        for each in choices(4)
        if not each.checkpointed
    }
    assert found[Choice(0)] == found[Choice(3)] == ("compute", "link")
    assert found[Choice(2, Tier.HOST)] == ("compute", "link", "host_link", "host_memory")
    assert set(found[Choice(3, Tier.DISK, Tier.DISK)]) == {*Speeds.__slots__}
    alone = step_time(GPT2_XL, machines(1, 1), Choice(0), work, Speeds(compute=1e14), 2)
    assert alone.seconds is not None and alone.cells(work, 1)[2] == "compute"
    assert StepTime(None, None, ("link",)).cells(work, 1) == ["?"] * 3


SPEED = st.floats(1e6, 1e15)


@given(
    choice=st.sampled_from(list(choices(8))),
    name=st.sampled_from(Speeds.__slots__),
    speeds=st.fixed_dictionaries(dict.fromkeys(Speeds.__slots__, SPEED)),
    factor=st.floats(1, 100),
    tokens=st.integers(1, 10**6),
)
def test_more_speed_is_never_slower_and_more_work_never_faster(
    choice: Choice, name: str, speeds: dict[str, float], factor: float, tokens: int
) -> None:
    def seconds(changed: dict[str, float], more: int = 0) -> float:
        work = work_of_numbers(GPT2_XL, tokens + more, 1)
        found = step_time(GPT2_XL, machines(2), choice, work, Speeds(**{**speeds, **changed}), 2)
        assert found.seconds is not None and found.bound is not None
        return found.seconds

    nearly = 1 + 1e-9
    assert seconds({name: speeds[name] * factor}) <= seconds({}) * nearly
    assert seconds({}) <= seconds({}, more=1) * nearly
    slowed = {each: speed / factor for each, speed in speeds.items()}
    assert seconds(slowed) == pytest.approx(seconds({}) * factor)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_modules_operations_are_counted() -> None:
    model = from_function(f"{__name__}:Net")
    found = work_of_module(model, 1, 1, torch.float32, f"{BATCH},{WIDTH}")
    product = 2 * BATCH * WIDTH * WIDTH
    assert found is not None and (found.units, found.unit) == (BATCH, "samples")
    assert found.forward == 2 * DEPTH * product
    assert found.recomputed == DEPTH * product  # a block's last product is needed for nothing
    assert found.backward == (4 * DEPTH - 1) * product  # the input needs no gradient
    assert work_of_module(model, 1, 1, torch.float32) is None


NET = {
    "collectives": [
        {"scope": "node", "ranks": [0, 1], "op": "all_gather", "bus_bytes_per_s": 1e9},
        {"scope": "world", "ranks": [0, 1, 2, 3], "op": "all_gather", "bus_bytes_per_s": 3e9},
        {"scope": "world", "ranks": [0, 1, 2, 3], "op": "all_reduce", "bus_bytes_per_s": 2e9},
    ]
}
IO = {"measured": [{"read": 5e9, "write": 1e9}, {"read": 4e9, "write": 3e9}]}


def test_what_the_benchmarks_print_is_read() -> None:
    found = speeds_of_reports({"net.json": NET, "io.json": IO})
    assert found == Speeds(link=2e9, nvme_read=4e9, nvme_write=3e9)
    assert speeds_of_reports({}) == Speeds()
    with pytest.raises(MemoryPlanError, match=r"b\.json: another --measured file"):
        speeds_of_reports({"a.json": IO, "b.json": IO})


@pytest.mark.parametrize(
    "report",
    [[], 3, None, {}, {"measured": []}, {"collectives": [{}]}, {"measured": [{"read": 0, "write": 1}]}],
)
def test_what_is_no_measurement_is_named(report: Any) -> None:
    with pytest.raises(MemoryPlanError, match=r"my\.json is not the output of `zlaunch bench net --json`"):
        speeds_of_reports({"my.json": report})
