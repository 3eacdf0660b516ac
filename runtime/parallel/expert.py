"""Divides a model's experts over ranks, and sends each token to the ranks that have its experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..comm.axis import PASSES, STATES, Axis, Channel
from ..comm.shard_spec import Box, full_box, full_shape
from ..errors import ParameterError
from ..models import matching, own_plan, suggestion
from ..zero import placeholder
from ..zero.policy import LEAF_MARK
from .collectives import RowExchange, all_to_all

# -- indices ----------------------------------------------------------------------------------------
#
# Checks the numbers of the experts that tokens are routed to, without bringing anything to the host.


def bounds(index: Tensor) -> Tensor:
    """Return the smallest and the largest number in an index, on its device; 0 counts as one of them."""
    numbers = torch.cat([index.flatten(), index.new_zeros(1)])
    return torch.stack(torch.aminmax(numbers))


def check_bounds(name: str, lowest: int, highest: int, total: int) -> None:
    """Raise ParameterError if a number is not one of ``total`` experts and not -1, which adds nothing."""
    if lowest < -1 or highest >= total:
        wrong = highest if highest >= total else lowest
        raise ParameterError(
            f"{name}: a token is routed to expert {wrong}: expected 0 to {total - 1}, or -1 for none"
        )


def check_kind(name: str, index: Tensor) -> None:
    """Raise ParameterError for an index that does not hold whole numbers."""
    if index.dtype not in (torch.int64, torch.int32):
        raise ParameterError(f"{name}: expected an index of int64, got {index.dtype}")


# -- experts ----------------------------------------------------------------------------------------
#
# Defines a module of equal experts, whose parameters are stacked so that ranks can have different ones.


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
        row = row[order]
        slot = slot[order]
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
            total = full_shape(parameter, placeholder.shape_of(parameter))[0]  # of all ranks' experts
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
    first = members[0]
    seen = set[int]()
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


# -- axis -------------------------------------------------------------------------------------------
#
# Defines the collectives of the ranks that have different experts and different samples.


TOKENS = Channel("expert", "exchanges tokens in its expert-parallel group", "expert")
STATE = Channel("expert states", "all-gathers a parameter over its expert-parallel group", group=STATES)


def open_expert_axis(axis: Axis) -> None:
    """Make the process groups of the expert axis. Collective for all ranks."""
    axis.make_group(PASSES)
    # a state that one rank alone asks for must not meet the tokens of others
    axis.make_group(STATES, along=["tensor"])


def shard_of_experts(axis: Axis) -> tuple[int, Callable[[Tensor], list[Tensor]]]:
    """Return this rank's place among the ranks that have all experts together, each sharded over the tensor
    axis, and the function that gathers their shards of a parameter.
    """
    tensor = axis.comm.mesh.tensor
    return axis.rank * tensor + axis.comm.rank % tensor, partial(axis.all_gather, channel=STATE)


# -- forward ----------------------------------------------------------------------------------------
#
# Defines what a module of experts computes where each rank has some of them.


Inner = Callable[..., Tensor]


def by_position(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call of a module, by position where its forward has names for them. Raises
    TypeError for a call that its forward does not take.
    """
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    return bound.args[1:], bound.kwargs


