"""Notices ranks that train on the same batch, and batches that come again after a resume.

Note [Batch numbers]
    Each training pass makes a number of a part of its inputs, where they are. The numbers of a step's
    micro-batches are combined into one of 40 bits, in which 0 means unknown: a pass had no tensors, or
    something else that may differ, such as a sparse tensor or an object of the script. It travels in the
    all-reduce that every step makes, in two ways. The sum over the data-parallel ranks, which float64 adds
    exactly for up to 1,024 of them, identifies the step's global batch; the last 65,536 sums are saved in
    checkpoints. In some steps, each rank also writes its number into one element of a vector of zeros. The
    sum of these vectors has the numbers of all ranks.

    All ranks send as many numbers, so what is sent depends on the count of steps alone, not on what a rank
    has found. A step whose numbers are still on their way from the device is looked at later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .device import HostCopy, keep_for_stream
from .fingerprint import FACTOR, sampled_fingerprint
from .log import warn
from .mesh import MeshShape

_EQUAL_STEPS = 3
"""Steps in a row that are reported: fewer may be a coincidence of small batches."""
_FIRST_STEPS = 20
_EVERY_STEPS = 100
"""Ranks are compared in the first steps, and in the first few of every hundred."""
_TENSORS = 8
_READABLE = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes of which torch can take elements."""
_BITS = 40
_KEPT = 1 << 16
_ADVICE = (
    "Iterate over engine.dataloader(loader), or use a DistributedSampler with "
    "num_replicas=engine.data_parallel_size and rank=engine.data_parallel_rank"
)


class _Step(NamedTuple):
    """A step whose numbers may still be on their way to the host."""

    number: int
    is_shared_out: bool
    copy: HostCopy


