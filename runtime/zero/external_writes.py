"""What a script writes into parameters between two steps, brought to the master values.

Where the optimizer's master values are apart from what the model reads (16-bit training, offloaded state), a
change in place (weight clipping, an averaged model put in) would be undone by the next step. Writing through
autograd's view of a parameter moves its version counter; ``parameter.data`` does not, so reading that marks
the unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..offload.disk_shard import take_changed

if TYPE_CHECKING:
    from .unit import Unit

_PIECE_NUMEL = 4_000_000


class Writes:
    """Notices that a unit's parameters may have been written to since :meth:`forget`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._exposed = False
        self._versions = self._references = 0
        self._each: list[int] = []
        """Each parameter's version when a sharded unit was gathered."""

    @property
    def matter(self) -> bool:
        """Whether the masters would not follow by themselves."""
        unit = self._unit
        if not unit.trainable or unit.shard_params:
            return False
        return unit.disk is not None or (
            unit.master is not None and unit.master.data_ptr() != unit.full[unit.start :].data_ptr()
        )

    def expose(self) -> None:
        """``data`` of a parameter has been handed out: later changes of it leave no trace."""
        self._exposed = True

    def forget(self) -> None:
        """The masters are what the parameters say."""
        if self._unit.shard_params:
            self.arrive()
        elif self.matter:
            self._versions = self._count()
            references = self._unit.references()
            self._references = self._references or references
            # who still holds such a tensor may write to it once more
            self._exposed = self._exposed and references > self._references

    def arrive(self) -> None:
        """The unit has been gathered: what is written from now on is lost when it is freed."""
        if self._unit.shard_params:
            self._exposed = False
            self._each = [parameter._version for parameter in self._unit.parameters]

    def find_lost(self) -> str | None:
        """Say what is lost if the unit is freed now; None if nothing was written."""
        unit = self._unit
        if unit.provisional:
            return None
        for parameter, name, before in zip(unit.parameters, unit.names, self._each, strict=False):
            if parameter._version != before:
                return name
        own = unit.own_part
        if not self._exposed or not isinstance(unit.home, torch.Tensor):
            return None
        unit.await_home()
        return None if torch.equal(unit.home.to(own.device, own.dtype), own) else unit.name

    def stepped(self) -> None:
        """The engine has moved every version counter by one."""
        self._versions += len(self._unit.parameters)
        self._each = [version + 1 for version in self._each]

    def _count(self) -> int:
        return sum(parameter._version for parameter in self._unit.parameters)

    def bring(self) -> None:
        """Let the masters have every element that differs from their own rounding. Raises DiskError."""
        unit = self._unit
        if not self.matter or not (self._exposed or self._count() != self._versions):
            return
        own = unit.full[unit.start : unit.stop]
        with torch.no_grad():
            if unit.disk is not None:
                unit.disk.take_changes(own)
            elif unit.master is not None:
                for start in range(0, own.numel(), _PIECE_NUMEL):
                    take_changed(unit.master[start : start + _PIECE_NUMEL], own[start : start + _PIECE_NUMEL])
        self.forget()
