"""Test the arithmetic of memory, and what it advises."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zlaunch
from zlaunch.runtime import host_memory
from zlaunch.runtime.comm.link import RankLink
from zlaunch.runtime.errors import MemoryPlanError
from zlaunch.runtime.memory import preflight
from zlaunch.runtime.memory.activations import activations_per_token
from zlaunch.runtime.memory.estimate import (
    GIB,
    Amounts,
    Setting,
    alternatives,
    check,
    describe,
    peak,
    plan,
    shortages,
)
from zlaunch.runtime.mesh import MeshShape
from zlaunch.runtime.offload.manager import OffloadOptions, Tier
from zlaunch.runtime.precision import LossScaler, Precision
from zlaunch.runtime.zero.policy import Block, ShardingOptions

BLOCKS = [10_000_000, *[30_000_000] * 33]  # about a billion
N = sum(BLOCKS)
PLENTY = Amounts(1 << 60, 1 << 60, 1 << 60, 1 << 60)


def setting(stage: int, world: int = 1, **options: object) -> Setting:
    offload = OffloadOptions(**options)  # type: ignore[arg-type]
    return Setting(stage=stage, world_size=world, blocks=BLOCKS, dtype_bytes=2, states=2, offload=offload)


def test_bf16_adam_is_the_papers_table() -> None:
    """16 bytes a parameter with fp32 gradients, 4 + 12/w at stage 1 ... (the paper has 2 for gradients)."""
    w = 8
    assert plan(setting(0)).total == Amounts(device=N * (2 + 4 + 12))
    assert plan(setting(1, w)).total == Amounts(device=N * 6 + N * 12 // w)
    two = plan(setting(2, w)).total.device
    assert two == N * 2 + (N // w) * 16 + 3 * 30_000_000 * 2
    three = plan(setting(3, w)).total.device
    # one block is used, and the two that follow it have the 50 million elements that are gathered ahead
    gathered, buckets = (10_000_000 + 3 * 30_000_000) * 2, 3 * 30_000_000 * 2
    assert three == (N // w) * 16 + gathered + buckets


def test_frozen_parameters_are_sharded_at_stage_3_alone_and_gathered_with_their_block() -> None:
    world, frozen = 8, 8_000_001
    gathered = 3 * frozen
    for stage, kept in ((0, 5 * frozen), (2, 5 * frozen), (3, 5 * 1_000_001 + gathered)):
        without = setting(stage, world)
        each = replace(without, frozen_blocks=[0, *[frozen] * 5])
        assert plan(each).total.device - plan(without).total.device == pytest.approx(2 * kept, abs=16), stage


def test_adapters_beside_frozen_layers_gather_whole_layers() -> None:
    layers = setting(3, 8)
    adapters = replace(layers, blocks=[0, *[1000] * 33], frozen_blocks=BLOCKS)
    frozen = plan(adapters).parameters.device - 2 * -(-N // 8)
    assert frozen == plan(layers).parameters.device + 2 * 3000


@pytest.mark.parametrize("pin", [True, False])
def test_memory_is_page_locked_where_that_is_asked_for(pin: bool) -> None:
    places: dict[str, Any] = {"optimizer": Tier.HOST, "parameters": Tier.HOST}
    total = plan(setting(3, 8, pin=pin, **places)).total
    assert total.host > total.pinned and (total.pinned > 0) is pin


def test_narrow_state_and_masters() -> None:
    """2 + 2 + 1 + 1 bytes a parameter with codes of 8 bits, and a scale for 256; 2 + 2 + 2 + 2 of bf16."""
    codes: dict[str, Any] = {"master_bytes": 2, "grad_bytes": 2, "state_bytes": 1 + 4 / 256}
    w = 8
    for stage in range(4):
        wide = setting(stage, w, narrow_masters=True)
        bf16 = replace(wide, master_bytes=2, grad_bytes=2, state_bytes=2.0)
        eight = replace(wide, **codes)
        own = N if stage == 0 else N // w
        assert plan(wide).optimizer.device == 12 * own
        masters = 2 * own if stage == 3 else 0  # below, the parameters themselves are stepped
        assert plan(bf16).optimizer.device == 4 * own + masters
        assert plan(eight).optimizer.device == round(own * (2 + 8 / 256)) + masters
        assert plan(wide).gradients.device - plan(eight).gradients.device == 2 * (N if stage < 2 else own)
    assert plan(replace(setting(0), **codes)).total.device == N * 2 + N * 2 + round(N * (2 + 8 / 256))
    host = replace(setting(2, w, optimizer=Tier.HOST, narrow_masters=True), **codes)
    assert plan(host).total.host == round(N // w * (2 + 2 + 8 / 256)) + 2 * (N // w)
    assert not any("nvme" in text for text, _ in alternatives(host)), "which is refused"


def test_offload_moves_and_does_not_lose() -> None:
    w = 4
    cpu = plan(setting(2, w, optimizer=Tier.HOST)).total
    assert cpu.device == N * 2 + 3 * 30_000_000 * 2
    assert cpu.host == (N // w) * (12 + 2) and cpu.disk == 0
    again = plan(replace(setting(2, w, optimizer=Tier.HOST), accumulates=True)).total
    assert again.host == (N // w) * (12 + 2 + 4)
    both = plan(setting(3, w, optimizer=Tier.HOST, parameters=Tier.HOST)).total
    assert both.host == (N // w) * 16
    disk = plan(setting(3, w, optimizer=Tier.DISK, parameters=Tier.DISK)).total
    assert disk.disk == (N // w) * 18 and disk.host < 0.5 * GIB
    half = plan(setting(2, w, optimizer=Tier.HOST, ratio=0.5)).total
    assert half.host == pytest.approx(cpu.host / 2, abs=64)
    assert half.device == pytest.approx(cpu.device + (N // w) * 8, abs=64)


@given(blocks=st.lists(st.integers(1, 9), max_size=8), prefetch=st.integers(0, 40))
def test_what_is_gathered_ahead_counts(blocks: list[int], prefetch: int) -> None:
    """It is as the hooks gather: blocks follow until they have the elements, at least one."""
    most = 2 * max(blocks, default=0)
    for order in (blocks, blocks[::-1]):
        for at, own in enumerate(order):
            ahead: list[int] = []
            for following in order[at + 1 :]:
                if ahead and sum(ahead) >= prefetch:
                    break
                ahead.append(following)
            most = max(most, own + sum(ahead))
    one = replace(setting(3), blocks=[5, *blocks], prefetch_numel=prefetch)
    assert plan(one).parameters.device == (5 + most) * 2


@given(
    stage=st.integers(0, 3),
    world=st.integers(1, 64),
    optimizer=st.sampled_from(Tier),
    parameters=st.sampled_from(Tier),
    blocks=st.lists(st.integers(0, 10**9), max_size=5),
    ratio=st.floats(0, 1),
)
def test_amounts_are_never_negative_and_shrink_with_ranks(
    stage: int, world: int, optimizer: Tier, parameters: Tier, blocks: list[int], ratio: float
) -> None:
    if stage == 0:
        optimizer = Tier.DEVICE
    if stage < 3:
        parameters = Tier.DEVICE
    offload = OffloadOptions(optimizer=optimizer, parameters=parameters, ratio=ratio)
    one = Setting(
        stage=stage,
        world_size=world,
        blocks=blocks,
        frozen_blocks=[5],
        dtype_bytes=2,
        states=2,
        offload=offload,
    )
    more = plan(replace(one, world_size=2 * world)).total
    total = plan(one).total
    assert min(total.device, total.host, total.pinned, total.disk) >= 0 and total.pinned <= total.host
    assert more.device <= total.device + 64 and more.disk <= total.disk + 64


def test_the_first_change_that_fits_is_advised() -> None:
    def advice(s: Setting, free: Amounts) -> str:
        with pytest.raises(MemoryPlanError) as caught:
            check(s, free)
        return str(caught.value)

    free = Amounts(device=24 * GIB, host=64 * GIB)
    check(setting(0), free)  # 1e9 x 18 = 16.8 GiB
    tight = replace(free, device=8 * GIB)
    text = advice(setting(0), tight)
    assert "GPU memory (16.8 GiB needed, 8.0 GiB free)" in text
    assert '"stage": 1, "offload_optimizer": {"device": "cpu"}' in text
    assert '"stage": 2' in advice(setting(0, 8), replace(free, device=6 * GIB))
    tiny = Amounts(device=GIB, host=64 * GIB)
    assert '"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param"' in advice(setting(1), tiny)
    small_host = Amounts(device=GIB, host=2 * GIB)
    text = advice(setting(3, optimizer=Tier.HOST), small_host)
    assert '"offload_optimizer": {"device": "nvme"' in text and "free disk per rank" in text
    assert "No setting of zero_optimization makes it fit" in advice(setting(3), Amounts())
    on_disk = setting(3, optimizer=Tier.DISK, optimizer_path="/x")
    assert "disk (" in advice(on_disk, replace(tiny, disk=GIB))
    apart = setting(3, optimizer=Tier.DISK, parameters=Tier.DISK)  # 16 bytes there, 2 on the other drive
    check(apart, replace(tiny, disk=17 * GIB), parameters_disk=2 * GIB)
    with pytest.raises(MemoryPlanError, match=r"disk \(1.9 GiB needed, 1.0 GiB free\)"):
        check(apart, replace(tiny, disk=17 * GIB), parameters_disk=GIB)


def test_alternatives_come_in_the_order_of_their_cost_and_differ() -> None:
    texts = [text for text, _ in alternatives(setting(0, 2))]
    assert texts[:3] == ['"stage": 1', '"stage": 2', '"stage": 3']
    assert len(set(texts)) == len(texts)
    assert all("offload" in text for text in texts[3:])
    assert all(not shortages(s, PLENTY) for _, s in alternatives(setting(1, 2)))


def test_the_plan_says_how_many_tokens_fit() -> None:
    """GPT-2 XL in 16 bits: a layer keeps 34 x 1600 bytes a token, the head 50257 x 12, a block 3200."""
    free, used = Amounts(device=24 * GIB, host=64 * GIB), Amounts(device=GIB)
    described = types.SimpleNamespace(n_embd=1600, n_layer=48, vocab_size=50257, n_head=25)
    model = types.SimpleNamespace(config=described, get_output_embeddings=lambda: torch.nn.Linear(1, 1))
    of_token = activations_per_token(model, 2)
    assert of_token is not None
    assert of_token.plain == 48 * 34 * 1600 + 50257 * 12
    assert of_token.checkpointed == 48 * 3200 + 50257 * 12
    said = describe(setting(2, 8), free, used, of_token)[-1]
    left = free.device - plan(setting(2, 8)).total.device
    assert said.startswith("activations: ")
    assert f"fits a micro-batch of {left // of_token.plain // 100 * 100:,} tokens, or " in said
    assert f" {left // of_token.checkpointed // 1000 * 1000:,} with activation checkpointing in every" in said
    part = types.SimpleNamespace(n_embd=1600, vocab_size=5)
    for other in (None, part, types.SimpleNamespace(hidden_size="x")):
        model.config = other
        assert activations_per_token(model, 2) is None
    headless = types.SimpleNamespace(config=described, get_output_embeddings=lambda: None)
    assert activations_per_token(headless, 2) is None


def test_the_plan_is_a_line_and_its_details_have_one_unit_each() -> None:
    free = Amounts(device=24 * GIB, host=64 * GIB)
    offloaded = setting(2, 8, optimizer=Tier.HOST)
    assert describe(offloaded, free, Amounts(device=GIB)) == [
        "GPU memory per rank: 2.0 GiB (parameters 1.9, gradients 0.2, optimizer 0.0), 1.6 GiB offloaded, "
        "22.0 GiB left for activations",
        "offloaded: 1.6 GiB in host memory (0.7 page-locked)",
    ]
    on_disk = setting(3, 8, optimizer=Tier.DISK, parameters=Tier.HOST)
    assert describe(on_disk, free, Amounts(host=4 * GIB))[1] == (
        "offloaded: 0.5 GiB in host memory (0.5 page-locked, 4.0 during initialize), 1.9 GiB on disk"
    )
    on_cpu = replace(setting(0), device_is_host=True)
    assert describe(on_cpu, free, Amounts(device=20 * GIB)) == [
        "memory per rank: 16.8 GiB (parameters 1.9, gradients 3.7, optimizer 11.2), 47.2 GiB left for "
        "activations",
        "memory per rank during initialize: 20.2 GiB",
    ]
    tiny = replace(on_cpu, blocks=[4096, 3])
    assert describe(tiny, free, Amounts())[0].startswith(
        "memory per rank: 72.1 KiB (parameters 8.0, gradients 16.0, optimizer 48.0), "
    )


def test_the_peak_is_the_model_as_it_comes_where_that_is_more() -> None:
    sharded = setting(3, 8)
    whole = Amounts(device=4 * sum(sharded.blocks))
    largest = max(sharded.blocks) * (4 + sharded.dtype_bytes)
    assert peak(sharded, whole).device == whole.device + largest
    assert peak(sharded, Amounts()).device == plan(sharded).total.device
    assert peak(sharded, Amounts(host=7 * GIB)).host == 7 * GIB


def test_free_memory_is_what_the_kernel_and_the_groups_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < host_memory.host_bytes() <= 1 << 50
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    monkeypatch.setattr(host_memory, "_own_groups", lambda: [tmp_path])
    assert host_memory.host_bytes() == 3000000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.host_bytes() > 5000000
    options = OffloadOptions(optimizer_path=str(tmp_path / "not" / "there"))
    assert preflight.available(torch.device("cpu"), options, 2).disk > 0
    assert preflight.other_drive_bytes(options, 2) is None
    other = OffloadOptions(optimizer_path=str(tmp_path), parameters_path="/dev/shm/x")
    assert (preflight.other_drive_bytes(other, 2) or 0) > 0


def test_a_run_that_cannot_fit_ends_at_once(tmp_path: Path) -> None:
    """Four terabytes of parameters, in name only."""
    model = torch.nn.Module()
    model.huge = torch.nn.Parameter(torch.empty(1).expand(10**12))
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": {"stage": 1}}
    with pytest.raises(MemoryPlanError, match="rank 0: the model does not fit: host memory"):
        zlaunch.initialize(model=model, config=config)


@pytest.mark.parametrize("way", ["config", "variable"])
def test_a_plan_that_does_not_fit_is_a_warning_on_request(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    """A container may tell a wrong amount of memory: the machine must not be lost for that."""
    monkeypatch.setattr(preflight, "host_bytes", lambda: 1000)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": optimizer}
    with pytest.raises(MemoryPlanError, match=r'"memory_plan": "warn" in the config, or ZLAUNCH_MEM'):
        zlaunch.initialize(model=torch.nn.Linear(64, 64), config=config)
    monkeypatch.setenv("ZLAUNCH_MEMORY_PLAN", "Warn")
    with pytest.raises(ValueError, match="ZLAUNCH_MEMORY_PLAN=Warn: expected warn or error"):
        zlaunch.initialize(model=torch.nn.Linear(64, 64), config=config)
    monkeypatch.delenv("ZLAUNCH_MEMORY_PLAN")
    if way == "config":
        config["memory_plan"] = "warn"
    else:
        monkeypatch.setenv("ZLAUNCH_MEMORY_PLAN", "warn")
    engine, *_ = zlaunch.initialize(model=torch.nn.Linear(64, 64), config=config)
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()
    said = "".join(capfd.readouterr())
    assert "warning: rank 0: the model does not fit: host memory" in said and "Training all the same" in said


def test_asynchronous_checkpoints_take_a_copy_of_what_a_rank_writes() -> None:
    for stage in (0, 1, 3):
        without = setting(stage, world=4)
        more = plan(replace(without, snapshots=1)).total.host - plan(without).total.host
        assert more == -(-N // 4) * 12
    on_disk = replace(setting(2, world=4, optimizer=Tier.DISK, optimizer_path="/x"), snapshots=1)
    assert plan(on_disk).snapshot.host == 0
    whole = replace(setting(1), snapshots=1)
    assert "asynchronous checkpoints: 11.2 GiB of host memory" in describe(whole, PLENTY, Amounts())
    with pytest.raises(MemoryPlanError, match=r'This would fit: "checkpoint": {"asynchronous": false}'):
        check(whole, replace(PLENTY, host=10 * GIB))


def test_experts_that_fewer_ranks_have_are_sharded_over_those() -> None:
    """State of 12 bytes: bf16 with fp32 masters; experts of 90 million elements lie on 2 of 8 ranks."""
    all_alike = setting(3, world=8)
    some = replace(all_alike, experts=90_000_000, expert_shards=2)
    more = plan(some).optimizer.device - plan(all_alike).optimizer.device
    assert more == 12 * (90_000_000 // 2 - 90_000_000 // 8)
    assert plan(replace(some, stage=0)).total == plan(replace(all_alike, stage=0)).total


class _Comm(types.SimpleNamespace):
    """Stands for the communicator of rank 0 of two on GPUs, whose other rank says the same."""

    def __init__(self) -> None:
        link = RankLink(torch.device("cuda", 0), 2, 0, None, None)
        super().__init__(
            device=torch.device("cuda", 0),
            rank=0,
            world_size=2,
            mesh=MeshShape(2),
            link=link,
            data=link,
            experts=None,
        )

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]

    def find_shard_link(self, parameter: torch.Tensor) -> tuple[Any, Any, int]:
        return self.link, self.data, 1


def test_the_plan_of_several_gpus_leaves_room_for_nccl(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """10 GiB are free: 8.5 of them fit one rank, and not one of two, whose communicators take 2."""
    monkeypatch.setattr(preflight, "available", lambda *_: Amounts(device=10 * GIB, host=1 << 50))
    model = torch.nn.Module()
    large = torch.nn.Parameter(torch.empty(1).expand(int(8.5 * GIB) // 16))
    model.register_parameter("large", large)
    comm: Any = _Comm()

    def preflighted() -> Amounts:
        blocks = [Block(0, "root", [model], [("large", large)], is_root=True)]
        return preflight.preflight(
            blocks,
            ShardingOptions(shard_optimizer=False, shard_grads=False, shard_params=False),
            OffloadOptions(),
            torch.optim.AdamW(model.parameters()),
            Precision(torch.float32, LossScaler(), False, False),
            comm,
            False,
            snapshots=0,
            kept_snapshots=0,
            model=model,
        )[1]

    with pytest.raises(
        MemoryPlanError, match=r"8\.5 GiB needed, 8\.0 GiB free.* 2\.0 GiB of GPU memory are res"
    ):
        preflighted()
    comm.mesh = MeshShape(1)
    assert preflighted().device == 10 * GIB
