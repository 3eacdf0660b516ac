"""Copies between a device and host memory, on separate streams."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...cuda_ops.pinned import PinnedPool
from ..comm.pending import DONE, Pending
from ..device import named, stream_mark


class HostLink:
    """Copies between one device and the host. A CPU backend's "device" is host memory too: copies are plain.

    On a GPU, downloads and uploads have a stream each, so that both directions and the computation overlap.
    """

    def __init__(self, device: torch.device, *, pin: bool, budget_bytes: int | None = None) -> None:
        self.device = device
        self.pool = PinnedPool(pin=pin, budget_bytes=budget_bytes)
        self.cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._later: list[tuple[torch.cuda.Event, Tensor]] = []
        # The step in the background and the main thread both take buffers.
        self._lock = threading.Lock()
        self._kept: dict[int, Tensor] = {}
        """Maps addresses to the buffers that ``empty`` has returned."""

    def take(self, nbytes: int) -> Tensor:
        """Lend a uint8 buffer of the pool."""
        self.reclaim()
        return self.pool.take(nbytes)

    def reclaim(self) -> None:
        """Return to the pool the buffers that were given back and are no longer read."""
        with self._lock:
            busy = []
            for event, buffer in self._later:
                if event.query():  # type: ignore[no-untyped-call]
                    self.pool.give_back(buffer)
                else:
                    busy.append((event, buffer))
            self._later = busy

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer that the current stream may still be reading."""
        event = self.mark()
        if event is None:
            self.pool.give_back(buffer)
        else:
            with self._lock:
                self._later.append((event, buffer))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return flat host memory that stays until it is released, content undefined."""
        buffer = self.pool.take(numel * dtype.itemsize)
        self._kept[buffer.data_ptr()] = buffer
        return buffer[: numel * dtype.itemsize].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """Release a tensor that ``empty`` has returned; ignore other tensors."""
        buffer = self._kept.pop(tensor.data_ptr(), None)
        if buffer is None:
            return
        if self.cuda:  # a copy may be under way; the host cannot know of the streams that wait for it
            torch.cuda.synchronize(self.device)
        self.pool.drop(buffer)

    def close(self) -> None:
        """Release all memory; no copy may be under way."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self._kept.clear()
        self.pool.close()

    def download(self, source: Tensor, target: Tensor) -> Pending:
        """Start ``target`` (host) <- ``source`` (device), after what the current stream has queued.

        ``wait`` blocks the host until the values are there. Both tensors must live until then.
        """
        if self._down is None:
            target.copy_(source)
            return DONE
        # What computes the source is queued on the current stream, and need not have ended.
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with named("download"), torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
            event = self._down.record_event()
        # The allocator knows the compute stream only. It must not give the source's memory to that before the
        # copy has read it.
        source.record_stream(self._down)
        return HostEvent(event)

    def after_downloads(self) -> None:
        """Make what the current stream queues from now on wait for the downloads; it may change what they
        read.
        """
        if self._down is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._down)

    def upload(self, source: Tensor, target: Tensor, *after: torch.cuda.Event | None) -> Pending:
        """Start ``target`` (device) <- ``source`` (host), not before any of ``after``.

        ``wait`` makes the current stream wait for it, ``synchronize`` the host. ``source`` must not change
        until then.
        """
        if self._up is None:
            target.copy_(source)
            return DONE
        for event in after:
            if event is not None:
                self._up.wait_event(event)
        with named("upload"), torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
            return StreamEvent(self._up.record_event())

    def behind_uploads(self) -> AbstractContextManager[Any]:
        """Make the uploads' stream the current one: what is queued inside comes after them."""
        return nullcontext() if self._up is None else torch.cuda.stream(self._up)

    def mark(self) -> torch.cuda.Event | None:
        """Record an event behind everything that the current stream has queued; None on a CPU."""
        return stream_mark(self.device)


class HostEvent(Pending):
    """Represents values on their way to the host."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    @property
    def event(self) -> torch.cuda.Event:
        return self._event


class StreamEvent(HostEvent):
    """Represents values on their way to the device: a stream waits, the host does not."""

    __slots__ = ()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()
