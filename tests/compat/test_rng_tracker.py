"""Test Megatron's tracker of random numbers, as scripts for DeepSpeed use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.test_engine import _deepspeed
from tests.runtime.models import grad_of
from tests.runtime.workers import join, run_workers


def test_a_fork_draws_from_its_own_sequence(deepspeed: Any) -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
    with tracker.fork():
        inside = torch.rand(3)
    outside = torch.rand(3)
    saved = tracker.get_states()
    with tracker.fork():
        later = torch.rand(3)
    torch.manual_seed(5)
    torch.testing.assert_close(outside, torch.rand(3), rtol=0, atol=0)
    torch.manual_seed(5 + 2718)
    torch.testing.assert_close(inside, torch.rand(3), rtol=0, atol=0)
    torch.testing.assert_close(later, torch.rand(3), rtol=0, atol=0)
    tracker.set_states(saved)
    with tracker.fork():
        torch.testing.assert_close(torch.rand(3), later, rtol=0, atol=0)
    deepspeed.checkpointing.model_parallel_reconfigure_tp_seed(5)
    with tracker.fork():
        torch.testing.assert_close(torch.rand(3), inside, rtol=0, atol=0)


def test_names_and_seeds_are_used_once(deepspeed: Any) -> None:
    tracker = deepspeed.checkpointing.CudaRNGStatesTracker()
    with pytest.raises(Exception, match="there is no 'first': call model_parallel_cuda_manual_seed"):
        tracker.fork("first").__enter__()
    tracker.add("first", 1)
    with pytest.raises(Exception, match="seed 1 is in use"):
        tracker.add("second", 1)
    with pytest.raises(Exception, match="name 'first' is in use"):
        tracker.add("first", 2)
    tracker.reset()
    tracker.add("first", 1)


def test_a_recomputed_call_draws_the_same_numbers(deepspeed: Any) -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    layers = [nn.Linear(8, 8).double() for _ in range(3)]

    def layer(index: int, x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            x = nn.functional.dropout(layers[index](x), 0.5)
        return nn.functional.dropout(x, 0.5)

    def gradients(call: Any) -> list[Any]:
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(9)
        found = []
        for _ in range(2):  # the second pass continues the sequence of the first
            x = torch.ones(4, 8, dtype=torch.float64)
            for index in range(3):
                x = call(lambda x, index=index: layer(index, x), x)
            x.sum().backward(retain_graph=True)
            x.sum().backward()
            found += [grad_of(parameter).clone() for each in layers for parameter in each.parameters()]
        for each in layers:
            each.zero_grad()
        return found

    wanted = gradients(lambda function, x: function(x))
    found = gradients(deepspeed.checkpointing.checkpoint)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_call_may_begin_a_sequence(deepspeed: Any) -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    x = torch.ones(50, requires_grad=True)

    def begins(x: torch.Tensor) -> torch.Tensor:
        if "late" not in tracker.get_states():
            tracker.add("late", 99)
        with tracker.fork("late"):
            return nn.functional.dropout(x, 0.5).sin()

    y = deepspeed.checkpointing.checkpoint(begins, x)
    y.sum().backward()
    assert torch.equal(grad_of(x) != 0, y != 0)


@pytest.mark.rotated
def test_a_compiled_call_draws_the_same_numbers(deepspeed: Any) -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(4)

    def forked(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return nn.functional.dropout(x, 0.5).sin()

    model = torch.compile(lambda x: deepspeed.checkpointing.checkpoint(forked, x) * 1.0, backend="aot_eager")
    x = torch.ones(50, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.equal(grad_of(x) != 0, y != 0)
    tracker.reset()


class _Mpu:
    """Tells that all ranks share the layers."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def _draw() -> list[list[float]]:
    deepspeed = _deepspeed()
    join()
    deepspeed.checkpointing.configure(_Mpu())
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
        inside = torch.rand(4).tolist()
    return [inside, torch.rand(4).tolist()]


def test_ranks_that_share_layers_draw_different_numbers_in_a_fork() -> None:
    first, second = run_workers(_draw, 2)
    assert first[0] != second[0] and first[1] == second[1]
