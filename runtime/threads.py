"""Start the threads of the runtime, each with this rank's GPU as its device.

Note [Device of a thread]. Each thread has its own current CUDA device, and a new thread starts with GPU 0.
Its first CUDA call, such as a wait for an event, would create a context of about 0.5 GB on GPU 0. Every rank
of the node would do that, and rank 0 would run out of memory. So this module starts all threads of the
runtime. The pool in ``cuda_ops.host`` is an exception: it makes no CUDA calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

_device: torch.device | None = None


def choose_device(device: torch.device) -> None:
    """Make a GPU the device of the calling thread, and of all threads that are started here afterwards."""
    global _device
    torch.cuda.set_device(device)
    _device = device


def use_device() -> None:
    """Choose this rank's GPU in the calling thread, if the rank has one."""
    # A device that has failed refuses this call, too. The thread's work then meets the error, and reports it.
    with suppress(RuntimeError):
        if _device is not None:
            torch.cuda.set_device(_device)


def make_thread(work: Callable[[], object], name: str, *, daemon: bool = False) -> threading.Thread:
    """Return a thread, not yet started, that runs ``work`` on this rank's device.

    Args:
        daemon: Whether the interpreter ends without waiting for it.
    """

    def run() -> None:
        use_device()
        work()

    return threading.Thread(target=run, name=name, daemon=daemon)


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads that work on this rank's device; their names begin with ``name``."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=use_device)
