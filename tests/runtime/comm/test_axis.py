"""Test the collectives of an axis, what they count, and their gradients, on an axis whose ranks do not follow
each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import zlaunch
from tests.runtime.workers import join, run_workers
from zlaunch.runtime.comm.axis import PASSES, Axis, Channel
from zlaunch.runtime.comm.collectives import Comm
from zlaunch.runtime.comm.nodes import make_link
from zlaunch.runtime.mesh import MeshShape
from zlaunch.runtime.parallel import collectives

_CHANNEL = Channel("test", "tests its axis", "test")
_UNCOUNTED = Channel("states", "tests its axis")
_SIZE = 2


def _axis() -> Axis:
    """Make an axis of ranks 0 and 2, and one of ranks 1 and 3."""
    comm = Comm(zlaunch.init_distributed(), mesh=partial(make_link, None, MeshShape(tensor=2, expert=_SIZE)))
    axis = Axis(comm, "expert")
    axis.make_group(PASSES)
    return axis


def _everyone(axis: Axis, value: Tensor) -> list[Tensor]:
    """Return the values of the ranks of this rank's axis."""
    values = axis.comm.exchange(value.detach())
    return [values[rank] for rank in axis.ranks]


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)


def _differentiate(
    function: Callable[..., Tensor], axis: Axis
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Call a function of the axis; return all ranks' inputs and gradients of outputs, and this rank's output
    and gradient of its input.
    """
    value = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    output = function(value, axis, _CHANNEL)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    assert value.grad is not None
    return _everyone(axis, value), _everyone(axis, gradient), output.detach(), value.grad


def _gradients() -> None:
    torch.manual_seed(join())
    axis = _axis()
    rank = axis.rank
    assert axis.ranks == [axis.comm.rank % 2, axis.comm.rank % 2 + 2] and axis.comm.axes["expert"] is axis

    values, gradients, output, gradient = _differentiate(collectives.copy_to, axis)
    assert torch.equal(output, values[rank]) and torch.equal(gradient, _sum(gradients))

    values, gradients, output, gradient = _differentiate(collectives.reduce_from, axis)
    assert torch.equal(output, _sum(values)) and torch.equal(gradient, gradients[rank])

    values, gradients, output, gradient = _differentiate(collectives.gather_from, axis)
    assert torch.equal(output, torch.cat(values, -1))
    assert torch.equal(gradient, gradients[rank].chunk(_SIZE, -1)[rank])

    values, gradients, output, gradient = _differentiate(collectives.scatter_to, axis)
    assert torch.equal(output, values[rank].chunk(_SIZE, -1)[rank])
    assert torch.equal(gradient, torch.cat(gradients, -1))

    values, gradients, output, gradient = _differentiate(partial(collectives.gather_from, dim=0), axis)
    assert torch.equal(output, torch.cat(values))
    assert torch.equal(gradient, gradients[rank].chunk(_SIZE)[rank])
    values, gradients, output, gradient = _differentiate(partial(collectives.scatter_to, dim=0), axis)
    assert torch.equal(output, values[rank].chunk(_SIZE)[rank])
    assert torch.equal(gradient, torch.cat(gradients))

    for dim in (0, 1):
        values, gradients, output, gradient = _differentiate(partial(collectives.gather_to, dim=dim), axis)
        assert torch.equal(output, torch.cat(values, dim))
        assert torch.equal(gradient, _sum(gradients).chunk(_SIZE, dim)[rank])
        values, gradients, output, gradient = _differentiate(partial(collectives.sum_to_shard, dim=dim), axis)
        assert torch.equal(output, _sum(values).chunk(_SIZE, dim)[rank]) and output.is_contiguous()
        assert torch.equal(gradient, torch.cat(gradients, dim))

    values, gradients, output, gradient = _differentiate(collectives.total, axis)
    assert torch.equal(output, _sum(values)) and torch.equal(gradient, _SIZE * gradients[rank])


def test_each_function_has_the_gradient_of_the_note() -> None:
    run_workers(_gradients, 4)


def _owned_sum() -> None:
    torch.manual_seed(join())
    axis = _axis()
    for layout in (torch.contiguous_format, torch.channels_last):
        value = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
        product = (value * 3).contiguous(memory_format=layout)
        before = product.detach().clone()
        output = collectives.reduce_from(product, axis, _CHANNEL, owned=True)
        assert torch.equal(output, _sum(_everyone(axis, before)))
        assert (output.data_ptr() == product.data_ptr()) == (layout == torch.contiguous_format)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        assert value.grad is not None and torch.equal(value.grad, 3 * gradient)


def test_an_owned_sum_takes_no_memory() -> None:
    run_workers(_owned_sum, 4)


def _second_gradient() -> None:
    torch.manual_seed(join())
    axis = _axis()
    value, factor = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    output = collectives.copy_to(value, axis, _CHANNEL) * factor
    (first,) = torch.autograd.grad(output.sum(), value, create_graph=True)
    assert torch.equal(first, _sum(_everyone(axis, factor)))
    weight = torch.arange(3, dtype=torch.float64)
    (second,) = torch.autograd.grad((first * weight).sum(), factor)
    assert torch.equal(second, weight)


def test_a_gradient_can_be_differentiated() -> None:
    run_workers(_second_gradient, 4)


def _exchanges() -> None:
    torch.manual_seed(join())
    axis = _axis()
    # rank r of the axis keeps r + 1 rows, and sends 2 to the other
    sent = [2, 2]
    sent[axis.rank] = axis.rank + 1
    rows = torch.randn(sum(sent), 3, dtype=torch.float64, requires_grad=True)
    exchange = collectives.RowExchange(sent, sent)
    (found,) = collectives.all_to_all(axis, _CHANNEL, exchange, rows)
    everyone = _everyone(axis, rows)
    first = everyone[0][: 1 if axis.rank == 0 else 3][-sent[0] :]
    second = everyone[1][2 * axis.rank :][: sent[1]]
    assert torch.equal(found, torch.cat([first, second]))
    assert axis.comm.moved["test"] == rows.numel()
    (back,) = collectives.all_to_all(axis, _CHANNEL, exchange.inverse, found)
    assert torch.equal(back, rows)
    found.backward(found.detach())
    assert torch.equal(rows.grad, rows.detach())  # type: ignore[arg-type]

    shards = [torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    over_heads = collectives.DimExchange(split=1, joined=2)
    for shard, other in zip(shards, collectives.all_to_all(axis, _CHANNEL, over_heads, *shards), strict=True):
        full = torch.cat(_everyone(axis, shard), 2)
        assert torch.equal(other, full.chunk(_SIZE, 1)[axis.rank])
        other.backward(other.detach())
        assert torch.equal(shard.grad, shard.detach())  # type: ignore[arg-type]


def test_an_exchange_sends_gradients_back() -> None:
    run_workers(_exchanges, 4)


def _counts() -> list[dict[str, int]]:
    join()
    axis = _axis()
    moved = axis.comm.moved
    found = []
    for channel in (_CHANNEL, _UNCOUNTED):
        moved.clear()
        value = torch.full((6,), float(axis.rank))
        assert axis.max(value.clone(), channel)[0] == 1 and axis.sum(value.clone(), channel)[0] == 1
        assert torch.equal(torch.stack(axis.all_gather(value, channel))[:, 0], torch.tensor([0.0, 1.0]))
        assert torch.equal(axis.all_to_all(value, channel)[::3], torch.tensor([0.0, 1.0]))
        assert axis.broadcast(value, 1, channel)[0] == 1
        found.append(dict(moved))
    return found


def test_a_channel_says_what_is_counted() -> None:
    """Sums and maxima count twice, as an all-reduce does."""
    for counted, uncounted in run_workers(_counts, 4):
        assert counted == {"test": 6 * (2 + 2 + _SIZE + 1 + 1)} and uncounted == {}


def _some_places() -> None:
    join()
    axis = _axis()
    axis.make_group("all", along=["tensor"])
    axis.make_group("first", places=[0])
    assert axis.group_for("all").size() == 4
    assert (axis.group_for("first") is None) == (axis.rank == 1)
    axis.comm.close()
    assert not axis.is_open


def test_groups_of_further_axes_and_of_some_places() -> None:
    run_workers(_some_places, 4)
