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
from tests.runtime.models import grad_of
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


@pytest.mark.rotated
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


# -- attention and tiles of a script's own


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, flat: bool) -> torch.Tensor:
    """Compute causal attention of (batch, tokens, heads, width), where several heads may share a key."""
    group = query.shape[2] // key.shape[2]
    key, value = (each.repeat_interleave(group, 2) for each in (key, value))
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2).flatten(2) if flat else found.transpose(1, 2)


def _distributed_attention(query_heads: int, heads: int, tokens_first: bool, flat: bool) -> list[float]:
    """Return the errors of the output's part and of the inputs' gradients against one process."""
    _deepspeed().init_distributed()
    from deepspeed.sequence.layer import DistributedAttention

    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)

    def drawn(count: int) -> torch.Tensor:
        shape = (2, 4 * ranks, count, 8)
        return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)

    query = drawn(query_heads)
    key = drawn(heads)
    value = drawn(heads)
    wanted = _attention(query, key, value, flat)
    scale = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    (wanted * scale).sum().backward()

    def local(query: Any, key: Any, value: Any, *, flat: bool) -> Any:
        if not tokens_first:
            return _attention(query, key, value, flat)
        found = _attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), flat)
        return found.transpose(0, 1)

    def part(value: torch.Tensor) -> torch.Tensor:
        own = value.detach().chunk(ranks, 1)[rank]
        return own.transpose(0, 1) if tokens_first else own

    whole = (query, key, value)
    own = [part(each).clone().requires_grad_() for each in whole]
    attention = DistributedAttention(local, dist.group.WORLD)
    found = attention(*own, 1 if tokens_first else 0, flat=flat)
    (found * part(scale)).sum().backward()
    pairs = [(found, part(wanted))]
    pairs += [(grad_of(mine), part(grad_of(each))) for mine, each in zip(own, whole, strict=True)]
    return [(one.detach() - other).abs().max().item() for one, other in pairs]


@pytest.mark.parametrize(
    ("world", "query_heads", "heads", "tokens_first", "flat"),
    [(2, 4, 4, False, False), (2, 4, 2, True, True), (3, 8, 4, False, True), (3, 5, 5, True, False)],
    ids=["equal", "shared keys", "uneven", "tokens first"],
)
def test_distributed_attention(
    world: int, query_heads: int, heads: int, tokens_first: bool, flat: bool
) -> None:
    for errors in run_workers(_distributed_attention, world, query_heads, heads, tokens_first, flat):
        assert len(errors) == 4 and max(errors) < TOLERANCE


def _refused_attention() -> list[str]:
    _deepspeed().init_distributed()
    from deepspeed.sequence.layer import DistributedAttention

    said = []
    for use in (
        lambda: DistributedAttention(_attention, dist.group.WORLD, scatter_idx=3),
        lambda: DistributedAttention(_attention, dist.group.WORLD)(*[torch.ones(1, 2, 1, 4)] * 3, 0),
        lambda: DistributedAttention(_attention, dist.group.WORLD)(
            torch.ones(1, 2, 3, 4), *[torch.ones(1, 2, 2, 4)] * 2, 0
        ),
        lambda: DistributedAttention(_attention, dist.group.WORLD)(*[torch.ones(1, 2, 2, 4)] * 3, 2),
        lambda: DistributedAttention(_attention, dist.group.WORLD)(
            *[torch.ones(1, 2 + dist.get_rank(), 2, 4)] * 3, 0
        ),
    ):
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            use()
        said.append(str(caught.value))
    return said


def test_attention_that_cannot_be_distributed_is_refused() -> None:
    for said in run_workers(_refused_attention, 2):
        assert "the heads must be in dimension 2" in said[0]
        assert said[1:] == [
            "1 key-value heads cannot be divided by 2 ranks",
            "3 heads cannot be divided as the 2 key-value heads are",
            "batch_dim_idx: expected 0 or 1, got 2",
            "DistributedAttention needs equal parts of a sequence; ranks have [2, 3] tokens",
        ]


@pytest.mark.parametrize("shape", [(2, 13, 8), (13, 8)])
@pytest.mark.parametrize("shards", [1, 3, 40])
def test_a_layer_in_tiles(deepspeed: Any, shape: tuple[int, ...], shards: int) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.GELU(), torch.nn.Linear(20, 8)).double()
    given = torch.randn(shape, dtype=torch.float64)
    results = []
    for is_tiled in (False, True):
        layer.zero_grad()
        hidden = given.clone().requires_grad_()
        found = hidden
        if is_tiled:
            found = TiledMLP.apply(lambda self, x: self(x), layer, hidden, shards, list(layer.parameters()))
        else:
            found = layer(hidden)
        found.sin().sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        results.append([found.detach(), hidden.grad, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_in_tiles(deepspeed: Any, masked: bool) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11).double()
    given, labels = torch.randn(2, 9, 8, dtype=torch.float64), torch.randint(0, 11, (2, 9))
    mask = torch.rand(2, 9) > 0.3 if masked else None

    def loss_of(self: Any, x: torch.Tensor, y: torch.Tensor, wanted: torch.Tensor | None = None) -> Any:
        each = torch.nn.functional.cross_entropy(self(x), y, reduction="none")
        return (each if wanted is None else each * wanted).sum()

    results = []
    for shards in (1, 4):
        head.zero_grad()
        hidden = given.clone().requires_grad_()
        loss = TiledFusedLogitsLoss.apply(loss_of, head, hidden, labels, mask, shards, None, "sum")
        (loss * 3).backward()
        results.append([loss.detach(), grad_of(hidden), grad_of(head.weight).clone()])
    whole = loss_of(head, given.flatten(0, 1), labels.flatten(), None if mask is None else mask.flatten())
    assert results[0][0].item() == pytest.approx(whole.item())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r'output_reduction: expected "mean" or "sum", got \'max\''):
        TiledFusedLogitsLoss.apply(loss_of, head, given, labels, mask, 2, None, "max")
    for wrong in (lambda self, x, y: self(x), lambda self, x, y: (x.sum(), y)):
        with pytest.raises(ValueError, match="fn must return the loss of a tile"):
            TiledFusedLogitsLoss.apply(wrong, head, given, labels, None, 2, None, "mean")
    with pytest.raises(ValueError, match=r"of one size, got \[2, 9, 8\], \[2, 8\]"):
        TiledFusedLogitsLoss.apply(loss_of, head, given, labels[:, :8], None, 2, None, "sum")
