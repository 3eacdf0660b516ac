"""Test the pool of page-locked memory: reuse, statistics, and that nothing stays locked after its memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from zlaunch.cuda_ops import pinned
from zlaunch.cuda_ops.pinned import PAGE_BYTES, PinnedPool
from zlaunch.runtime.offload.transfer import HostLink


def test_buffers_are_whole_pages_and_come_back() -> None:
    pool = PinnedPool(pin=False)
    first = pool.take(1)
    assert first.numel() == PAGE_BYTES and first.data_ptr() % PAGE_BYTES == 0
    large = pool.take(10 * PAGE_BYTES)
    assert pool.statistics().lent_bytes == 11 * PAGE_BYTES
    pool.give_back(large)
    assert pool.take(4 * PAGE_BYTES).data_ptr() != large.data_ptr()  # more than twice too large
    assert pool.take(6 * PAGE_BYTES).data_ptr() == large.data_ptr()
    found = pool.statistics()
    assert (found.held_bytes, found.lent_bytes) == (15 * PAGE_BYTES, 15 * PAGE_BYTES)
    assert found.peak_bytes == 15 * PAGE_BYTES and found.pinned_bytes == 0
    pool.give_back(first)
    pool.trim()
    assert pool.statistics().held_bytes == 14 * PAGE_BYTES
    pool.close()
    assert pool.statistics().held_bytes == pool.statistics().lent_bytes == 0


class Driver:
    """Stands for the CUDA driver, which refuses what it already has and what is too much."""

    def __init__(self, limit: int) -> None:
        self.limit, self.locked = limit, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if address in self.locked or sum(self.locked.values()) + nbytes > self.limit:
            return 712
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(limit=8 * PAGE_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(pinned, "_clear_cuda_error", lambda: None)
    yield made


def test_everything_is_unlocked_before_it_goes(driver: Driver) -> None:
    pool = PinnedPool(pin=True)
    kept, dropped, free = (pool.take(2 * PAGE_BYTES) for _ in range(3))
    assert sum(driver.locked.values()) == pool.statistics().pinned_bytes == 6 * PAGE_BYTES
    pool.drop(dropped)
    assert dropped.data_ptr() not in driver.locked and kept.data_ptr() in driver.locked
    pool.give_back(free)
    pool.trim()
    assert list(driver.locked) == [kept.data_ptr()]
    address = kept.data_ptr()
    del kept  # the pool still has it: memory that is locked is never unmapped
    assert list(driver.locked) == [address]
    pool.close()
    assert driver.locked == {} and pool.statistics().pinned_bytes == 0


def test_a_refusal_is_one_warning(driver: Driver) -> None:
    pool = PinnedPool(pin=True)
    pool.take(6 * PAGE_BYTES)
    with pytest.warns(RuntimeWarning, match=r"the driver refused \(CUDA error 712\)") as caught:
        pool.take(4 * PAGE_BYTES)
        pool.take(5 * PAGE_BYTES)
    assert len(caught) == 1 and pool.statistics().pinned_bytes == 6 * PAGE_BYTES
    pool.close()


def test_a_budget_is_kept(driver: Driver) -> None:
    pool = PinnedPool(pin=True, budget_bytes=3 * PAGE_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.take(3 * PAGE_BYTES)
    with pytest.warns(RuntimeWarning, match="budget"):
        pool.take(PAGE_BYTES)
    assert sum(driver.locked.values()) == 3 * PAGE_BYTES
    pool.close()


def test_what_a_link_gave_out_is_taken_back(driver: Driver) -> None:
    link = HostLink(torch.device("cpu"), pin=True)
    first, second = link.empty(100, torch.float32), link.empty(100, torch.bfloat16)
    assert first.shape == second.shape == (100,) and len(driver.locked) == 2
    link.release(first)
    link.release(torch.zeros(3))  # somebody else's
    assert list(driver.locked) == [second.data_ptr()]
    link.close()
    assert driver.locked == {}


def test_the_memory_is_private_so_that_it_may_have_huge_pages() -> None:
    buffer = PinnedPool(pin=False).take(4 << 20)
    address = buffer.data_ptr()
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[:2] for line in maps]
    found = [
        rights
        for span, rights in ranges
        if int(span.partition("-")[0], 16) <= address < int(span.partition("-")[2], 16)
    ]
    assert found == ["rw-p"]


def test_a_pool_that_is_dropped_leaves_nothing_locked(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = PinnedPool(pin=True)
    buffer = pool.take(PAGE_BYTES)
    assert driver.locked
    del pool
    assert not driver.locked and buffer.numel() == PAGE_BYTES
