"""The part of the engine that gives its device to somebody else for a while."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

from ..config import Effective
from ..errors import OffloadedError
from ..zero.ownership import STATES
from .manager import Offload
from .states import States


class Moving:
    """Moves an engine's states to host memory and back."""

    _effective: Effective
    _offload: Offload | None
    _states: States
    if TYPE_CHECKING:  # the engine's

        def _check_alive(self) -> None: ...

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until :meth:`reload_states`, so that something else (inference) can have
        the device's memory.

        ``include`` has some of ``optim_states``, ``hp_params`` (the fp32 masters), ``lp_params`` (what the
        model computes with), ``lp_grads`` and ``contiguous_grad_buffer``; None is all of them. At stage 3,
        and in fp32 training, masters and parameters are one memory, which leaves when both are named.
        Further calls move further states.
        A forward pass needs ``lp_params``, a backward pass ``lp_grads`` too, a step or a checkpoint
        everything: each raises OffloadedError until the states are back. Buffers of modules stay.

        With ``non_blocking`` copies to page-locked memory (``pin_memory``) go on behind what comes next; the
        host memory is kept for the next time. Collective, between two passes. Raises OffloadedError where
        the config offloads already, ValueError for other names or devices.
        """
        self._check_alive()
        names = _names(include)
        where = getattr(device, "value", getattr(device, "type", device))  # an enum, a torch.device or a name
        if where != "cpu":
            raise ValueError(f'engine.offload_states(device={where!r}): states can be moved to "cpu" alone')
        zero = self._effective.config.zero_optimization
        for key in ("offload_optimizer", "offload_param"):
            section = getattr(zero, key)
            if section is not None and section.device != "none":
                raise OffloadedError(
                    f"engine.offload_states() cannot be used with zero_optimization.{key}: those states rest "
                    f"off the device (device {section.device}) as it is. Leave one of the two out"
                )
        self._states.offload(names, pin=bool(pin_memory), non_blocking=bool(non_blocking))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` has moved, to the bit; nothing to do where nothing is away.
        With ``non_blocking`` the host does not wait for the copies, the device's work that follows does.

        Raises torch.OutOfMemoryError where the device has not room enough; call it again when it has.
        """
        self._check_alive()
        self._states.reload(non_blocking=bool(non_blocking))


def _names(include: Container[Any] | None) -> set[str]:
    """Return the states that ``include`` has. Raises ValueError for anything else in it."""
    if include is None:
        return set(STATES)
    known = ", ".join(STATES)
    if isinstance(include, str):
        raise ValueError(f"engine.offload_states(include=...) takes a list of names of states: {known}")
    if isinstance(include, Iterable):
        include = list(include)  # an iterator can be gone through once
    elif not hasattr(include, "__contains__"):
        raise ValueError(
            f"engine.offload_states(include={include!r}): takes a list of names of states: {known}"
        )
    unknown = [each for each in include if each not in STATES] if isinstance(include, list) else []
    if unknown:
        raise ValueError(f"engine.offload_states(include=...): {unknown[0]!r} is not one of {known}")
    return {name for name in STATES if name in include}
