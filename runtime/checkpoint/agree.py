"""Makes an error of one rank an error of all.

Note [All or none]. A phase of a save or a load is collective: a rank that raised its own error would leave
the other ranks waiting for the next collective. Each phase therefore ends with an exchange of errors
(``all_or_none``), and all ranks raise the text of the first one. A phase that may fail contains no other
collective, and what the other ranks must not do after a failure comes after its exchange.
"""

from __future__ import annotations

import errno
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Exchange, Pending, Work, exchange_objects, waits
from .format.tensor_file import CheckpointError

# -- all or none ------------------------------------------------------------------------------------


def all_or_none(exchange: Exchange, rank: int, action: Callable[[], Any], *, own: bool = False) -> Any:
    """Run ``action`` on each rank; return every rank's result, or with ``own`` this rank's alone. Collective.

    ``action`` must not be collective itself: see Note [All or none]. Raises CheckpointError, with one text on
    all ranks, if it failed anywhere.
    """
    result = None
    problem = None
    try:
        result = action()
    except OSError as error:
        problem = f"rank {rank}: {_text(error)}"
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # the others wait; whatever it is, they have to hear of it
        problem = f"rank {rank}: {type(error).__name__}: {error}"
    try:
        answers = exchange((None if own else result, problem))
    except RuntimeError as error:  # what torch raises when a connection breaks
        raise CheckpointError(f"another rank failed during the checkpoint: {error}") from None
    problems = [text for _, text in answers if text]
    if problems:
        raise CheckpointError(problems[0])
    return result if own else [answer for answer, _ in answers]


def _text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on the disk: free space, or save to another folder"
    return f"{where}{error.strerror or error}"


# -- host channel -----------------------------------------------------------------------------------
#
# Exchanges messages between the hosts of the ranks, beside all other collectives.


_TIMEOUT = timedelta(hours=12)
"""Limits an exchange: one rank may write to a slow disk for long while the others wait."""


class HostChannel:
    """Runs small collectives over a separate gloo group, whatever the device is; any thread may use it."""

    def __init__(self, comm: Comm) -> None:
        """Make the group. Collective."""
        self._world_size = comm.world_size
        self._number = comm.number
        self._group: Any = None
        if self._world_size > 1:
            # A separate group: a thread's exchanges may start between any two collectives of training, at
            # another place on each rank.
            self._group = comm.new_group(range(self._world_size), backend="gloo", timeout=_TIMEOUT)

    def exchange(self, value: object) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order."""
        key = waits.next_key(self._number, "host")
        return exchange_objects(
            value, self._world_size, self._group, key, "agrees in the background", over_gloo=True
        )

    def send(self, piece: Tensor, rank: int) -> Pending:
        """Begin to send a tensor of the host to another rank, which begins to receive it."""
        work = dist.isend(piece, dist.get_global_rank(self._group, rank), group=self._group)
        return Work(work, waits.next_key(self._number, "host"), "sends in the background", piece)

    def receive(self, piece: Tensor, rank: int) -> Pending:
        """Begin to fill a tensor of the host with what another rank sends."""
        work = dist.irecv(piece, dist.get_global_rank(self._group, rank), group=self._group)
        return Work(work, waits.next_key(self._number, "host"), "receives in the background", piece)

    def any(self, *flags: bool) -> list[bool]:
        """Tell for each flag whether it is set on any rank."""
        return [any(column) for column in zip(*self.exchange(flags), strict=True)]


# -- rng state --------------------------------------------------------------------------------------
#
# Captures and restores the random number generators that training draws from.


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, numpy's (where it is in use) and torch's generators, of the CPU and of
    ``device``: plain values and tensors.
    """
    version, words, gauss = random.getstate()
    # A tensor, because the manifest would have a line for each of the 625 words.
    python = (version, torch.tensor(words, dtype=torch.int64), gauss)
    found: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        # The file format has no uint32.
        keys = torch.from_numpy(keys.view("int32").copy())
        found["numpy"] = (str(kind), keys, int(position), int(has_gauss), float(cached))
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`capture` has returned, as far as this process has such generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().view("uint32"), position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
