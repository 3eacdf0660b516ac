"""Test scripts written for DeepSpeed that divide sequences: registration, loader, loss and groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.data import DataLoader, DistributedSampler

import zlaunch
from tests.compat.test_engine import _deepspeed
from tests.runtime.model_parallel import EPS, TOLERANCE, distance, make
from tests.runtime.workers import join, run_workers
from zlaunch.compat.deepspeed.ulysses import UlyssesSPDataLoaderAdapter

ROWS, LENGTH, BATCH, VOCABULARY = 16, 12, 2, 64


def _rows(length: int = LENGTH, count: int = ROWS) -> list[dict[str, Any]]:
    """Make rows of two documents each, the labels of the first of which are ignored."""
    generator = torch.Generator().manual_seed(6)
    found = []
    for index in range(count):
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels, first = tokens.clone(), 2 + index % 7
        labels[:first] = -100
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])
        found.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return found


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "eps": EPS}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def _model() -> Any:
    return make("llama", "sdpa", use_cache=False).train()


def _train(size: int, stage: int, is_named: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train as DeepSpeed's tutorial does; return the losses of this rank's groups, and the weights."""
    deepspeed = _deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    model = None if is_named else _model()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="a/model" if is_named else model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=BATCH,
        seq_length=None,
        seq_length_is_variable=True,
    )
    assert mpu.get_sequence_parallel_world_size() == size
    rows: Any = _rows()
    loader: Any = DataLoader(rows, BATCH, sampler=DistributedSampler(rows, shuffle=False))
    model = model or _model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_config(stage), mpu=mpu
    )
    group = groups._get_sequence_parallel_group()
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(
        mpu.get_sequence_parallel_group()
    )
    loader = UlyssesSPDataLoaderAdapter(
        loader,
        sp_rank=groups._get_sequence_parallel_rank(),
        sp_group=group,
        sp_world_size=groups._get_sequence_parallel_world_size(),
        device=engine.device,
    )
    losses = []
    assert len(loader) == ROWS // BATCH // dist.get_world_size() * size
    for batch in loader:
        output = engine(**batch)
        wanted = batch["shift_labels"]
        own = engine.module.loss_function(
            logits=output.logits, labels=None, shift_labels=wanted, vocab_size=VOCABULARY
        )
        # the tutorial's torch.distributed.nn.functional.all_gather has no backward pass over gloo in groups
        # without rank 0
        count = (wanted != -100).sum().unsqueeze(0)
        counts = [torch.empty_like(count) for _ in range(size)]
        dist.all_gather(counts, count, group=group)
        parts = zip(all_gather_tensor_autograd(own.unsqueeze(0), 0, group).unbind(), counts, strict=True)
        loss = sum(each * n.squeeze() for each, n in parts if n > 0) / torch.cat(counts).sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}


