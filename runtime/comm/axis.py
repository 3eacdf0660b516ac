"""Holds the process groups of an axis of the mesh, which end with the engine's communicator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..errors import ParameterError
from .collectives import Comm


class Axis:
    """Holds the process groups of the ranks along one axis. The communicator owns it as ``comm.axes[name]``
    and closes it; a model that outlives its engine then keeps none of the groups' threads and descriptors.
    """

    name = ""
    """Names the axis, as ``parallel`` of the config does."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._groups: dict[Hashable, Any] = {}

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copy of a model computes with the same ranks

    def keep_group(self, use: Hashable, group: Any) -> None:
        """Keep a process group, or None where this rank is in none, under what it is used for."""
        self.comm.axes[self.name] = self
        self._groups[use] = group

    def has_group(self, use: Hashable) -> bool:
        """Tell whether a group, or None, is kept for a use."""
        return use in self._groups

    def group_for(self, use: Hashable) -> Any:
        """Return the group that is kept for a use. Raises ParameterError once the engine has been destroyed:
        torch would take all ranks for a group that is None.
        """
        if use not in self._groups:
            raise ParameterError(
                f"the model holds only this rank's shard (parallel.{self.name}), and its engine was "
                "destroyed: save the weights before that, then rebuild the model and load them"
            )
        return self._groups[use]

    @property
    def group(self) -> Any:
        """Return the group that the passes of the model use."""
        return self.group_for("passes")

    @property
    def is_open(self) -> bool:
        """Tell whether the engine lives."""
        return bool(self._groups)

    def close(self) -> None:
        """Let go of the groups, which have ended."""
        self._groups.clear()
