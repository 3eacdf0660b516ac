"""Test where checkpointed inputs wait: they leave memory and come back in time, unchanged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zlaunch
from tests.runtime.activation.test_checkpointing import (
    _backward,
    _equal,
    _fresh_settings,
    _offload_everything,
    checkpoint,
)
from tests.runtime.models import Net, batches, grad_of, loss_of, net
from tests.runtime.workers import run_workers
from zlaunch.runtime.activation import offload

__all__ = ["_fresh_settings"]


def _inputs_alive(model: Net, batch: Tensor) -> tuple[list[bool], Tensor]:
    """Whether each block's input is in memory when the forward pass is over."""
    storages: list[StorageWeakRef] = []
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args: storages.append(StorageWeakRef(args[0].untyped_storage()))
        )
        for layer in model.layers
    ]
    loss = loss_of(model, batch)
    for handle in handles:
        handle.remove()
    return [not storage.expired() for storage in storages], loss


def _saved_bytes(model: nn.Module, batch: Tensor) -> int:
    """Bytes that one forward pass keeps, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_of(model, batch)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def test_less_is_kept() -> None:
    model, batch = net(depth=8), batches(1, 4)[0]
    whole = _saved_bytes(model, batch)
    zlaunch.checkpointing.checkpoint_blocks(model, 4)
    half = _saved_bytes(model, batch)
    zlaunch.checkpointing.checkpoint_blocks(model)
    none = _saved_bytes(model, batch)
    assert none < 0.4 * whole and none < half < whole


def test_offloaded_inputs_leave_and_return_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = net(depth=5), batches(1, 4)[0]
    want = _backward(model, batch)
    model.zero_grad()
    zlaunch.checkpointing.checkpoint_blocks(model)
    assert _inputs_alive(model, batch)[0] == [True] * 5
    _offload_everything()
    log: list[str] = []
    for index, layer in enumerate(model.layers):
        layer.up.register_forward_hook(lambda *_, index=index: log.append(f"run {index}"))
    bring = offload.OffloadedTensor._bring

    def logged(self: offload.OffloadedTensor) -> Tensor:
        log.append("fetch")
        return bring(self)

    monkeypatch.setattr(offload.OffloadedTensor, "_bring", logged)
    alive, loss = _inputs_alive(model, batch)
    assert alive == [False, False, False, False, True]
    (one,) = offload._rooms.values()
    input_bytes = 4 * batch[:, 1:].numel() * 24
    assert one.pool.statistics().lent_bytes >= 5 * input_bytes
    log.clear()
    loss.backward()
    assert log == ["fetch", "run 4", "fetch", "run 3", "fetch", "run 2", "fetch", "run 1", "run 0"]
    assert _equal([grad_of(p) for p in model.parameters()], want[1:])
    held = one.pool.statistics().held_bytes
    for _ in range(3):
        assert _equal(_backward(model, batch), want)
    assert one.pool.statistics().held_bytes == held  # lent again, not grown
    zlaunch.checkpointing.reset()
    assert one.pool.statistics() == dataclasses.replace(one.pool.statistics(), held_bytes=0, lent_bytes=0)


def test_same_shape_and_strides_come_back() -> None:
    _offload_everything()
    seen: list[tuple[Any, ...]] = []

    def look(*tensors: Tensor) -> Tensor:
        seen.append(tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors))
        return torch.stack([t.double().sin().sum() for t in tensors]).sum()

    base = torch.randn(4, 6, 8, requires_grad=True).sin()
    kinds = (
        base.transpose(0, 2),
        base.bfloat16(),
        base.sum(),
        base.detach(),
        torch.arange(4),
        base.permute(1, 0, 2),
    )
    checkpoint(look, *kinds).backward()
    assert len(seen) == 2 and seen[0] == seen[1]


def test_what_calls_share_is_offloaded_once() -> None:
    _offload_everything()
    mask, x = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    y = x
    for _ in range(4):
        y = checkpoint(lambda a, b: (a * b).sin(), y, mask)
    (one,) = offload._rooms.values()
    assert one.pool.statistics().lent_bytes == 5 * 4096  # a page each
    y.sum().backward()
    got, y = grad_of(x), x
    x.grad = None
    for _ in range(4):
        y = (y * mask).sin()
    y.sum().backward()
    assert torch.equal(got, grad_of(x))


def test_a_parameter_comes_back_as_itself() -> None:
    _offload_everything()
    weight, same = nn.Parameter(torch.ones(3, 3)), []

    def look(x: Tensor, w: Tensor) -> Tensor:
        same.append(w is weight)
        return (x @ w).sin()

    checkpoint(look, torch.ones(3, 3), w=weight).sum().backward()
    assert same == [True, True]


def _lent_pages() -> int:
    (one,) = offload._rooms.values()
    return one.pool.statistics().lent_bytes // 4096 - len(one.returned)


def test_what_is_not_offloaded() -> None:
    """An expanded tensor, which would grow, and the inputs of a call inside another."""
    _offload_everything()
    x, row = torch.ones(8, 8, requires_grad=True), torch.ones(1, 8).expand(8, 8)
    y = checkpoint(lambda a, b: checkpoint(torch.sin, checkpoint(torch.mul, a, b)), x, row)
    assert _lent_pages() == 1
    y.sum().backward()


def test_a_shared_input_that_changes_between_calls() -> None:
    """Each call gets the value it was given, and nothing stays on the device when all have been served."""
    _offload_everything()
    scale, x = torch.tensor([2.0]), torch.ones(1, requires_grad=True)
    y = checkpoint(torch.mul, x, scale)
    y = checkpoint(torch.sin, y)
    scale.mul_(5)
    for _ in range(2):
        y = checkpoint(torch.mul, y, scale)
    (one,) = offload._rooms.values()
    offloaded = [known() for known in one._known.values()]  # of x and scale
    y.backward(retain_graph=True)
    y.backward()
    want = 2 * (2.0 * 10 * 10 * torch.cos(torch.tensor([2.0])))
    assert torch.allclose(grad_of(x), want)
    assert [p._fetched for p in offloaded] == [None, None]


def test_interleaved_passes() -> None:
    """Two forwards, their backward passes in either order, and one that never has any."""
    _offload_everything()
    model, plain = net(), net()
    zlaunch.checkpointing.checkpoint_blocks(model)
    first, second = batches(2, 4)
    for order in ((0, 1), (1, 0)):
        model.zero_grad()
        plain.zero_grad()
        for one in (model, plain):
            losses = [loss_of(one, first), loss_of(one, second)]
            loss_of(one, first)
            for index in order:
                losses[index].backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(grad_of(a), grad_of(b)) for a, b in pairs)


# -- model parallel


class Mpu:
    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def _partitioned(offloaded: bool) -> tuple[bool, list[bool], int, int]:
    zlaunch.init_distributed()
    model, plain, batch = net(depth=4), net(depth=4), batches(1, 3, length=5)[0]  # 3 * 5 * 24 elements
    want = _backward(plain, batch)
    if offloaded:
        _offload_everything()
    offload.MINIMUM_NUMEL = 1
    zlaunch.checkpointing.configure(Mpu(), partition_activations=True)
    zlaunch.checkpointing.checkpoint_blocks(model)
    kept: list[int] = []
    slice_of = offload.Segment._slice_of

    def counted(self: offload.Segment, x: Tensor) -> Tensor:
        piece = slice_of(self, x)
        kept.append(piece.untyped_storage().nbytes())
        return piece

    offload.Segment._slice_of = counted  # type: ignore[method-assign]
    alive, _ = _inputs_alive(model, batch)
    return _equal(_backward(model, batch), want), alive, sum(kept[:4]), 4 * 4 * 3 * 5 * 24


@pytest.mark.parametrize("offloaded", [False, True])
def test_model_parallel_ranks_keep_a_slice_each(offloaded: bool) -> None:
    for same, alive, kept_bytes, whole_bytes in run_workers(_partitioned, 2, offloaded):
        assert same
        assert alive == [False] * 4
        assert kept_bytes == whole_bytes / 2


def _odd_sizes() -> bool:
    zlaunch.init_distributed()
    offload.MINIMUM_NUMEL = 1
    zlaunch.checkpointing.configure(Mpu(), partition_activations=True)
    equal = []
    for shape in ((7, 3), (1,), (2, 5), ()):
        x = torch.linspace(1, 2, int(torch.Size(shape).numel())).view(shape).requires_grad_()
        checkpoint(lambda a: a.sin().exp(), x).sum().backward()
        got, x.grad = grad_of(x), None
        x.sin().exp().sum().backward()
        equal.append(torch.equal(got, grad_of(x)))
    return all(equal)


def test_slices_of_any_size() -> None:
    assert all(run_workers(_odd_sizes, 3))


def _different() -> str:
    zlaunch.init_distributed()
    zlaunch.checkpointing.configure(Mpu(), partition_activations=True)
    x = torch.ones(2048)
    x[-1] = dist.get_rank()  # only the last rank's slice differs, which that rank cannot see by itself
    with pytest.raises(RuntimeError) as caught:
        checkpoint(torch.sin, x.requires_grad_())
    return str(caught.value)


def test_ranks_with_different_inputs_are_told() -> None:
    for message in run_workers(_different, 2):
        assert "equal inputs on all model-parallel ranks, but an input of shape (2048,) differs" in message
