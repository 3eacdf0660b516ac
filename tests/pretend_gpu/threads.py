"""Track the order between host threads: starting and joining, events, queues and futures."""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .clocks import clocks, host, join, lock
from .modes import running

_OURS = "zlaunch"
"""What the names of the runtime's threads begin with: those see the GPU too."""


def _leave(where: Any) -> None:
    """Write down what the calling thread knows."""
    with lock:
        join(where.__dict__.setdefault("_clock", {}), clocks[host()])


def _take(where: Any) -> None:
    """Let the calling thread know what has been written down."""
    with lock:
        join(clocks[host()], getattr(where, "_clock", {}))


def _before(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _leave(self)
        return method(self, *args, **kwargs)

    return call


def _after(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        _take(self)
        return result

    return call


def meeting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that waits once for all: who calls it later knows what the first one has learnt."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        _take(self)
        _leave(self)
        return result

    return call


def _thread_run(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def call(self: threading.Thread) -> None:
        _take(self)
        try:
            if self.name.startswith(_OURS):
                with running():
                    run(self)
            else:
                run(self)
        finally:
            _leave(self)

    return call


def _submit(submit: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            known = dict(clocks[host()])

        def do(*args: Any, **kwargs: Any) -> Any:
            with lock:
                join(clocks[host()], known)
            return work(*args, **kwargs)

        return submit(self, do, *args, **kwargs)

    return call


class _Lock:
    """A lock: who takes it knows what those did who had it before."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            _take(self)
        return taken

    def release(self) -> None:
        _leave(self)
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _SimpleQueue(queue.SimpleQueue[Any]):
    """The queue that a finalizer may put into while the same thread is getting from it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        _leave(self)
        super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        _take(self)
        return item


def install() -> None:
    """Replace the methods by which threads of this process meet."""
    thread: Any = threading.Thread
    thread.start, thread.run = _before(thread.start), _thread_run(thread.run)
    thread.join = _after(thread.join)
    threading.Lock = _Lock  # type: ignore[assignment]
    condition: Any = threading.Condition
    condition.__enter__, condition.__exit__ = _after(condition.__enter__), _before(condition.__exit__)
    condition.wait = _after(condition.wait)
    event: Any = threading.Event
    event.set, event.wait = _before(event.set), _after(event.wait)
    lines: Any = queue.Queue
    lines.put, lines.get = _before(lines.put), _after(lines.get)
    queue.SimpleQueue = _SimpleQueue  # type: ignore[misc]
    future: Any = Future
    future.set_result = _before(future.set_result)
    future.set_exception = _before(future.set_exception)
    future.result, future.exception = _after(future.result), _after(future.exception)
    pool: Any = ThreadPoolExecutor
    pool.submit = _submit(pool.submit)
