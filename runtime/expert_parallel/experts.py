"""Defines a module of equal experts, whose parameters are stacked so that ranks can have different ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..cut import whole_shape
from ..errors import ParameterError
from ..zero import placeholder
from ..zero.unit_policy import LEAF_MARK
from .indices import bounds, check_bounds, check_kind

_LISTS = ("", "deepspeed_experts.")
"""Stands before the number of an expert in the names of a state dict that has a list of them."""


class Experts(nn.Module):
    """Compute, for each token, the weighted sum of the experts that it is routed to.

    Experts are modules of one class and shape. Their parameters are stacked along a new first dimension:
    ``experts.expert.fc.weight`` has shape (experts, out, in). With ``parallel.expert`` in the config, each
    rank holds some of the experts.

    An expert is called with its tokens (n, width), in their original order. It returns (n, width), or a
    tuple with that tensor first. An expert without tokens is not called, and its gradients are zero.

    ``load_state_dict`` also accepts the names of a list of experts: ``0.fc.weight``, ``1.fc.weight``, ...
    """

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        """Stack the parameters of ``experts``. Do not use these modules elsewhere afterwards.

        Raises:
            ParameterError: The experts differ in more than parameter values, share parameters, or have
                buffers.
        """
        super().__init__()
        members = list(experts) if isinstance(experts, Iterable) else []
        if not members or not all(isinstance(member, nn.Module) for member in members):
            raise ParameterError("Experts: expected a list of at least one module")
        _check_equal(members)
        stacked: dict[int, nn.Parameter] = {}
        owners = [dict(member.named_modules(remove_duplicate=False)) for member in members]
        for name, module in owners[0].items():
            for key, parameter in list(module._parameters.items()):
                if parameter is None or any(parameter is own for own in stacked.values()):
                    continue
                if id(parameter) not in stacked:
                    parts = [own[name]._parameters[key] for own in owners]
                    whole = torch.stack([part.detach() for part in parts if part is not None])
                    stacked[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
                module._parameters[key] = stacked[id(parameter)]
        self.expert = members[0]
        setattr(self, LEAF_MARK, True)

    def __len__(self) -> int:
        """Return the number of experts on this rank."""
        return placeholder.shape_of(next(self.expert.parameters()))[0]

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the sum over k of ``weights * expert(tokens)``, with the shape and dtype of ``tokens``.

        The sum is computed in the wider dtype of the experts' outputs and the weights.

        Args:
            tokens: Tokens, (n, width).
            index: Expert numbers, (n, k), int64; -1 adds nothing.
            weights: Routing weights, (n, k).

        Raises:
            ParameterError: A shape is wrong, or an expert number is out of range.
        """
        if tokens.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(tokens):
            shapes = ", ".join(str(list(each.shape)) for each in (tokens, index, weights))
            raise ParameterError(
                f"Experts: expected tokens (n, width), index (n, k) and weights (n, k), got shapes {shapes}"
            )
        stacks: dict[str, Tensor] = dict(self.expert.named_parameters())
        check_kind("Experts", index)
        total = len(self)
        row, slot = (index >= 0).nonzero(as_tuple=True)
        chosen, order = index[row, slot].sort(stable=True)
        row, slot = row[order], slot[order]
        per_expert = torch.bincount(chosen.clamp(max=total), minlength=total + 1)
        *counts, _, lowest, highest = torch.cat([per_expert, bounds(index)]).tolist()
        check_bounds("Experts", lowest, highest, total)
        parts = {name: stack.unbind(0) for name, stack in stacks.items()}
        rows_of = torch.split(tokens[row], counts)
        outputs = [
            self._compute({name: part[number] for name, part in parts.items()}, rows)
            for number, rows in enumerate(rows_of)
            if len(rows)
        ]
        if not outputs:
            return tokens * 0 + self._nothing(stacks, weights).to(tokens.dtype)
        scaled = torch.cat(outputs) * weights[row, slot].unsqueeze(-1)
        found = scaled.new_zeros((len(tokens), scaled.shape[1])).index_add(0, row, scaled)
        return found.to(tokens.dtype)

    def _compute(self, parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
        output = functional_call(self.expert, parameters, (rows,))
        found = output[0] if isinstance(output, tuple) else output
        if not isinstance(found, Tensor) or found.shape != rows.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ParameterError(
                f"Experts: {type(self.expert).__name__} returns {shape} for tokens {list(rows.shape)}: an "
                "expert must return the same shape"
            )
        return found

    @staticmethod
    def _nothing(stacks: dict[str, Tensor], weights: Tensor) -> Tensor:
        """Return a zero that depends on all parameters: gradients go the way that they go with tokens."""
        zero = (weights * 0).sum()
        for stack in stacks.values():
            zero = zero + stack.reshape(-1)[:0].sum()
        return zero

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name, parameter in self.expert.named_parameters(remove_duplicate=False):
            total = whole_shape(parameter, placeholder.shape_of(parameter))[0]  # of all ranks' experts
            for start in _LISTS:
                names = [f"{prefix}{start}{number}.{name}" for number in range(total)]
                found = [state_dict[each] for each in names if each in state_dict]
                if found and len(found) == len(names):
                    state_dict[f"{prefix}expert.{name}"] = torch.stack(found)
                    for each in names:
                        del state_dict[each]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _check_equal(members: list[nn.Module]) -> None:
    """Raise ParameterError if modules differ in more than their parameters' values."""
    first, seen = members[0], set[int]()
    own = next(iter(first.named_buffers()), None)
    if own is not None:
        raise ParameterError(f"Experts: buffers are not supported, but {type(first).__name__} has {own[0]}")
    if next(first.parameters(), None) is None:
        raise ParameterError(f"Experts: {type(first).__name__} has no parameters")
    wanted = _describe(first)
    for number, member in enumerate(members):
        described = _describe(member)
        for name in wanted | described:
            if described.get(name) != wanted.get(name):
                raise ParameterError(
                    f"Experts: expert {number} differs from expert 0 in {name}: "
                    f"{described.get(name)} instead of {wanted.get(name)}"
                )
        ids = {id(each) for each in (*member.modules(), *member.parameters())}
        if seen & ids:
            raise ParameterError(f"Experts: expert {number} shares modules or parameters with another")
        seen |= ids


def _describe(member: nn.Module) -> dict[str, Any]:
    """Return what has to be equal in all experts, by name."""
    found: dict[str, Any] = {}
    for name, module in member.named_modules(remove_duplicate=False):
        own = name or "its class"
        found[own] = f"{type(module).__module__}.{type(module).__qualname__}"
        found[f"buffers of {own}"] = list(module._buffers)
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, torch.dtype)) and key != "training":
                found[f"{name}.{key}" if name else key] = value
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found[f"{kind[1:].replace('_', ' ')} of {own}"] = len(getattr(module, kind))
    for name, parameter in member.named_parameters(remove_duplicate=False):
        found[name] = (list(placeholder.shape_of(parameter)), parameter.dtype, parameter.requires_grad)
    return found
