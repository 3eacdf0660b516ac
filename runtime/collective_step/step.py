"""Runs the whole optimizer step of all units at once, where ranks have to work together in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.pending import Pending
from ..optim.slices import ShardSlice
from ..optim.update_rule import State, UpdateRule
from ..zero.store import OpenTile, TileView
from ..zero.unit import Unit
from .parts import ParameterPart, parts_of


class CollectiveStep(ABC):
    """Steps all units, on the device and off it, before it returns. It is an OffloadedStep that takes every
    unit; each of its slices belongs to one parameter.
    """

    by_parameter = True

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        """Prepare to step ``units``, which may be replaced."""
        self.units, self.comm = units, comm
        self._error: BaseException | None = None
        self._uploads: list[Pending] = []
        self._after: torch.cuda.Event | None = None

    @staticmethod
    def state_count(optimizer: torch.optim.Optimizer) -> int:
        """Count the tensors that the optimizer keeps for each element, at most."""
        return 2

    @staticmethod
    def group_states(group: Mapping[str, Any]) -> int:
        """Count the tensors that it keeps for each element of a param group."""
        return 2

    def forget(self) -> None:
        """Forget what belongs to a state that has been replaced."""

    def own_squares(self) -> list[Tensor]:
        """Return the sums of squares that make the norm, where the tiles' gradients do not."""
        return []

    def takes(self, unit: Unit) -> bool:
        """Tell whether this object steps a unit: it does."""
        return True

    def brings(self, unit: Unit) -> bool:
        """Tell whether new values come without a refresh: they do not."""
        return False

    def prepare(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Raise what keeps the step from being begun: nothing has changed then, and others may follow.

        All ranks raise or none does: one that raised alone would leave the others waiting in the step. So
        this looks at what all ranks know (groups, units, ``used``), and at its own part only to agree on it.
        """

    def start(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Do the step. Raises DiskError. Collective."""
        self.prepare(rule, slices, used)
        if self.comm.device.type == "cuda":
            self._after = torch.cuda.current_stream(self.comm.device).record_event()
        try:
            with torch.no_grad():
                self.run(rule, parts_of(slices), rule.optimizer.state)
            self.await_uploads()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._uploads.clear()

    @abstractmethod
    def run(self, rule: UpdateRule, parts: Sequence[ParameterPart], state: State) -> None:
        """Update all parts with a gradient by the groups of ``rule.optimizer``, and publish their tiles."""

    def publish(self, tile: OpenTile, view: TileView) -> None:
        """Send a tile's new values to where gathers read."""
        if view.out is not None:
            view.out.copy_(view.master)
        self._uploads.append(tile.publish(self._after))

    def await_uploads(self) -> None:
        """Let later work on the device wait for what was published."""
        for upload in self._uploads:
            upload.wait()
        self._uploads.clear()

    def check(self) -> None:
        """Raise what ended a step half-way."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Do nothing: what ended a step has been raised by it."""

    def wait(self) -> None:
        """Raise what ended a step half-way."""
        self.check()
