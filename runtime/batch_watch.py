"""Notices ranks that train on the same batch, and batches that come again after a resume.

Note [Batch numbers]
    Each training pass makes a number of its inputs, where they are. The numbers of a step's micro-batches
    are combined into one of 40 bits, in which 0 means unknown: the pass had no tensors. It travels in the
    all-reduce that every step makes, in two ways. The sum over the data-parallel ranks, which float64 adds
    exactly for up to 1,024 of them, identifies the step's global batch; the last 65,536 sums are saved in
    checkpoints. In some steps each rank also has a place of its own in a vector of zeros, whose sum shows
    everyone's number.

    All ranks send as many numbers, so what is sent depends on the count of steps alone, not on what a rank
    has found. A step whose numbers are still on their way from the device is looked at later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device import HostCopy
from .fingerprint import FACTOR, sampled_fingerprint
from .log import warn
from .mesh import MeshShape
from .zero.tensors import tensors_in

_EQUAL_STEPS = 3
"""Steps in a row that are reported: fewer may be a coincidence of small batches."""
_FIRST_STEPS = 20
_EVERY_STEPS = 100
"""Ranks are compared in the first steps, and in the first few of every hundred."""
_TENSORS = 2
_BITS = 40
_KEPT = 1 << 16
_LOOKS = 100
"""Steps after a resume that are compared with those before it."""
_ADVICE = (
    "Iterate over engine.dataloader(loader), or use a DistributedSampler with "
    "num_replicas=engine.data_parallel_size and rank=engine.data_parallel_rank"
)


class _Step(NamedTuple):
    """A step whose numbers may still be on their way to the host."""

    number: int
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
        self._steps = 0
        self._coming: deque[_Step] = deque()
        self._equal: dict[tuple[int, ...], int] = {}
        """Counts, by data-parallel ranks, the steps in a row in which they had the same batch."""
        self._last_shown: list[int] = []
        self._has_warned_of_ranks = False
        self._history: deque[int] = deque(maxlen=_KEPT)
        self._last_step = 0
        self._before: dict[int, int] = {}
        """Maps the number of each global batch before a resume to its step."""
        self._looks_left = 0
        self._repeated: list[int] = []
        """Lists the steps before the resume that the last steps have repeated, one after the other."""

    # -- a step

    def note(self, inputs: Any) -> None:
        """Take the inputs of a training pass of the model."""
        found = [each for each in tensors_in(inputs) if _is_plain(each)]
        found.sort(key=Tensor.numel, reverse=True)
        for tensor in found[:_TENSORS]:
            number = sampled_fingerprint(tensor, self._device)
            self._number = number if self._number is None else self._number * FACTOR + number

    def clear(self) -> None:
        """Forget the passes since the last step."""
        self._number = None

    def numbers(self) -> Tensor:
        """Return what the step sums over all ranks, (n,) in float64 on the device."""
        if self._number is None or not self._counts:
            own = torch.zeros((), dtype=torch.float64, device=self._device)
        else:
            own = (self._number >> (63 - _BITS) & ((1 << _BITS) - 1)).clamp(min=1).double()
        if not self._shows_ranks:
            return own.reshape(1)
        places = torch.zeros(self._places, dtype=torch.float64, device=self._device)
        places[self._place] = own
        return torch.cat([own.reshape(1), places])

    def take(self, sums: Sequence[float] | Tensor, step: int, *, is_resumable: bool) -> None:
        """Take the sums of step ``step``, where they are. ``is_resumable``: the loaders resume by themselves,
        so that no batch of an earlier step comes again by mistake.
        """
        self._coming.append(_Step(step, HostCopy(sums)))
        self._steps += 1
        self.clear()
        if is_resumable:
            self._looks_left = 0
        while self._coming and self._has_first_arrived:
            self._look()

    @property
    def _has_first_arrived(self) -> bool:
        """Whether the first step's numbers are here. A GPU has hardly begun with those of the newest step."""
        copy = self._coming[0].copy
        return copy.is_done or (len(self._coming) > 1 and copy.has_arrived)

    @property
    def _shows_ranks(self) -> bool:
        is_due = self._steps < _FIRST_STEPS or self._steps % _EVERY_STEPS < _EQUAL_STEPS
        return self._places > 1 and is_due

    # -- what has arrived

    def _look(self) -> None:
        step, copy = self._coming.popleft()
        total, *shown = map(int, copy.read())
        self._look_back(step, total)
        self._history.append(total)
        self._last_step = step
        if shown:
            self._compare_ranks(step, shown)

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
        """Warn once where the first steps after a resume repeat earlier ones, in their order."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        earlier = self._before.get(total) if total else None
        follows = self._repeated and earlier == self._repeated[-1] + 1
        self._repeated = [] if earlier is None else [*(self._repeated if follows else []), earlier]
        if len(self._repeated) < _EQUAL_STEPS:
            return
        self._looks_left = 0
        if self._rank == 0:
            warn(
                f"steps {step - _EQUAL_STEPS + 1} to {step} trained on the batches of steps "
                f"{self._repeated[0]} to {self._repeated[-1]} again, which came before the resume. Unless an "
                "epoch began here in the same order, the data restarted: iterate over "
                "engine.dataloader(loader), whose position checkpoints store, or skip the batches of the "
                "steps that were made"
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
        self._repeated = []
        self._looks_left = 0
        if state is None:
            return
        sums = state["sums"].tolist()
        self._history.extend(sums)
        self._last_step = state["last_step"]
        known = [number for number in sums if number]
        # a run whose epochs have one order repeats its batches without any resume
        if known and len(set(known)) == len(known):
            first = self._last_step - len(sums) + 1
            self._before = {number: first + index for index, number in enumerate(sums)}
            self._looks_left = _LOOKS


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the bits of a tensor can be read: not of subclasses, sparse and nested tensors."""
    is_known = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    return is_known and not tensor.is_quantized and not tensor.is_meta and tensor.numel() > 0


def _listed(places: Sequence[int]) -> str:
    return f"{', '.join(map(str, places[:-1]))} and {places[-1]}"