def _plain(groups: int, size: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Train in one process on what ``groups`` groups of ``size`` ranks are given."""
    model, rows, world = _model(), _rows(), groups * size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=EPS)
    losses: list[list[float]] = [[] for _ in range(groups)]
    for first in range(0, ROWS // world, BATCH):
        for member in range(size):
            for group in range(groups):
                place = group * size + member
                own = [rows[place + world * row] for row in range(first, first + BATCH)]
                loss = model(**{name: torch.stack([row[name] for row in own]) for name in own[0]}).loss
                (loss / groups).backward()
                losses[group].append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world", "size", "stage", "is_named"),
    [(2, 2, 3, False), (4, 2, 2, True), (4, 4, 1, False)],
    ids=["model", "name", "shared heads"],
)
def test_a_script_trains_as_one_process(world: int, size: int, stage: int, is_named: bool) -> None:
    ((wanted, weights),) = run_workers(_plain, 1, world // size, size)
    for rank, (losses, found) in enumerate(run_workers(_train, world, size, stage, is_named)):
        assert losses == pytest.approx(wanted[rank // size], abs=TOLERANCE)
        assert distance(found, weights) < TOLERANCE


def _batches(kind: str) -> list[dict[str, Any]]:
    """Make this rank's batches of a kind."""
    rank = dist.get_rank()
    length = {"length": 7, "shapes": 8 + 4 * rank}.get(kind, 8)
    found = []
    for index in range(1 + (rank == 0 and kind == "ends")):
        tokens = torch.arange((1 + rank) * length).view(1 + rank, length) + 100 * rank + 1000 * index
        found.append({"input_ids": tokens, "labels": tokens, "name": f"{rank}.{index}"})
    if kind == "other length":
        found[0]["weights"] = torch.zeros(1 + rank, 5)
    if kind == "one rank" and rank == 1:
        found[0]["input_ids"] = torch.arange(9).view(1, 9)
    if kind == "names" and rank == 1:
        del found[0]["labels"]
    if kind == "types" and rank == 1:
        found[0]["position_ids"] = torch.zeros(2, 8, dtype=torch.int32)
    if kind == "more names" and rank == 1:
        found[0]["weights"] = torch.zeros(2, 8)
    return found


def _adapted(kind: str) -> Any:
    join()
    group = dist.group.WORLD
    loader = UlyssesSPDataLoaderAdapter(_batches(kind), dist.get_rank(), group, 2, "cpu")
    try:
        return list(loader)
    except zlaunch.ParameterError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("length", "7 tokens cannot be divided by 2 ranks: pad batches"),
        ("one rank", "9 tokens cannot be divided by 2 ranks: pad batches"),
        ("other length", "weights is [1, 5], but there are 8 tokens"),
        ("names", "the batches of the ranks differ: shift_labels is none and torch.int64"),
        ("more names", "the batches of the ranks differ: weights is none and torch.float32"),
        ("types", "the batches of the ranks differ: position_ids is torch.int32 and torch.int64"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused_on_all_ranks(kind: str, said: str) -> None:
    for found in run_workers(_adapted, 2, kind):
        assert said in found


def test_a_loader_that_ends_earlier_ends_all() -> None:
    for found in run_workers(_adapted, 2, "ends"):
        assert [batch["name"] for batch in found] == ["0.0", "1.0"]


def test_batches_of_other_shapes_are_divided() -> None:
    for rank, batches in enumerate(run_workers(_adapted, 2, "shapes")):
        for owner, batch in enumerate(batches):
            length = 8 + 4 * owner
            tokens = torch.arange((1 + owner) * length).view(1 + owner, length) + 100 * owner
            shifted = torch.cat([tokens[:, 1:], torch.full((1 + owner, 1), -100)], 1)
            positions = torch.arange(length).expand(1 + owner, -1)
            assert batch["name"] == f"{owner}.0" and "labels" not in batch
            for name, whole in (
                ("input_ids", tokens),
                ("shift_labels", shifted),
                ("position_ids", positions),
            ):
                assert torch.equal(batch[name], whole.chunk(2, 1)[rank]), name


def test_an_adapter_has_what_its_loader_has_and_is_copied() -> None:
    data: Any = [1, 2, 3]
    loader = UlyssesSPDataLoaderAdapter(DataLoader(data, batch_size=1), 0, None, 2, "cpu")
    for adapter in (loader, copy.copy(loader)):
        assert adapter.batch_size == 1 and adapter.dataset == data and len(adapter) == 6
        assert not hasattr(adapter, "no_such_name")


def _groups(axes: dict[str, int]) -> dict[str, Any]:
    deepspeed = _deepspeed()
    deepspeed.init_distributed()
    from deepspeed.utils import groups

    rank = dist.get_rank()
    before = groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_group()
    assert before == (1, None)
    engine, *_ = deepspeed.initialize(model=_model(), config={**_config(1), "parallel": axes})
    group = groups._get_sequence_parallel_group()
    assert engine.get_sequence_parallel_group() is group
    assert dist.get_rank(group) == groups._get_sequence_parallel_rank()
    averaged = groups._get_sequence_data_parallel_group()
    assert dist.get_rank(averaged) == groups._get_sequence_data_parallel_rank()
    with pytest.raises(RuntimeError, match="with sequence parallelism, gradients are averaged over"):
        groups._get_data_parallel_group()
    return {
        "rank": rank,
        "sequence": (groups._get_sequence_parallel_world_size(), dist.get_process_group_ranks(group)),
        "data": (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()),
        "averaged": dist.get_process_group_ranks(averaged),
        "size": groups._get_sequence_data_parallel_world_size(),
    }


@pytest.mark.parametrize(
    ("axes", "sequence", "data", "averaged"),
    [
        ({"sequence": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]], [0, 0, 1, 1], [[0, 1, 2, 3]] * 4),
        (
            {"sequence": 2, "tensor": 2},
            [[0, 2], [1, 3], [0, 2], [1, 3]],
            [0, 0, 0, 0],
            [[0, 2], [1, 3], [0, 2], [1, 3]],
        ),
    ],
    ids=["sequence", "tensor"],
)
def test_groups(
    axes: dict[str, int], sequence: list[list[int]], data: list[int], averaged: list[list[int]]
) -> None:
    for rank, found in enumerate(run_workers(_groups, 4, axes)):
        assert found == {
            "rank": rank,
            "sequence": (2, sequence[rank]),
            "data": (max(data) + 1, data[rank]),
            "averaged": averaged[rank],
            "size": len(averaged[rank]),
        }


def _registered(size: int, attention: str) -> str:
    join()
    from zlaunch.compat.deepspeed.ulysses import UlyssesSPAttentionHF

    try:
        mpu = UlyssesSPAttentionHF.register_with_transformers(_model(), attention, size, 1)
    except (ValueError, zlaunch.ZlaunchError) as error:
        return str(error)
    return "" if mpu is None else "registered"


@pytest.mark.parametrize(
    ("size", "attention", "said"),
    [
        (1, "sdpa", ""),
        (2, "flash_attention_2", "core_attn_implementation='flash_attention_2', but the model was loaded"),
        (3, "sdpa", "3 does not divide the 2 ranks"),
    ],
    ids=["one rank", "attention", "size"],
)
def test_registrations(size: int, attention: str, said: str) -> None:
    for found in run_workers(_registered, 2, size, attention):
        assert said in found and bool(said) == bool(found)