class DispatchForward:
    """Replaces a module's forward: sends each token once to each rank that has experts of it, and sums what
    they return. No token is dropped, whatever the routing.

    The module gets each pair of token and expert as a token with one expert.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        axis: Axis,
        experts: int,
        inner: Callable[..., Tensor] | None,
    ) -> None:
        """Compute the experts of this rank with ``inner``, by default the module's own forward."""
        self.module = module
        self.name = name
        self.axis = axis
        self.inner = inner
        self.local = experts // axis.size

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the weighted sums of the experts' outputs, (tokens, width), of tokens (tokens, width),
        experts' numbers and weights (tokens, k), in the tokens' dtype, however the module names them. An
        index of -1 adds nothing.

        Raises ParameterError for numbers of no expert.
        """
        args, kwargs = by_position(self.module, args, kwargs)
        if len(args) < 3:
            raise ParameterError(
                f"expert parallelism: {self.name}: expected tokens, experts and weights, got {len(args)} "
                "positional arguments"
            )
        hidden, index, weights, *rest = args
        return self._send(hidden, index, weights, rest, kwargs)

    def _send(self, hidden: Tensor, index: Tensor, weights: Tensor, args: Any, kwargs: Any) -> Tensor:
        self._check(hidden, index, weights)
        axis = self.axis
        owners = index.div(self.local, rounding_mode="floor")
        goes = (owners.unsqueeze(-1) == torch.arange(axis.size, device=index.device)).any(1)
        token = goes.t().nonzero(as_tuple=True)[1]
        counts = goes.sum(0)
        came = axis.all_to_all(counts, TOKENS)
        *numbers, lowest, highest = torch.cat([counts, came, bounds(index)]).tolist()
        check_bounds(f"expert parallelism: {self.name}", lowest, highest, self.local * axis.size)
        sent = numbers[: axis.size]
        received = numbers[axis.size :]
        wanted = axis.all_to_all(index[token], TOKENS, sent, received) - axis.rank * self.local
        there = RowExchange(sent, received)
        rows, scales = all_to_all(axis, TOKENS, there, hidden[token], weights[token])
        output = self._compute(rows, wanted, scales, args, kwargs)
        (found,) = all_to_all(axis, TOKENS, there.inverse, output)
        whole = found.new_zeros((hidden.shape[0], *found.shape[1:]))
        return whole.index_add(0, token, found)

    def _compute(self, rows: Tensor, wanted: Tensor, scales: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Return the sums of this rank's experts for rows of tokens."""
        row, slot = ((wanted >= 0) & (wanted < self.local)).nonzero(as_tuple=True)
        if not len(row):
            # no rows have come; gradients still go the way that they go on the other ranks
            output = rows * scales.sum(-1, keepdim=True).to(rows.dtype)
            for parameter in self.module.parameters():
                output = output + parameter.reshape(-1)[:0].sum().to(rows.dtype)
            return output
        inner = self.inner or self._own
        pairs = inner(
            rows[row], wanted[row, slot].unsqueeze(1), scales[row, slot].unsqueeze(1), *args, **kwargs
        )
        if not isinstance(pairs, Tensor) or pairs.shape != (len(row), rows.shape[1]):
            raise ParameterError(f"expert parallelism: {self.name} must return a tensor (tokens, width)")
        # ranks without rows send the tokens' dtype: under autocast, experts may return another
        return torch.zeros_like(rows).index_add(0, row, pairs.to(rows.dtype))

    def _own(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return found

    def _check(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(hidden):
            shapes = ", ".join(str(list(each.shape)) for each in (hidden, index, weights))
            raise ParameterError(
                f"expert parallelism: {self.name}: expected tokens (n, width), experts (n, k) and weights "
                f"(n, k), got shapes {shapes}"
            )
        check_kind(f"expert parallelism: {self.name}", index)


# -- plan -------------------------------------------------------------------------------------------


_STYLE = "ep_dispatch_experts"
"""Names the style of such modules in Hugging Face's plans."""


@dataclass(slots=True)
class ExpertPlan:
    """Holds what is decided about the modules of experts of a model."""

    axis: Axis
    boxes: dict[int, tuple[Box, ...]] = field(default_factory=dict)
    """The shards of each parameter of experts, by its id."""
    modules: dict[str, int] = field(default_factory=dict)
    """The number of experts of each module, by its name."""
    settings: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """Attributes of modules that get other values."""

    def decide(
        self,
        model: nn.Module,
        given: Sequence[str] | None,
        sharded: dict[int, tuple[Box, ...]],
        forwards: dict[str, Any],
    ) -> None:
        """Decide about all modules of experts. ``sharded`` and ``forwards`` are what tensor parallelism has
        decided: its shards of experts' parameters are split further, and its forwards serve this rank's
        experts.

        Raises ParameterError for a model without such modules, and for parameters that cannot be sharded.
        """
        for name, module in _find(model, given).items():
            total = self._count(name, module)
            self.modules[name] = total
            for key, parameter in module.named_parameters():
                shards = (
                    sharded.pop(id(parameter), None)
                    or (full_box(_shape(parameter)),) * self.axis.comm.mesh.tensor
                )
                self.boxes[id(parameter)] = self._split_further(f"{name}.{key}", shards, total)
            forwards[name] = DispatchForward(module, name, self.axis, total, forwards.get(name))
            self.settings += [
                (module, key, total // self.axis.size)
                for key, value in vars(module).items()
                if "experts" in key and type(value) is int and value == total
            ]
        self._refuse_shared(model)

    def _count(self, name: str, module: nn.Module) -> int:
        """Return the number of experts of a module, which the ranks can share."""
        total = _count_of(name, module)
        size = self.axis.size
        if total % size:
            fitting = [str(n) for n in range(1, total + 1) if total % n == 0]
            raise ParameterError(
                f"expert parallelism: the {total} experts of {name} cannot be divided by {size} ranks; "
                f"possible sizes: {', '.join(fitting)}"
            )
        return total

    def _split_further(self, name: str, shards: tuple[Box, ...], total: int) -> tuple[Box, ...]:
        step = total // self.axis.size
        if any(shard[0] != ((0, total),) for shard in shards):
            raise ParameterError(f"expert parallelism: tensor parallelism already shards {name} by experts")
        return tuple(
            (((place * step, (place + 1) * step),), *shard[1:])
            for place in range(self.axis.size)
            for shard in shards
        )

    def _refuse_shared(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            inside = any(name == own or name.startswith(f"{own}.") for own in self.modules)
            for key, parameter in module._parameters.items():
                if not inside and parameter is not None and id(parameter) in self.boxes:
                    raise ParameterError(
                        f"expert parallelism: {name}.{key} shares a parameter with experts, which is not "
                        "supported"
                    )


def count_experts(model: nn.Module, given: Sequence[str] | None) -> set[int]:
    """Return the numbers of experts that modules of a model have, with a config's names of modules. Raises
    ParameterError for a model without experts that ranks could share.
    """
    return {_count_of(name, module) for name, module in _find(model, given).items()}


def _count_of(name: str, module: nn.Module) -> int:
    """Return the number of experts of a module."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ParameterError(
            f"expert parallelism: {name} is a {type(module).__name__} of separate modules: wrap them in "
            "zlaunch.Experts([...]) and call it with (tokens, index, weights)"
        )
    lengths = {(_shape(p) or (0,))[0] for p in module.parameters()}
    if len(lengths) != 1:
        shapes = ", ".join(f"{key} {list(_shape(p))}" for key, p in module.named_parameters())
        raise ParameterError(
            f"expert parallelism: the first dimension of every parameter of {name} must be the experts, "
            f"got {shapes or 'no parameters'}"
        )
    return lengths.pop()


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(placeholder.shape_of(parameter))


def expert_modules(model: nn.Module, given: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules of experts by name: all Experts, and those of a config's patterns or the model's own
    plan.
    """
    modules = dict(model.named_modules())
    patterns = given
    if patterns is None:
        patterns = [name for name, style in own_plan(model, "ep").items() if style == _STYLE]
    found: dict[str, nn.Module] = {n: each for n, each in modules.items() if isinstance(each, Experts)}
    for pattern in patterns:
        found |= {name: modules[name] for name in matching(model, pattern) if name in modules}
    return found


def _find(model: nn.Module, given: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules of experts by name. Raises ParameterError where there is none, or a pattern of the
    config matches none.
    """
    modules = dict(model.named_modules())
    for pattern in given or ():
        if not any(name in modules for name in matching(model, pattern)):
            raise ParameterError(
                f"expert_parallel.experts: no module matches {pattern}{suggestion(modules, pattern)}"
            )
    found = expert_modules(model, given)
    if not found:
        listed = [n for n, each in modules.items() if isinstance(each, nn.ModuleList) and "experts" in n]
        if listed:
            raise ParameterError(
                f"{type(model).__name__} has no plan for expert parallelism: wrap the modules of "
                f"{listed[0]} in zlaunch.Experts([...]), called with (tokens, index, weights); or name "
                'modules with stacked parameters, expert_parallel.experts ["layers.*.experts"]; or set '
                "the size to 1"
            )
        raise ParameterError(
            f"{type(model).__name__} has no plan for expert parallelism: name the expert modules, "
            'expert_parallel.experts ["layers.*.experts"], use zlaunch.Experts, or set the size to 1'
        )
    return found
