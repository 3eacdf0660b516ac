"""Copies what a script writes into parameters between two steps back to the master values.

Where the optimizer's master values are not the memory that the model reads (16-bit training, offloaded
state), the next step would undo a change in place (weight clipping, an averaged model). Writing through
autograd's view of a parameter moves its version counter; ``parameter.data`` does not, so reading that marks
the unit.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from .ownership import Owner
from .store import Access, ShardStore, ValueStore, open_all, take_changed


class WrittenUnit(Owner, Protocol):
    """Describes a unit whose parameters may be written to."""

    name: str
    parameters: list[nn.Parameter]
    full: Tensor
    start: int
    stop: int
    shard_params: bool
    is_rounded: bool
    store: ShardStore | None
    values: ValueStore

    def own_part(self) -> Tensor:
        """Return this rank's slice of the flat buffer."""

    def references(self) -> int:
        """Count the tensors on the flat buffer's memory."""


class Writes:
    """Notices that a unit's parameters may have been written to since :meth:`forget`."""

    def __init__(self, unit: WrittenUnit) -> None:
        self._unit = unit
        self._exposed = False
        self._versions = self._references = 0
        self._rounded: Tensor | None = None
        """Keeps this rank's slice of a unit that was rounded on its way, as it has arrived."""
        self._each: list[int] = []
        """Keeps each parameter's version when a sharded unit was gathered."""

    @property
    def matter(self) -> bool:
        """Tell whether writes have to be copied to the masters, which are separate memory."""
        store = self._unit.store
        if store is None or self._unit.shard_params:
            return False
        return (
            store.master is None or store.master.data_ptr() != self._unit.full[self._unit.start :].data_ptr()
        )

    def expose(self) -> None:
        """Note that ``data`` of a parameter has been handed out: later changes of it leave no trace."""
        if self._unit.is_rounded and not self._exposed:
            self._rounded = self._unit.own_part().clone()
        self._exposed = True

    def forget(self) -> None:
        """Note that the masters agree with the parameters."""
        if self._unit.shard_params:
            self.arrive()
        elif self.matter:
            self._versions = self._count()
            references = self._unit.references()
            self._references = self._references or references
            # a script that still holds such a tensor may write to it once more
            self._exposed = self._exposed and references > self._references

    def arrive(self) -> None:
        """Note that the unit has been gathered: what is written from now on is lost when it is resharded."""
        if self._unit.shard_params:
            self._exposed, self._rounded = False, None
            self._each = [parameter._version for parameter in self._unit.parameters]

    def find_lost(self) -> str | None:
        """Return the name of what is lost if the unit is resharded now; None if nothing was written."""
        unit = self._unit
        if unit.provisional:
            return None
        for parameter, name, before in zip(unit.parameters, unit.names, self._each, strict=False):
            if parameter._version != before:
                return name
        arrived = unit.values.tensor if self._rounded is None else self._rounded
        if not self._exposed or arrived is None:
            return None
        unit.values.flush()
        own = unit.own_part()
        return None if torch.equal(arrived.to(own.device, own.dtype), own) else unit.name

    def stepped(self) -> None:
        """Note that the engine has moved every version counter by one."""
        self._versions += len(self._unit.parameters)
        self._each = [version + 1 for version in self._each]

    def _count(self) -> int:
        return sum(parameter._version for parameter in self._unit.parameters)

    def bring(self) -> None:
        """Copy every element that is not its master's rounding to the masters. Raises DiskError."""
        unit = self._unit
        if not self.matter or not (self._exposed or self._count() != self._versions):
            return
        assert unit.store is not None
        own = unit.full[unit.start : unit.stop]
        with torch.no_grad(), open_all(unit.store, Access.MASTER) as tiles:
            for _, _, tile in tiles:
                take_changed(tile.master, own[tile.start : tile.stop])
        self.forget()
