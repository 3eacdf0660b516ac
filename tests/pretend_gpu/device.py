"""Put the pretended GPU in the place of torch.cuda and NCCL. Before zlaunch.runtime is imported."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import threads
from .clocks import clocks, lock
from .memory import (
    allocated,
    block_of,
    blocks,
    is_on_device,
    launch,
    locked,
    resized,
    touch_bytes,
    without_modes,
)
from .modes import move, pretending
from .streams import (
    DEFAULT,
    Event,
    Stream,
    current_device,
    current_stream,
    note_device,
    place,
    set_device,
    synchronize,
    use,
)

FREE_BYTES, TOTAL_BYTES = 64 << 30, 80 << 30
_nccl: dict[Any, Stream] = {}


def install() -> None:
    """Make this process one with a GPU; code sees it inside of ``modes.running()``. Once is enough."""
    cuda: Any = torch.cuda
    if cuda.Stream is Stream:
        return
    os.environ["ZLAUNCH_KERNELS"] = "torch"  # the twins: CuPy needs a device
    torch.set_num_threads(1)
    threads.install()
    _install_cuda()
    _install_memory()
    _install_files()
    _install_autograd()
    _install_collectives()


def _on_own(function: Callable[[], Any]) -> Callable[..., Any]:
    """Answer for this process's GPU."""

    def call(device: Any = None) -> Any:
        note_device(device)
        return function()

    return call


class _Runtime:
    """The CUDA runtime's calls that lock memory."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        note_device()
        locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del locked[address]
        return 0


def _install_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, use
    cuda.current_stream = current_stream
    cuda.default_stream = _on_own(lambda: DEFAULT)
    cuda.synchronize = synchronize
    cuda.is_available = lambda: True
    cuda.device_count = lambda: place.count
    cuda.set_device = set_device
    cuda.current_device = current_device
    cuda.is_current_stream_capturing = lambda: False
    cuda.mem_get_info = _on_own(lambda: (FREE_BYTES, TOTAL_BYTES))
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_device_name = _on_own(lambda: "a pretended GPU")
    cuda.memory_reserved = cuda.memory_allocated = cuda.max_memory_allocated = _on_own(allocated)
    cuda.get_rng_state = _on_own(lambda: torch.zeros(16, dtype=torch.uint8))
    cuda.set_rng_state = lambda state, device=None: note_device(device)
    cuda.manual_seed = lambda seed: note_device()
    cuda.set_sync_debug_mode = lambda mode: None
    cuda.cudart = _Runtime
    torch.nn.Module.cuda = (  # type: ignore[method-assign]
        lambda self, device=None: self._apply(lambda tensor: move(tensor, True))
    )


def _install_memory() -> None:
    def record_stream(self: Tensor, stream: Any) -> None:
        block_of(self).users.add(stream.actor)

    plain = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, nbytes: int) -> Any:
        resized(self, nbytes)
        return plain(self, nbytes)

    def device_of(storage: torch.UntypedStorage) -> torch.device:
        block = blocks.get(storage._cdata)
        return place.device if block is not None and block.on_device else torch.device("cpu")

    torch.UntypedStorage.device = property(device_of)  # type: ignore[assignment]
    Tensor.record_stream = record_stream  # type: ignore[assignment, method-assign]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]


def _install_files() -> None:
    """Reads and writes of files touch the memory that torch's tensors have."""
    system: Any = os

    def noting(real: Callable[..., int], *, fills: bool) -> Callable[..., int]:
        def call(fd: int, buffers: Sequence[Any], offset: int) -> int:
            for buffer in buffers:
                address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                touch_bytes(real.__name__, address, len(buffer), writes=fills)
            return real(fd, buffers, offset)

        return call

    system.preadv, system.pwritev = noting(os.preadv, fills=True), noting(os.pwritev, fills=False)
    pwrite = os.pwrite

    def noting_pwrite(fd: int, data: Any, offset: int) -> int:
        touch_bytes("pwrite", np.frombuffer(data, np.uint8).ctypes.data, len(data), writes=False)
        return pwrite(fd, data, offset)

    system.pwrite = noting_pwrite


