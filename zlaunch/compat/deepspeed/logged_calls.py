"""Logs a script's own calls of ``deepspeed.comm`` into the newest engine's table of collectives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zlaunch.runtime.config.profilers import OPERATIONS
from zlaunch.runtime.monitor.comms_logger import CommsLogger, LoggedOperation, newest_log, timed_event

Call = Callable[..., Any]


def logged(function: Call) -> Call:
    """Wrap one of torch.distributed's functions: called with positional arguments, named ones and ``prof``
    (log it whatever ``prof_ops`` says), the wrapper logs the operation where an engine's log is there.
    """
    name = function.__name__
    kind = OPERATIONS.get(name)
    signature = inspect.signature(function)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any], *, prof: bool = False) -> Any:
        log = newest_log() if kind is not None else None
        if log is None or kind is None or not (prof or log.wants(kind)):
            return function(*args, **kwargs)
        given = signature.bind_partial(*args, **kwargs).arguments
        ranks = dist.get_world_size(given.get("group"))
        if ranks <= 1:  # alone, or not of the group
            return function(*args, **kwargs)
        tensors = [tensors for value in given.values() if (tensors := _tensors(value))]
        sizes = [sum(tensor.nbytes for tensor in part) for part in tensors] or [0]
        # one rank of a gather or scatter has the whole, the others their parts
        nbytes = min(sizes) * ranks if kind in ("gather", "scatter") else max(sizes)
        on_gpu = any(tensor.is_cuda for part in tensors for tensor in part)
        if not given.get("async_op") and name not in ("isend", "irecv"):
            with log.timing(kind, nbytes, ranks, on_gpu=on_gpu):
                return function(*args, **kwargs)
        operation = log.begin(kind, nbytes, ranks)
        before = timed_event() if on_gpu else None
        if before is not None:
            before.record()
        work = function(*args, **kwargs)
        if work is None or (before is None and log.end_with(operation, work)):
            return work
        return _Handle(work, log, operation, before)

    return call


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for each in value if isinstance(each, Tensor)] if isinstance(value, (list, tuple)) else []


class _Handle:
    """Stands for a torch Work whose operation ends, for the log, when it is waited for: by the current stream
    on a device. No stream of the log's own may wait for it: torch keeps the tensors until the first wait.
    """

    def __init__(self, work: Any, log: CommsLogger, operation: LoggedOperation, before: Any) -> None:
        self._work, self._log, self._operation, self._before = work, log, operation, before
        self._is_over = False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the operation."""
        result = self._work.wait(*args, **kwargs)
        if not self._is_over:
            self._is_over = True
            if self._before is None:
                self._log.end(self._operation)
            else:
                after = timed_event()
                after.record()
                self._log.end_between(self._operation, self._before, after)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