class BatchWatch:
    """Collects the numbers of this rank's batches; see Note [Batch numbers]."""

    def __init__(self, device: torch.device, *, rank: int, mesh: MeshShape) -> None:
        self._device = device
        self._rank = rank
        self._places = mesh.samples
        self._place = mesh.sample_position(rank)
        # Ranks of a tensor, sequence or pipeline group have one batch: the first of them counts.
        first = next(other for other in range(mesh.ranks) if mesh.sample_position(other) == self._place)
        self._counts = rank == first
        self._number: Tensor | None = None
        self._is_unknown = False
        self._steps = 0
        self._coming: deque[_Step] = deque()
        self._equal: dict[tuple[int, ...], int] = {}
        """Counts, by data-parallel ranks, the steps in a row in which they had the same batch."""
        self._last_shown: list[int] = []
        self._has_warned_of_ranks = False
        self._history: deque[int] = deque(maxlen=_KEPT)
        self._last_step = 0
        self._before: dict[tuple[int, ...], int] = {}
        """Maps the numbers of steps in a row before a resume to the first of these steps."""
        self._since: list[int] = []
        """Collects the numbers of the first steps after a resume."""

    # -- a step

    def note(self, inputs: Any) -> None:
        """Take the inputs of a training pass of the model."""
        leaves = tree_leaves(inputs)
        if any(not _is_seen(leaf) for leaf in leaves):
            self._is_unknown = True
            return
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        if tensors and not self._is_unknown:
            tensors.sort(key=Tensor.numel, reverse=True)
            number = sampled_fingerprint(tensors[:_TENSORS], self._device)
            self._number = number if self._number is None else self._number * FACTOR + number

    def clear(self) -> None:
        """Forget the passes since the last step."""
        self._number = None
        self._is_unknown = False

    def numbers(self) -> Tensor:
        """Return what the step sums over all ranks, (n,) in float64 on the device."""
        if self._number is None or self._is_unknown or not self._counts:
            own = torch.zeros((), dtype=torch.float64, device=self._device)
        else:
            number = keep_for_stream(self._number)
            own = (number >> (63 - _BITS) & ((1 << _BITS) - 1)).clamp(min=1).double()
        if not self._shows_ranks:
            return own.reshape(1)
        places = torch.zeros(self._places, dtype=torch.float64, device=self._device)
        places[self._place] = own
        return torch.cat([own.reshape(1), places])

    def take(self, sums: Sequence[float] | Tensor, step: int, *, is_shared_out: bool) -> None:
        """Take the sums of step ``step``, where they are. ``is_shared_out``: the batches come from a loader
        of the engine. It repeats samples only if there are too few for all ranks, and resumes.
        """
        self._coming.append(_Step(step, is_shared_out, HostCopy(sums)))
        self._steps += 1
        self.clear()
        while self._coming and self._has_first_arrived:
            self._look()

    @property
    def _has_first_arrived(self) -> bool:
        """Return whether the host has the numbers of the oldest step. On a GPU the copy of the newest one has
        just been queued, so this does not ask for it.
        """
        copy = self._coming[0].copy
        return copy.is_done or (len(self._coming) > 1 and copy.has_arrived)

    @property
    def _shows_ranks(self) -> bool:
        is_due = self._steps < _FIRST_STEPS or self._steps % _EVERY_STEPS < _EQUAL_STEPS
        return self._places > 1 and is_due

    # -- what has arrived

    def _look(self) -> None:
        oldest = self._coming.popleft()
        step = oldest.number
        is_shared_out = oldest.is_shared_out
        numbers = [int(number) for number in oldest.copy.read()]
        total = numbers[0]
        shown = numbers[1:]
        if self._before:
            self._look_back(step, 0 if is_shared_out else total)
        self._history.append(total)
        self._last_step = step
        if shown:
            self._compare_ranks(step, [0] * len(shown) if is_shared_out else shown)

    def _compare_ranks(self, step: int, shown: list[int]) -> None:
        """Count the steps in which ranks have had the same batch, another one in each step; warn once."""
        groups: dict[int, list[int]] = {}
        for place, number in enumerate(shown):
            # what stays the same in all steps is no batch, such as the points of a fixed grid
            if number and (not self._last_shown or number != self._last_shown[place]):
                groups.setdefault(number, []).append(place)
        self._last_shown = shown
        same = [tuple(places) for places in groups.values() if len(places) > 1]
        self._equal = {places: self._equal.get(places, 0) + 1 for places in same}
        for places, count in self._equal.items():
            if count >= _EQUAL_STEPS and not self._has_warned_of_ranks:
                self._has_warned_of_ranks = True
                if self._rank == 0:
                    warn(
                        f"data-parallel ranks {_listed(places)} trained on the same batch in the "
                        f"{_EQUAL_STEPS} steps up to step {step}. {_ADVICE}"
                    )

    def _look_back(self, step: int, total: int) -> None:
        """Warn where the first steps after a resume repeat earlier ones."""
        self._since.append(total)
        if len(self._since) < _EQUAL_STEPS:
            return
        first = self._before.get(tuple(self._since))
        self._before = {}
        if first is not None and self._rank == 0:
            warn(
                f"steps {step - _EQUAL_STEPS + 1} to {step} trained on the batches of steps {first} to "
                f"{first + _EQUAL_STEPS - 1} again, which came before the resume. Unless an epoch begins "
                "here in the same order, the data restarted: iterate over engine.dataloader(loader), whose "
                "position checkpoints store, or skip the batches of the steps that were made"
            )

    # -- checkpoints

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps, None for nothing; waits for numbers that are on their way."""
        while self._coming:
            self._look()
        if not self._history:
            return None
        return {"last_step": self._last_step, "sums": torch.tensor(list(self._history), dtype=torch.int64)}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Take what :meth:`state` returned, in an earlier run; None for nothing."""
        self.clear()
        self._coming.clear()
        self._history.clear()
        self._before = {}
        self._since = []
        if state is None:
            return
        sums = state["sums"].tolist()
        self._history.extend(sums)
        self._last_step = state["last_step"]
        first = self._last_step - len(sums) + 1
        for index in range(len(sums) - _EQUAL_STEPS + 1):
            several = tuple(sums[index : index + _EQUAL_STEPS])
            if several in self._before:  # its epochs have one order: batches come again without any resume
                self._before = {}
                return
            if all(several):
                self._before[several] = first + index


def _is_seen(leaf: Any) -> bool:
    """Return whether what differs between two inputs is seen: in tensors whose bits can be read. Numbers and
    None are settings of the model.
    """
    if leaf is None or isinstance(leaf, (bool, int, float)):
        return True
    if isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        return False  # its bits must not leave the transformation
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_nested
    return is_plain and not leaf.is_quantized and not leaf.is_meta and leaf.dtype in _READABLE


def _listed(places: Sequence[int]) -> str:
    return f"{', '.join(map(str, places[:-1]))} and {places[-1]}"
