"""Corrects or refuses module methods that would fail on flat or sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..optim.in_backward import check_step
from ..zero import placeholder
from ..zero.hooks import Gathered
from ..zero.placeholder import MASTERS, VALUES
from ..zero.tensors import Hook
from ..zero.unit import Unit, owner_of


def _units(module: nn.Module) -> list[Unit]:
    """Return the units of the module's direct parameters."""
    owners = [owner_of(parameter) for parameter in module.parameters(recurse=False)]
    return list({id(unit): unit for unit in owners if unit is not None}.values())


def intercept_module(root: nn.Module, gathered: Gathered) -> Callable[[], None]:
    """Guard ``state_dict``, ``load_state_dict``, ``zero_grad`` and ``to``/``half``/``cuda`` of every module.
    Returns a function that restores them.

    ``state_dict`` gives the true values (copies, where they are sharded): collective then.
    ``load_state_dict`` expects equal values on every rank and copies them to the masters. ``zero_grad`` drops
    the gradients that the engine has collected. Conversions that change dtype or device raise RuntimeError.
    """
    handles: list[Any] = []
    stacks: dict[int, list[ExitStack]] = {}

    def hold(module: nn.Module, *arguments: Any) -> None:
        stack = ExitStack()
        stack.enter_context(gathered(_units(module)))
        stacks.setdefault(id(module), []).append(stack)

    def let_go(module: nn.Module) -> None:
        if stacks.get(id(module)):
            stacks[id(module)].pop().close()

    def after_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items():
            unit = owner_of(parameter) if parameter is not None else None
            if unit is not None and unit.shard_params and prefix + name in state:
                state[prefix + name] = state[prefix + name].detach().clone()
        let_go(module)

    def before_state(module: nn.Module, *args: Any) -> None:
        for unit in _units(module):
            check_step(unit)
        hold(module)

    def before_load(module: nn.Module, *args: Any) -> None:
        for unit in _units(module):
            unit.check_on_device(MASTERS, VALUES)
            check_step(unit)
        hold(module)

    def after_load(module: nn.Module, incompatible: Any) -> None:
        for unit in _units(module):
            unit.write_back()
        let_go(module)

    for module in root.modules():
        if any(placeholder.owner(p) is not None for p in module._parameters.values() if p is not None):
            handles.append(module.register_state_dict_pre_hook(Hook(before_state)))  # type: ignore[no-untyped-call]
            handles.append(module.register_state_dict_post_hook(Hook(after_state)))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(Hook(before_load)))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_post_hook(Hook(after_load)))  # type: ignore[no-untyped-call]
        module._apply = _CheckedApply(module)  # type: ignore[method-assign]
        module.zero_grad = _ZeroGrad(module, module is root)  # type: ignore[method-assign]

    def restore() -> None:
        for handle in handles:
            handle.remove()
        for module in root.modules():
            module.__dict__.pop("_apply", None)
            module.__dict__.pop("zero_grad", None)

    return restore


class _CheckedApply:
    """Replaces ``Module._apply``, which serves ``to``, ``half``, ``cuda`` and others.

    It would replace the flat storage under the runtime. On a copy of the module it is torch's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        managed = [p for p in self._module.parameters(recurse=recurse) if placeholder.owner(p) is not None]
        if not managed:
            return type(self._module)._apply(self._module, function, recurse)  # type: ignore[no-any-return,no-untyped-call]
        for parameter in managed:
            probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            result = function(probe)
            if result.dtype != probe.dtype:
                raise RuntimeError(
                    f"this model belongs to a zlaunch engine and stays {probe.dtype} on {probe.device}: "
                    "convert it before zlaunch.initialize, or choose fp16/bf16 in the config"
                )
            if result.device != probe.device:
                placeholder.complain_of_move(probe.device, result.device)
                break
        return self._module


class _ZeroGrad:
    """Replaces ``Module.zero_grad``: the engine has the gradients. On a copy of the module it is torch's."""

    def __init__(self, module: nn.Module, is_root: bool) -> None:
        self._module = module
        self._is_root = is_root

    def __call__(self, set_to_none: bool = True) -> None:
        rest: list[nn.Parameter] = []
        units: dict[int, Unit] = {}
        for parameter in self._module.parameters():
            unit = owner_of(parameter)
            if unit is None or not unit.trainable:
                rest.append(parameter)
            elif self._is_root:
                units[id(unit)] = unit
            else:
                unit.forget_gradient(parameter)
        for unit in units.values():
            if unit.gradients is not None:
                unit.gradients.drop()
                break
        for parameter in rest:
            if parameter.grad is not None and set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
