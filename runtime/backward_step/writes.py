"""Notices what a script writes into parameters whose masters a backward pass has stepped already."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..zero.external_writes import Writes
from ..zero.store import Access, open_all
from ..zero.unit import Unit


class WritesBesideStep(Writes):
    """Brings writes to the masters, but refuses those between a pass and the end of its step."""

    _ahead = False
    """Tells that the masters have been stepped, and the parameters not yet."""
    _before: Tensor | None = None
    """Keeps the values of an exposed unit whose masters are ahead."""

    @classmethod
    def of(cls, unit: Unit) -> WritesBesideStep:
        """Return those of a unit, which has them from now on."""
        if not isinstance(unit.writes, cls):
            made = cls(unit)
            made.__dict__.update(unit.writes.__dict__)
            unit.writes = made
        assert isinstance(unit.writes, cls)
        return unit.writes

    def step_ahead(self) -> None:
        """Note that the masters are stepped now, before the parameters: until the next :meth:`bring` nothing
        can be copied to them.
        """
        self._ahead = self.matter
        if self._ahead and self._exposed:
            self._before = self._unit.full.clone()

    def expose(self) -> None:
        super().expose()
        if self._ahead and self._before is None:
            self._before = self._unit.full.clone()

    def forget(self) -> None:
        super().forget()
        self._ahead, self._before = False, None

    def bring(self) -> None:
        """Copy changed elements to the masters. Raises DiskError, and OptimizerError for what was written
        after :meth:`step_ahead`.
        """
        if not self._ahead:
            super().bring()
            return
        if self._count() != self._versions or (self._before is not None and not self._is_untouched()):
            raise OptimizerError(
                f"a parameter of {self._unit.name} was changed between the backward pass and engine.step(), "
                "after zero_optimization.step_in_backward had stepped it. Change parameters after "
                "engine.step(), and load the last checkpoint"
            )
        self._ahead, self._before = False, None

    def _is_untouched(self) -> bool:
        """Tell whether an exposed unit has what the step leaves: this rank's part is its masters' rounding,
        stepped or not, and the others' parts are as they were.
        """
        unit, before = self._unit, self._before
        assert before is not None and unit.store is not None
        others = (slice(0, unit.start), slice(unit.stop, None))
        if not all(torch.equal(before[part], unit.full[part]) for part in others):
            return False
        own = unit.full[unit.start : unit.stop]
        with torch.no_grad(), open_all(unit.store, Access.MASTER) as tiles:
            return all(
                bool((tile.master.to(own.dtype) == own[tile.start : tile.stop]).all()) for _, _, tile in tiles
            )
