"""``deepspeed.comm``: ``torch.distributed`` with DeepSpeed's names and extra keywords."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    batch_isend_irecv,
    get_backend,
    get_rank,
    get_world_size,
    is_available,
    is_initialized,
    new_group,
)

from zlaunch.compat.deepspeed.missing import missing_function
from zlaunch.errors import ZlaunchError
from zlaunch.runtime.arguments import require_process_group
from zlaunch.runtime.comm.process_group import close_all
from zlaunch.runtime.comm.process_group import init_distributed as _init
from zlaunch.runtime.config.schema import OPERATIONS
from zlaunch.runtime.environment import read_environment
from zlaunch.runtime.observe.comms_logger import (
    CommsLogger,
    LoggedOperation,
    count_operations,
    log_summary,
    newest_log,
    reset_log,
    timed_event,
)

# -- logged calls -----------------------------------------------------------------------------------
#
# Logs a script's own calls of ``deepspeed.comm`` into the newest engine's table of collectives.


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
        self._work = work
        self._log = log
        self._operation = operation
        self._before = before
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


# -- mpi --------------------------------------------------------------------------------------------
#
# Take a rank's place from mpirun or mpiexec where nobody has set torch's variables.


_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
_MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def discover(port: int) -> None:
    """Set RANK and its like, MASTER_ADDR and MASTER_PORT from the variables of Open MPI or MPICH.

    They do not say where rank 0 is: with several nodes MASTER_ADDR has to be set. Raises ZlaunchError.
    """
    if dist.is_initialized() or "RANK" in os.environ:
        return
    for names in (_OPEN_MPI, _MPICH):
        found = dict(zip(_TORCH, (os.environ.get(name, "") for name in names), strict=True))
        if not all(found.values()) or found["WORLD_SIZE"] == "1":
            continue
        if found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if not os.environ.get("MASTER_ADDR"):
            raise ZlaunchError(
                f"MPI gives no address of rank 0 (this is rank {found['RANK']} of {found['WORLD_SIZE']}): "
                "set MASTER_ADDR to the name or address of its node on every rank"
            )
        os.environ.setdefault("MASTER_PORT", str(port))
        os.environ.update(found)
        return


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE and the like from MPI's variables, unless RANK is set."""
    discover(distributed_port)


# -- collectives ------------------------------------------------------------------------------------


_EXTRA = ("prof", "log_name", "debug")


def _plain(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """Wrap torch's function, deaf to the arguments that DeepSpeed's takes for its logs, by place or by name.

    ``names``: those of its arguments that have another name in DeepSpeed, with torch's.
    """
    known = logged(function)
    # group_src and group_dst stand where DeepSpeed's functions have their logs'
    most = sum(not name.startswith("group_") for name in inspect.signature(function).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {names.get(name, name): value for name, value in kwargs.items() if name not in _EXTRA}
        return known(args[:most], given, prof=bool(kwargs.get("prof")))

    call.__name__ = function.__name__
    call.__doc__ = f"``torch.distributed.{function.__name__}``."
    return call


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Set up torch.distributed from the environment, that of MPI included, or from these arguments, once; a
    lone process without an environment is a world of one. With ``dist_init_required=False``, raise ValueError
    where that has not been done.
    """
    require_process_group(dist_init_required, "init_distributed")
    if auto_mpi_discovery:
        discover(distributed_port)
    if not dist.is_initialized() and (init_method is not None or (rank >= 0 and world_size > 0)):
        device = torch.cuda.is_available() and dist_backend != "gloo"
        environment = read_environment()
        if device:
            torch.cuda.set_device(environment.local_rank % torch.cuda.device_count())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device else "gloo",
            init_method=init_method,
            rank=rank if rank >= 0 else environment.rank,
            world_size=world_size if world_size > 0 else environment.world_size,
            timeout=timeout,
        )
    _init(dist_backend, timeout=timeout)


def get_local_rank() -> int:
    """Return this rank's number on its node."""
    return read_environment().local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank of a group's member."""
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """List the ranks of a group."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def destroy_process_group(group: Any = None) -> None:
    """Call ``torch.distributed.destroy_process_group``; it ends all groups without an argument."""
    if group is not None:
        dist.destroy_process_group(group)
    else:
        close_all()


class _All:
    """Several operations under way."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait until all operations have ended."""
        for handle in self._handles:
            handle.wait()


def _finish(handles: list[Any], async_op: bool) -> _All | None:
    together = _All(handles)
    if async_op:
        return together
    together.wait()
    return None


def all_reduce_coalesced(
    tensors: list[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _All | None:
    """All-reduce each of the tensors."""
    return _finish([all_reduce(t, op=op, group=group, async_op=True) for t in tensors], async_op)


def all_gather_coalesced(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: Any = None, async_op: bool = False
) -> _All | None:
    """All-gather each of the tensors."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _finish(
        [all_gather_into_tensor(output, t, group=group, async_op=True) for output, t in pairs], async_op
    )


def has_all_gather_into_tensor() -> bool:
    """Tell whether torch has the function: every supported one has."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor
all_gather = _plain(dist.all_gather)
all_gather_into_tensor = _plain(dist.all_gather_into_tensor, tensor="input_tensor")
allgather_fn = all_gather_into_tensor
all_gather_object = _plain(dist.all_gather_object)
all_reduce = _plain(dist.all_reduce)
inference_all_reduce = all_reduce
all_to_all = _plain(dist.all_to_all)
all_to_all_single = _plain(dist.all_to_all_single, tensor="input")
barrier = _plain(dist.barrier)
broadcast = _plain(dist.broadcast)
broadcast_object_list = _plain(dist.broadcast_object_list)
gather = _plain(dist.gather)
gather_object = _plain(dist.gather_object)
irecv = _plain(dist.irecv)
isend = _plain(dist.isend)
monitored_barrier = _plain(dist.monitored_barrier)
recv = _plain(dist.recv)
reduce = _plain(dist.reduce)
reduce_scatter = _plain(dist.reduce_scatter)
reduce_scatter_tensor = _plain(dist.reduce_scatter_tensor, output_tensor="output", tensor="input")
reduce_scatter_fn = reduce_scatter_tensor
scatter = _plain(dist.scatter)
send = _plain(dist.send)
configure = missing_function("comm.configure", "use the section comms_logger of the config")
get_comm_operation_count = count_operations
initialize_mesh_device = missing_function("comm.initialize_mesh_device", "use torch.distributed.device_mesh")

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_all_ranks_from_group",
    "get_backend",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
    """Average tensors over the ranks of a group in one collective, and return this rank's shares, flat.

    Of a tensor with ``n`` elements each rank gets ``ceil(n / ranks)``, the last ones fewer or none. The
    tensors, which have one dtype, are left as they are. Raises ValueError on a rank outside the group.
    """
    tensors = list(tensors)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("reduce_scatter_coalesced: this rank is not in the group")
    if not tensors:
        return []
    ranks = dist.get_world_size(group)
    sizes = [math.ceil(tensor.numel() / ranks) for tensor in tensors]
    rows = []
    for tensor, size in zip(tensors, sizes, strict=True):
        padding = size * ranks - tensor.numel()
        rows.append(nn.functional.pad(tensor.reshape(-1), (0, padding)).view(ranks, size))
    sent = torch.cat(rows, 1).div_(ranks)
    received = sent.new_empty(sum(sizes))
    dist.reduce_scatter_tensor(received, sent.view(-1), group=group)
    shares = []
    begin = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        filled = min(size, max(0, tensor.numel() - rank * size))
        shares.append(received.narrow(0, begin, filled))
        begin += size
    return shares
