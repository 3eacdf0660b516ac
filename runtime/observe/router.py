"""Counts the tokens that a router sends to each expert, for reports and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.shard_spec import full_shape
from ..parallel.expert import Experts, by_position, expert_modules
from ..zero import placeholder


class RouterStatistics:
    """Counts for each step which experts of a model get this rank's tokens, without waiting for the device.

    A token counts once for each of its experts, in training alone, and not again where checkpointed
    activations are recomputed. Calls that torch.compile has compiled are not counted.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        """Count in ``modules`` until :meth:`close`: modules of experts, called with tokens, the experts'
        numbers (n, k) and their weights.
        """
        totals = [_count_experts(module) for module in modules.values()]
        columns = 1 + max(totals)
        self._counts = torch.zeros(len(totals), columns, dtype=torch.int64, device=device)
        """Has a row for each module: pairs of token and number that add nothing (-1), then each expert's."""
        self._totals = torch.tensor(totals, device=device)
        self._exists = torch.arange(1, columns, device=device) <= self._totals.unsqueeze(1)
        """Is False behind the last expert of a module that has fewer than others."""
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._may_drop = any(isinstance(module, Experts) for module in modules.values())
        self._has_counted = False
        self._loss: Tensor | None = None
        """Sums the balance losses of the step's micro-batches, of models that return one."""
        self._loss_count = 0
        self._last: dict[str, Tensor] = {}
        self._hooks: list[Any] = [model.register_forward_hook(_OnCopyInert(self._take_loss))]
        for row, total, module in zip(self._counts, totals, modules.values(), strict=True):
            counts = row[: 1 + total]
            hook = _OnCopyInert(lambda *call, counts=counts: self._count(counts, *call))
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _count(self, counts: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if not module.training or placeholder.in_backward():
            return
        if len(args) < 2:
            args, _ = by_position(module, args, kwargs)
        index = args[1] if len(args) > 1 else None
        if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
            # The module raises for numbers out of range. On a GPU, this sum would end the process.
            places = (index.detach().flatten() + 1).clamp_(0, len(counts) - 1)
            counts.index_add_(0, places, self._one.expand(len(places)))
            self._has_counted = True

    def _take_loss(self, module: nn.Module, args: Any, output: Any) -> None:
        loss = getattr(output, "aux_loss", None)
        if module.training and isinstance(loss, Tensor) and not placeholder.in_backward():
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
            self._loss_count += 1

    def after_step(self) -> None:
        """Take what has been counted as that of the last step, and begin anew."""
        self._last = {}
        if self._has_counted:
            loads = self._counts[:, 1:]
            tokens = loads.sum(1)
            shares = loads.amax(1) * self._totals / tokens.clamp(min=1)
            self._last["expert_max_load"] = shares.max()
            self._last["unused_experts"] = ((loads == 0) & self._exists).sum()
            if self._may_drop:
                dropped = self._counts[:, 0].sum()
                self._last["dropped_tokens"] = dropped / (dropped + tokens.sum()).clamp(min=1)
            self._counts.zero_()
            self._has_counted = False
        if self._loss is not None:
            self._last["balance_loss"] = self._loss / self._loss_count
            self._loss = None
            self._loss_count = 0

    def metrics(self) -> dict[str, Tensor]:
        """Return what is known of the last step's tokens, on this rank; 0-dim tensors.

        ``expert_max_load`` is the most tokens of an expert, as a multiple of the mean of its module, in the
        worst module. ``unused_experts`` counts those without tokens in all modules. ``dropped_tokens`` is the
        share of pairs of token and expert that add nothing, where a module is an ``Experts``.
        ``balance_loss`` is the mean of the outputs' ``aux_loss``, as Hugging Face's models call it.
        """
        return self._last

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class _OnCopyInert:
    """Calls a function, and does nothing on a copy of the module. Unlike :class:`~..zero.tensors.Hook`, a
    compiler may trace it: it leaves nothing in a graph, and breaks none.
    """

    def __init__(self, function: Any = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None and not torch.compiler.is_compiling():
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OnCopyInert, ()


def watch_router(
    model: nn.Module, given: Sequence[str] | None, device: torch.device
) -> RouterStatistics | None:
    """Return the statistics of a model's experts; None where it has none that are called with the numbers of
    their tokens. ``given`` is the config's ``expert_parallel.experts``.
    """
    modules = {
        name: module for name, module in expert_modules(model, given).items() if _count_experts(module)
    }
    return RouterStatistics(model, modules, device) if modules else None


def _count_experts(module: nn.Module) -> int:
    """Return the number of experts, on all ranks, that a module stacks; 0 for another kind of module."""
    lengths = {(*full_shape(p, placeholder.shape_of(p)), 0)[0] for p in module.parameters()}
    return lengths.pop() if len(lengths) == 1 else 0
