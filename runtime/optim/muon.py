"""Implements Muon: whole matrices become orthogonal, each on one of the ranks that have parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...cuda_ops.step import SliceUpdate
from ..environment import read_environment
from ..errors import OptimizerError
from ..log import say
from ..zero import placeholder
from ..zero.store import TileView
from .collective import (
    CollectiveStep,
    Matrix,
    MatrixExchange,
    ParameterPart,
    TileWork,
    by_group,
    each_tile,
    gradients,
    work_on,
)
from .lamb import check_rates
from .slices import ShardSlice
from .update_rule import State, UpdateRule

# -- newton schulz ----------------------------------------------------------------------------------
#
# Computes Muon's orthogonal matrices.


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Sets the quintic iteration, with the largest slope at zero (Jordan et al., 2024)."""

PRODUCTS = torch.bfloat16
"""Sets the dtype that matrices are multiplied in."""


def orthogonalize(
    matrix: Tensor, coefficients: Sequence[float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Return, in bf16, a matrix with the singular vectors of ``matrix`` (two dimensions, any floating dtype)
    and singular values near 1, by a quintic Newton-Schulz iteration.

    The iteration is that of "Muon: An optimizer for hidden layers in neural networks" (Jordan et al., 2024);
    in bf16 it gives what torch.optim.Muon computes.
    """
    a, b, c = coefficients
    x = matrix.to(torch.bfloat16).to(PRODUCTS)
    # The products below then have the smaller side: x x^T is rows x rows.
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    # The iteration needs singular values of at most 1. The Frobenius norm is at least the largest one.
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        # x <- a x + (b A + c A^2) x with A = x x^T: each singular value s becomes a s + b s^3 + c s^5, near
        # 1.
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(torch.bfloat16)


def adjusted_rate(group: Mapping[str, Any], rows: int, columns: int) -> float:
    """Return the learning rate of a matrix: "original" (the default) multiplies by sqrt(max(1, rows /
    columns)), "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), as torch.optim.Muon has it.
    """
    lr = float(group["lr"])
    if group.get("adjust_lr_fn") == "match_rms_adamw":
        # An orthogonal matrix has a root mean square of 1 / sqrt(max(rows, columns)), an update of AdamW
        # about 0.2.
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1.0, rows / columns))


# -- muon -------------------------------------------------------------------------------------------


_BUFFER = ("momentum_buffer",)
_ADAMW = {"foreach": None, "maximize": False, "capturable": False, "differentiable": False, "fused": None}
_ADAMW |= {"amsgrad": False, "decoupled_weight_decay": True}


class Muon(torch.optim.Optimizer):
    """Implements "Muon: An optimizer for hidden layers in neural networks" (Jordan et al., 2024).

    It works like torch.optim.Muon. AdamW steps groups with ``use_muon`` False, with their ``lr``, ``betas``,
    ``adam_eps`` and ``weight_decay``. Use Muon for matrices of hidden layers, not for embeddings and output
    heads. A parameter with more than two dimensions is flattened to a matrix.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        weight_decay: Decoupled weight decay of all parameters.
        momentum: Momentum of the matrices.
        nesterov: Use Nesterov momentum.
        ns_coefficients: The three coefficients of a Newton-Schulz iteration.
        eps: Lower bound of the norm that a matrix is divided by before the iteration.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: Scale of the learning rate by a matrix's shape: "original" (None) is
            sqrt(max(1, rows / columns)), "match_rms_adamw" is 0.2 sqrt(max(rows, columns)).
        use_muon: Step groups without this entry by Muon.
        betas: Decay rates of AdamW's moments.
        adam_eps: Added to AdamW's denominator.

    Raises:
        ValueError: An argument is out of range, or a Muon group has a parameter with fewer than two
            dimensions.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
    ) -> None:
        check_rates("Muon", lr=lr, betas=betas, eps=adam_eps, weight_decay=weight_decay)
        if not lr >= 0 or not 0 <= momentum < 1 or not 0 < ns_steps < 100 or len(ns_coefficients) != 3:
            given = f"momentum {momentum}, ns_steps {ns_steps}, ns_coefficients {ns_coefficients}"
            raise ValueError(f"Muon: {given}: out of range")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'Muon: adjust_lr_fn {adjust_lr_fn!r}: expected "original" or "match_rms_adamw"')
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "betas": tuple(betas),
            "adam_eps": adam_eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ValueError if a Muon group has a parameter with fewer than two dimensions."""
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        if param_group.get("use_muon", self.defaults["use_muon"]):
            for entry in members:
                # The true shape, also of a sharded parameter with an empty placeholder.
                shape = placeholder.shape_of(entry[1] if isinstance(entry, tuple) else entry)
                if len(shape) < 2:
                    raise ValueError(
                        f"Muon steps matrices, but got a parameter of shape {list(shape)}: put it in a group "
                        'with "use_muon": False, so that AdamW steps it'
                    )
        super().add_param_group({**param_group, "params": members})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        adamw = UpdateRule(_adamw_of(self))
        adamw.begin(1.0)
        updates = []
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if not parameter.numel():
                    continue
                if parameter.grad is not None and group["use_muon"]:
                    own = self.state[parameter]
                    if not own:
                        own["momentum_buffer"] = torch.zeros_like(parameter)
                    (change,) = directions([own["momentum_buffer"]], [parameter.grad], group)
                    found = _orthogonal(change.reshape(change.size(0), -1), group).view(parameter.shape)
                    apply_change(parameter.detach(), found, group, *_sides(parameter.shape))
                elif parameter.grad is not None:
                    updates.append(SliceUpdate(index, parameter, parameter.grad))
        adamw.apply(updates, self.state)
        for update in updates:
            # UpdateRule clears it; a torch optimizer leaves gradients to the script.
            update.leaf.grad = update.grad
        return result


def _adamw_of(optimizer: torch.optim.Optimizer) -> torch.optim.AdamW:
    """Build the AdamW that steps the groups which Muon does not, with as many groups."""
    made = torch.optim.AdamW([torch.zeros(1)])
    made.param_groups = []
    for group in optimizer.param_groups:
        rates = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        moments = {"betas": group.get("betas", (0.9, 0.999)), "eps": group.get("adam_eps", 1e-8)}
        made.param_groups.append({**_ADAMW, **rates, **moments, "params": []})
    return made


def _of_muon(groups: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the indices of the groups that AdamW does not step."""
    return {index for index, group in enumerate(groups) if group.get("use_muon", True)}


