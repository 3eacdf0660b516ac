"""Test which buffer the reducer's pool lends."""

from __future__ import annotations

import pytest
import torch

from tests.unit.zero.fake_comm import FakeComm
from zlaunch.runtime.zero.reduce import BufferPool


def test_a_buffer_that_fits_is_lent_again() -> None:
    pool = BufferPool(FakeComm())
    first = pool.lend(torch.float32, 64)
    assert (first.shape, first.dtype) == ((64,), torch.float32)
    pool.give_back(first)
    again = pool.lend(torch.float32, 64)
    assert again.data_ptr() == first.data_ptr() and pool.free == []
    assert pool.lend(torch.float32, 64).data_ptr() != first.data_ptr()


def test_the_smallest_that_is_large_enough_is_lent() -> None:
    pool = BufferPool(FakeComm())
    sizes = {numel: pool.lend(torch.float32, numel) for numel in (64, 256, 128)}
    for buffer in sizes.values():
        pool.give_back(buffer)
    lent = pool.lend(torch.float32, 100)
    assert lent.data_ptr() == sizes[128].data_ptr() and lent.shape == (100,)
    pool.give_back(lent)
    assert sorted(buffer.numel() for buffer in pool.free) == [64, 128, 256], "a part goes back as the whole"
    assert pool.lend(torch.bfloat16, 64).data_ptr() not in {buffer.data_ptr() for buffer in sizes.values()}
    assert pool.lend(torch.float32, 512).shape == (512,)


@pytest.mark.parametrize("shared", [False, True])
def test_a_larger_buffer_takes_the_place_of_one_that_is_too_small(shared: bool) -> None:
    class Memory(FakeComm):
        @property
        def shared(self) -> bool:
            return shared

    pool = BufferPool(Memory())
    narrow = pool.lend(torch.bfloat16, 8)
    pool.give_back(narrow)
    for numel in (64, 128, 256, 32):
        first, second = (pool.lend(torch.float32, numel) for _ in range(2))
        pool.give_back(second)
        pool.give_back(first)
    held = sorted(buffer.numel() for buffer in pool.free)
    assert held == ([8, 64, 64, 128, 128, 256, 256] if shared else [8, 256, 256])


def test_ordinary_memory_is_released_after_a_pass() -> None:
    pool = BufferPool(FakeComm())
    pool.give_back(pool.lend(torch.float32, 64))
    pool.end_pass()
    assert pool.free == []