def _install_autograd() -> None:
    """Python that C++ calls inside of a backward pass sees the GPU too."""
    engine: Any = torch.autograd
    plain = engine._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with pretending():
            return plain(*args, **kwargs)

    engine._engine_run_backward = run
    engine.graph._engine_run_backward = run
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    init = hooks.__init__

    def inside(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(function)  # the runtime looks whose hooks are active
        def call(value: Any) -> Any:
            with pretending():
                return function(value)

        return call

    def with_pretence(self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        init(self, inside(pack), inside(unpack))

    hooks.__init__ = with_pretence


# -- NCCL: gloo does the work; a stream for each group has the order


class _Work:
    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self, timeout: Any = None) -> None:
        current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return False


@contextmanager
def _plain() -> Iterator[None]:
    with without_modes(), _disable_current_modes():
        yield


def _collective(
    name: str, real: Callable[..., Any], touched: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]
) -> Callable[..., Any]:
    def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        reads, writes = touched(*args)
        if not all(map(is_on_device, (*reads, *writes))):
            with _plain():
                return real(*args, group=group, async_op=async_op, **kwargs)
        stream = _nccl.setdefault(group, Stream())
        stream.wait_stream(current_stream())
        with _plain():
            real(*args, group=group, **kwargs)
        launch(name, list(reads), list(writes), stream.actor)
        event = Event()
        with lock:
            event.clock = dict(clocks[stream.actor])
        if async_op:
            return _Work(event)
        current_stream().wait_event(event)
        return None

    return call


class Transfer(_Work):
    """Waits for a send or receive. gloo moves the bytes while the host continues, as NCCL does."""

    def __init__(self, event: Event, real: Any) -> None:
        super().__init__(event)
        self._real = real

    def wait(self, timeout: Any = None) -> None:
        with _plain():
            self._real.wait()
        self.wait_on_stream()

    def wait_on_stream(self) -> None:
        """Have the current stream wait."""
        super().wait()


def _transfer(name: str, real: Callable[..., Any], *, fills: bool) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        on_device = is_on_device(tensor)
        with _plain():
            work = real(tensor, *args, group=group, **kwargs)
        if not on_device:
            return work
        # NCCL has a stream for each pair of ranks. One for each direction orders less: what is in order here
        # is in order there.
        stream = _nccl.setdefault((group, name), Stream())
        stream.wait_stream(current_stream())
        launch(name, [] if fills else [tensor], [tensor] if fills else [], stream.actor)
        event = Event()
        with lock:
            event.clock = dict(clocks[stream.actor])
        return Transfer(event, work)

    return call


def _install_transfers() -> None:
    torch_dist: Any = dist
    c10d: Any = dist.distributed_c10d
    for name, fills in (("isend", False), ("irecv", True)):
        call = _transfer(name, getattr(dist, name), fills=fills)
        setattr(dist, name, call)
        setattr(c10d, name, call)  # P2POp compares with these

    def batch(operations: Sequence[Any]) -> list[Any]:
        return [each.op(each.tensor, each.peer, group=each.group, tag=each.tag) for each in operations]

    def blocking(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            getattr(dist, name)(*args, **kwargs).wait()

        return call

    torch_dist.batch_isend_irecv = batch
    torch_dist.send = blocking("isend")
    torch_dist.recv = blocking("irecv")


_sum_over_ranks = dist.all_reduce


def _reduce_scatter(shard: Tensor, bucket: Tensor, *, group: Any = None) -> None:
    total = bucket.clone()
    _sum_over_ranks(total, group=group)
    shard.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def _install_collectives() -> None:
    torch_dist: Any = dist
    _install_transfers()
    init = dist.init_process_group
    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            gather = _collective(name, getattr(dist, name), lambda full, own: ([own], [full]))
            setattr(dist, name, gather)
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, _collective(name, _reduce_scatter, lambda shard, bucket: ([bucket], [shard])))
    gather_list = _collective("all_gather", dist.all_gather, lambda parts, own: ([own], parts))
    torch_dist.all_gather = gather_list
    exchange = _collective(
        "all_to_all_single", dist.all_to_all_single, lambda found, rows, *sizes: ([rows], [found])
    )
    torch_dist.all_to_all_single = exchange
    for name, real in (("all_reduce", _sum_over_ranks), ("broadcast", dist.broadcast)):
        setattr(dist, name, _collective(name, real, lambda tensor, *rest: ([tensor], [tensor])))

    def init_process_group(backend: Any = None, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init("gloo", **kwargs)

    torch_dist.init_process_group = init_process_group
