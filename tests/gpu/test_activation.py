"""Test offloaded inputs on a GPU: they wait in page-locked memory and the numbers are not changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import zlaunch
from tests.runtime.models import batches, grad_of, loss_of, net
from zlaunch.runtime.activation import checkpointing, offload

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    checkpointing._settings = checkpointing._Settings()
    yield
    checkpointing._settings = checkpointing._Settings()
    offload._rooms.clear()


def test_offloaded_inputs_are_pinned_and_leave_the_gpu() -> None:
    """Gradients are the same over steps that lend the same buffers again, and less memory is in use."""
    model, data = net(width=256, depth=8).cuda(), [batch.cuda() for batch in batches(4, 16, length=64)]
    zlaunch.checkpointing.checkpoint_blocks(model)
    gradients, in_use = [], []
    for in_cpu in (False, True):
        zlaunch.checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
        for batch in data:
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = loss_of(model, batch)
            in_use.append(torch.cuda.memory_allocated() - before)
            loss.backward()
            gradients.append([grad_of(parameter).clone() for parameter in model.parameters()])
    input_bytes = 4 * 16 * 64 * 256
    assert in_use[-1] <= in_use[3] - 6 * input_bytes
    (one,) = offload._rooms.values()
    used = one.pool.statistics()
    assert used.pinned_bytes == used.held_bytes >= 8 * input_bytes
    for got, want in zip(gradients[4:], gradients[:4], strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_random_numbers_are_the_same_again() -> None:
    zlaunch.checkpointing.configure(None, checkpoint_in_cpu=True)
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    y = zlaunch.checkpointing.checkpoint(lambda a: torch.nn.functional.dropout(a.sin(), 0.5), x)
    y.sum().backward()
    kept = y != 0
    assert torch.equal(grad_of(x) != 0, kept) and 0 < int(kept.sum()) < kept.numel()