def directions(buffers: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Add gradients to momentum buffers, in place; return what is to become orthogonal."""
    momentum = float(group["momentum"])
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return list(torch._foreach_lerp(grads, buffers, momentum)) if group["nesterov"] else buffers


def _orthogonal(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    return orthogonalize(matrix, group["ns_coefficients"], int(group["ns_steps"]), float(group["eps"]))


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a parameter seen as a matrix."""
    rest = 1
    for side in shape[1:]:
        rest *= side
    return shape[0], rest


def apply_change(values: Tensor, change: Tensor, group: Mapping[str, Any], rows: int, columns: int) -> None:
    """Decay values and move them along their part of an orthogonal matrix."""
    # Decay by the plain learning rate, not by the adjusted one, as torch.optim.Muon does.
    values.mul_(1 - float(group["lr"]) * float(group["weight_decay"]))
    values.add_(change.to(values.device), alpha=-adjusted_rate(group, rows, columns))


class MuonStep(CollectiveStep):
    """Steps :class:`Muon` and torch.optim.Muon.

    Each rank updates the momentum of its parts; the parts of a matrix go, in bf16, to one of the ranks that
    have some of it, and come back orthogonal. Units follow each other in groups of at most some elements.
    """

    _exchange: MatrixExchange | None = None

    @staticmethod
    def state_count(optimizer: torch.optim.Optimizer) -> int:
        return 2 if isinstance(optimizer, Muon) else 1  # groups of AdamW's may come later

    @staticmethod
    def group_states(group: Mapping[str, Any]) -> int:
        return 1 if group.get("use_muon", True) else 2

    def prepare(self, rule: UpdateRule, slices: Sequence[ShardSlice], used: Sequence[bool]) -> None:
        """Raise OptimizerError where Muon is to step what is no matrix."""
        in_muon = _of_muon(rule.optimizer.param_groups)
        for unit in self.units:
            for name, slot, shape in zip(unit.names, unit.layout.slots, unit.shapes, strict=True):
                # By groups, units and shapes, which all ranks know: a rank that raised alone would leave the
                # others waiting in the exchange.
                if slot.group in in_muon and len(shape) < 2:
                    raise OptimizerError(
                        f'Muon steps matrices, and {name} has the shape {list(shape)}: set "use_muon" of '
                        "its group to False"
                    )

    def run(self, rule: UpdateRule, parts: Sequence[ParameterPart], state: State) -> None:
        groups = rule.optimizer.param_groups
        adamw = UpdateRule(_adamw_of(rule.optimizer))
        adamw.begin(float(rule.divisor))
        in_muon = _of_muon(groups)
        # Units change when parameters are unfrozen, and then other ranks have parts.
        if self._exchange is None or not self._exchange.serves(self.units, in_muon):
            self._exchange = MatrixExchange(self.comm, self.units, in_muon)
        work = work_on(parts)
        for members in self._exchange.batches:
            self._run_batch([each for each in work if each[2][0].unit in members], adamw, rule, state)

    def _run_batch(self, work: Sequence[TileWork], adamw: UpdateRule, rule: UpdateRule, state: State) -> None:
        """Step the tiles of some units."""
        assert self._exchange is not None
        groups = rule.optimizer.param_groups
        sent: dict[ParameterPart, Tensor] = {}
        later: list[TileWork] = []
        for store, extent, inside in work:
            mine = [part for part in inside if groups[part.group].get("use_muon", True)]
            if mine:
                later.append((store, extent, mine))
        for inside, tile, view in each_tile(work):
            found: list[tuple[ParameterPart, Tensor]] = []
            for index, own in by_group(inside).items():
                if not groups[index].get("use_muon", True):
                    _step_adamw(adamw, own, view, state)
                    continue
                buffers = [part.states(view, state, _BUFFER)["momentum_buffer"] for part in own]
                grads = gradients(own, view, float(rule.divisor))
                found += zip(own, directions(buffers, grads, groups[index]), strict=True)
            for part, change in found:
                # In bf16, in which the iteration runs anyway: half the bytes. The momentum keeps the master's
                # dtype.
                sent[part] = change.to(self.comm.device, torch.bfloat16)
            # A tile with a part of a matrix is published in the second pass, when it has its new values.
            if not found:
                self.publish(tile, view)

        def solve(matrix: Matrix, content: Tensor) -> Tensor:
            return _orthogonal(content, groups[matrix.group])

        back = self._exchange.run(sent, solve)
        for inside, tile, view in each_tile(later):
            for part in inside:
                rows, columns = _sides(part.unit.shapes[part.index])
                values = part.of(view, view.master)
                apply_change(values, back[part], groups[part.group], rows, columns)
            self.publish(tile, view)


def _step_adamw(adamw: UpdateRule, parts: Sequence[ParameterPart], view: TileView, state: State) -> None:
    """Step parts that are no matrices of Muon's."""
    assert view.grad is not None
    updates = []
    own_state = {}
    for part in parts:
        moments = part.states(view, state, ("exp_avg", "exp_avg_sq"))
        leaf = part.of(view, view.master)
        # The moments are views of the tile. The count may be a new tensor, so it is taken back below.
        own_state[leaf] = {**moments, "step": part.entries(state).get("step", torch.tensor(0.0))}
        updates.append(SliceUpdate(part.group, leaf, part.of(view, view.grad)))
    adamw.apply(updates, own_state)
    for part, update in zip(parts, updates, strict=True):
        part.entries(state)["step"] = own_state[update.leaf]["step"]


# -- muon groups ------------------------------------------------------------------------------------
#
# Decides which parameters of a model Muon steps: matrices of hidden layers.


_OUTER_NAMES = ("embed", "lm_head")
"""Marks, in a parameter's name, what is at the model's ends; these are DeepSpeed's words."""


def split_for_muon(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, *, muon_lr: float, adam_lr: float
) -> list[dict[str, Any]]:
    """Split each group into the matrices that Muon steps and the rest, for AdamW, with ``use_muon`` and
    ``lr`` set; say what is left to AdamW. A group that has ``use_muon`` or ``lr`` keeps them.

    Left to AdamW are parameters of fewer than two dimensions, embeddings, output heads, what "embed" or
    "lm_head" in its name calls so, and parameters that carry ``use_muon = False``.
    """
    outer = {id(parameter) for parameter in _outer(model)}
    found: list[dict[str, Any]] = []
    for group in groups:
        chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in group["params"]:
            is_matrix = len(placeholder.shape_of(parameter)) >= 2 and id(parameter) not in outer
            own = bool(getattr(parameter, "use_muon", is_matrix))
            chosen[bool(group.get("use_muon", own))].append(parameter)
        rates = {True: muon_lr, False: adam_lr}
        for kind, members in chosen.items():
            if members:
                found.append({"lr": rates[kind], **group, "params": members, "use_muon": kind})
    if read_environment().rank == 0:
        say(_described(found, model))
    return found


def _described(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> str:
    """Say what Muon steps, and which matrices it leaves to AdamW."""
    members = {
        kind: [p for g in groups if g["use_muon"] is kind for p in g["params"]] for kind in (True, False)
    }
    left = {id(p) for p in members[False] if len(placeholder.shape_of(p)) >= 2}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in left]
    text = f"Muon steps {len(members[True])} matrices, AdamW the other {len(members[False])} parameters"
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    text = f"{text} (including the matrices {shown})" if names else text
    heads = _possible_heads(model, {id(p) for p in members[True]})
    if heads:
        text += (
            f"; one of {', '.join(heads)} may be the output head: if so, set use_muon = False on its weight"
        )
    return text


def _possible_heads(model: nn.Module, with_muon: set[int]) -> list[str]:
    """Name the linear layers that Muon steps and of which one may be an output head: several lead back from
    hidden states to as many numbers as an embedding has rows, and none of those that AdamW steps does.
    """
    rows = {(m.embedding_dim, m.num_embeddings) for m in model.modules() if isinstance(m, nn.Embedding)}
    fitting = {
        name: id(module.weight) in with_muon
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (module.in_features, module.out_features) in rows
    }
    return [name for name, muon in fitting.items() if muon] if all(fitting.values()) else []


def _outer(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters at the model's ends, in whatever modules they are shared."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield from module.parameters()
            shape = module.embedding_dim, module.num_embeddings
            # one that leads back from hidden states to the embedding's rows; of several none is a head
            heads = [each for each in linear if (each.in_features, each.out_features) == shape]
            if len(heads) == 1:
                yield from heads[0].parameters()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        yield from head.parameters()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(word in name for word in _OUTER_NAMES):
            yield parameter
