"""Test which configs are tried, against a search of all of them on made-up machines."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass

import pytest

from zlaunch.tuning.search import OK, OUT_OF_MEMORY, Space, Trial, search
from zlaunch.tuning.variants import (
    DEVICE_PLACEMENTS,
    HOST_PLACEMENTS,
    BatchSizes,
    Placement,
    Variant,
    change_config,
    given_placement,
)

BATCH = BatchSizes(1, 8, 4)
BUCKETS = (None, 5_000_000, 50_000_000)


@dataclass(frozen=True)
class Machine:
    """A made-up machine: seconds and bytes of a step follow the usual formulas."""

    memory: float
    states: float
    activations: float
    """Gives the bytes of one sample's."""
    compute: float
    """Seconds of one step's computation."""
    overhead: float
    """Seconds of each micro-batch besides."""
    traffic: float
    """Seconds that gradients take; gathers take as long again."""
    copying: float
    """Seconds that states on the host cost."""
    bucket: float
    """Gives the cost of small buckets, as a part of the traffic."""
    own: Placement
    world: int = 4
    batch: BatchSizes = BATCH

    def measure(self, variant: Variant) -> Trial:
        placement, micro = variant.placement or self.own, variant.micro_batch or self.batch.micro
        shards = {0: (1, 1, 1), 1: (1, 1, 4), 2: (1, 4, 4), 3: (4, 4, 4)}[placement.stage]
        parts = [share * self.states / shard for share, shard in zip((0.15, 0.15, 0.7), shards, strict=True)]
        if placement.optimizer_on_host:
            parts[1] = parts[2] = 0.0
        if placement.parameters_on_host:
            parts[0] = 0.0
        if sum(parts) + micro * self.activations > self.memory:
            return Trial(variant, OUT_OF_MEMORY)
        passes = self.batch.micro * self.batch.accumulation / micro
        traffic = self.traffic * (1 + 2 * passes * (placement.stage == 3))
        traffic *= 1 + self.bucket * {None: 0.0, 5_000_000: 1.0, 50_000_000: -0.05}[variant.bucket]
        seconds = self.compute + passes * self.overhead + traffic
        seconds += self.copying * (placement.optimizer_on_host + placement.parameters_on_host)
        return Trial(variant, OK, 1 / seconds)

    @property
    def space(self) -> Space:
        return Space(self.own, self.batch.micro, self.batch.micros(), self.world)


def made_up(chance: random.Random) -> Machine:
    """A machine on which memory, computation or communication is short."""
    return Machine(
        memory=chance.uniform(1, 20),
        states=chance.uniform(1, 20),
        activations=chance.uniform(0.05, 2),
        compute=chance.uniform(0.5, 2),
        overhead=chance.uniform(0.01, 1),
        traffic=chance.uniform(0.01, 1),
        copying=chance.uniform(0.1, 2),
        bucket=chance.uniform(-0.2, 0.2),
        own=chance.choice((*DEVICE_PLACEMENTS, *HOST_PLACEMENTS)),
    )


def test_the_choice_is_nearly_the_best_with_a_third_of_the_runs() -> None:
    chance, misses = random.Random(1), 0
    for _ in range(1000):
        machine = made_up(chance)
        runs: list[Variant] = []

        def measure(variant: Variant, machine: Machine = machine, runs: list[Variant] = runs) -> Trial:
            runs.append(variant)
            return machine.measure(variant)

        best = search(machine.space, measure)
        everything = [
            machine.measure(Variant(placement, micro, bucket))
            for placement, micro, bucket in itertools.product(
                (*DEVICE_PLACEMENTS, *HOST_PLACEMENTS), machine.space.micros, BUCKETS
            )
        ]
        assert len(runs) == len(set(runs)) and len(runs) <= len(everything) / 3
        fastest = max(trial.steps_per_s for trial in everything)
        if best is None:
            assert fastest == 0.0
        else:
            assert best.steps_per_s >= 0.9 * fastest
            misses += best.steps_per_s < 0.95 * fastest
    assert misses <= 10


def test_what_cannot_fit_is_not_tried() -> None:
    tried = []

    def measure(variant: Variant) -> Trial:
        tried.append(variant)
        stage = (variant.placement or Placement(2)).stage
        return Trial(variant, OUT_OF_MEMORY if stage < 3 else OK, float(stage))

    best = search(Space(Placement(2), None, (), 4), measure)
    assert best is not None and best.variant.placement == Placement(3)
    assert Variant(Placement(0)) not in tried and Variant(Placement(1)) not in tried


def test_one_rank_has_nothing_to_shard() -> None:
    assert [p.stage for p in Space(None, None, (), 1).placements(on_host=False)] == [0, 3]


def test_micro_batches_keep_the_samples_of_a_step() -> None:
    batch = BatchSizes(4, 6, 2)
    assert batch.micros() == [1, 2, 4, 8]
    for micro in batch.micros():
        changed = change_config({"train_batch_size": "auto"}, Variant(micro_batch=micro), batch)
        sizes = changed["train_micro_batch_size_per_gpu"] * changed["gradient_accumulation_steps"]
        assert sizes == 24 and changed["train_batch_size"] == 48


def test_changes_leave_the_rest_alone() -> None:
    raw = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "nvme", "nvme_path": "/x"},
            "reduce_bucket_size": 7,
        },
    }
    before = json.dumps(raw)
    changed = change_config(raw, Variant(Placement(2, True), bucket=9), None)
    assert changed == {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "reduce_bucket_size": 9,
        },
    }
    assert json.dumps(raw) == before and change_config(raw, Variant(), None) == raw
    assert change_config({}, Variant(prefetches=False), None) == {
        "zero_optimization": {"stage3_prefetch_bucket_size": 0}
    }


@pytest.mark.parametrize(
    ("zero", "placement"),
    [
        (None, Placement(0)),
        ({}, Placement(0)),
        ({"stage": 2}, Placement(2)),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}},
            Placement(3, True),
        ),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, None),
        ({"stage": 2, "cpu_offload": True}, None),
        ({"stage": "auto"}, None),
    ],
)
def test_the_users_own_placement(zero: object, placement: Placement | None) -> None:
    assert given_placement({"zero_optimization": zero}) == placement
