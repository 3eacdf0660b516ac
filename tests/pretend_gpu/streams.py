"""Provide streams and events that carry clocks."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .clocks import Actor, Clock, clocks, findings, host, host_waits, join, known, lock, note_wait, where
from .timeline import timeline

_numbers = itertools.count()
_local = threading.local()
_random = random.Random(0)


class Place:
    """Says which of the machine's GPUs is this process's."""

    device = torch.device("cuda", 0)
    count = 1

    def take(self, index: int, count: int) -> None:
        """Give this process GPU ``index`` of ``count``."""
        self.device = torch.device("cuda", index)
        self.count = count


place = Place()


def current_device() -> int:
    """Return the calling thread's device: 0 until it has chosen one."""
    index: int = getattr(_local, "index", 0)
    return index


def set_device(device: Any) -> None:
    """Choose the calling thread's device."""
    _local.index = torch.device(device).index if not isinstance(device, int) else device
    note_device()


def note_device(asked: Any = None) -> None:
    """Write down that the calling thread uses another GPU than this process's: by a device with an index, or
    by not having chosen one. The other process's GPU then lacks the memory of a context, or more.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread() and not hasattr(_local, "index"):
        findings.races[f"NO DEVICE CHOSEN by {thread.name.rstrip('_0123456789')} in {where()}"] += 1
    index = asked if isinstance(asked, int) else None if asked is None else torch.device(asked).index
    if (current_device() if index is None else index) != place.device.index:
        findings.races[f"ANOTHER PROCESS'S GPU is used in {where()}"] += 1


class Stream:
    """What takes the place of torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.number = next(_numbers)
        self.actor: Actor = ("stream", self.number)
        note_device(device)
        self.device = place.device
        self.device_index = place.device.index
        self.cuda_stream = self.number
        self._before: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        with lock:
            self._issue()
            timeline.wait(self.actor, clocks[other.actor])

    def wait_event(self, event: Event) -> None:
        with lock:
            self._issue()
            timeline.wait(self.actor, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note_device()
        host_waits(self.actor, "Stream.synchronize")

    def query(self) -> bool:
        with lock:
            return known(clocks[host()], self.actor, clocks[self.actor].get(self.actor, 0))

    def _issue(self) -> None:
        """Whatever the host has done comes before what it asks for now."""
        note_device()
        join(clocks[self.actor], clocks[host()])

    def __enter__(self) -> Stream:
        self._before.append(current_stream())
        _local.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _local.stream = self._before.pop()


class Event:
    """What takes the place of torch.cuda.Event."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with lock:
            stream._issue()
            self.clock = dict(clocks[stream.actor])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """True where the host knows; else the device is ahead or behind, as chance will have it."""
        note_device()
        with lock:
            if not self._is_known() and _random.random() < 0.5:
                return False
            join(clocks[host()], self.clock)
            return True

    def synchronize(self) -> None:
        note_device()
        with lock:
            if not self._is_known():
                note_wait("Event.synchronize")
            join(clocks[host()], self.clock)

    def elapsed_time(self, other: Event) -> float:
        return 1.0

    def _is_known(self) -> bool:
        mine = clocks[host()]
        return all(known(mine, actor, n) for actor, n in self.clock.items() if actor[0] == "stream")


DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the calling thread's stream."""
    note_device(device)
    stream: Stream = getattr(_local, "stream", DEFAULT)
    return stream


@contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one, as torch.cuda.stream."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: Any = None) -> None:
    """Let the host wait for every stream."""
    note_device(device)
    with lock:
        note_wait("cuda.synchronize")
        for actor in list(clocks):
            if actor[0] == "stream":
                join(clocks[host()], clocks[actor])
