"""Lets ``state_dict`` give whole tensors, and ``load_state_dict`` take them, of a model that is cut."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..cut import Cut, cut_of


class _WholeState:
    """Replaces a module's parts in its state by whole tensors: a hook; collective for the axis."""

    def __init__(self, cuts: dict[str, Cut]) -> None:
        self._cuts = cuts

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, cut in self._cuts.items():
            if prefix + name in state:
                state[prefix + name] = cut.whole(state[prefix + name])


class _PartOfState:
    """Replaces whole tensors in a state by a module's parts before it is loaded: a hook."""

    def __init__(self, cuts: dict[str, Cut]) -> None:
        self._cuts = cuts

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, cut in self._cuts.items():
            value = state.get(prefix + name)
            if value is not None and tuple(value.shape) == cut.shape:
                state[prefix + name] = cut.part(value)


def keep_states_whole(model: nn.Module) -> None:
    """Install the hooks on every module with parameters that are cut."""
    for module in model.modules():
        found = {name: cut_of(p) for name, p in module._parameters.items() if p is not None}
        cuts = {name: cut for name, cut in found.items() if cut is not None}
        if cuts:
            module.register_state_dict_post_hook(_WholeState(cuts))  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_PartOfState(cuts))  # type: ignore[no-untyped-call]
