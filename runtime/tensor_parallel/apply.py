"""Cuts a model's parameters by its plan, and lets its modules compute on the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Comm
from ..config import Config
from ..cut import Box, Cut, cut_of, mark
from ..environment import read_environment
from ..errors import ParameterError
from ..expert_parallel.axis import ExpertAxis
from ..expert_parallel.plan import ExpertPlan
from ..log import say
from ..mesh.choice import divides_layers
from ..zero.unit import owner_of
from .agreement import Agreement, Forget, uses_dropout
from .axis import TensorAxis
from .forwards import (
    LINEAR,
    ExpertsForward,
    GradientSum,
    SummedForward,
    VocabularyForward,
    VocabularyLoss,
    WidthForward,
)
from .plan import find_plan
from .whole_states import keep_states_whole

_DIM = {"colwise": -2, "colwise_gather_output": -2, "packed_colwise": -2}
_DIM |= {"rowwise": -1, "rowwise_split_input": -1, "packed_rowwise": -1}
_SHARED_HEADS = ("k_proj", "v_proj")
_HEADS, _FUSED = ("q_proj", "k_proj"), ("qkv_proj", "query_key_value")


def share_layers(model: nn.Module, config: Config, comm: Comm) -> None:
    """Cut the model for the ranks that share each layer, and those that have different experts, if there are
    several. All values are rank 0's then.

    Parameters stay the same objects, plain ones of their part's shape. Collective. Raises ParameterError for
    what cannot be cut.
    """
    if not divides_layers(comm):
        return
    axis, work, problem = TensorAxis(comm), None, None
    try:
        plan = find_plan(model, config.tensor_parallel.plan) if axis.size > 1 else {}
        work = _Application(model, plan, axis)
        work.decide()
        if config.tensor_parallel.vocab_parallel_loss and axis.size > 1:
            work.decide_on_loss()
        if comm.experts is not None:
            work.decide_on_experts(ExpertAxis(comm), config.expert_parallel.experts)
    except ParameterError as error:
        problem = str(error)
    for rank, said in enumerate(comm.exchange(problem)):
        if said is not None:
            raise ParameterError(said if said == problem else f"on rank {rank}, {said}")
    assert work is not None
    work.apply()
    keep_states_whole(model)
    if axis.size > 1:
        model.register_forward_pre_hook(Agreement(axis, uses_dropout(model)), with_kwargs=True)
        model.register_forward_hook(Forget(axis), always_call=True)
    if comm.rank == 0:
        _tell(work)


def _tell(work: _Application) -> None:
    """Say what is shared."""
    axis, experts = work.axis, work.experts
    if axis.size > 1:
        comm, crossing = axis.comm, _crosses_nodes(axis.size)
        say(
            f"tensor parallelism: {axis.size} ranks share the computation of each layer "
            f"({len(work.boxes)} parameters are cut), {comm.data.size} positions train on different "
            f"samples{crossing}"
        )
        for text in work.left_whole:
            say(f"tensor parallelism: {text}")
    if experts is not None:
        total = max(experts.modules.values())
        say(
            f"expert parallelism: each rank has {total // experts.axis.size} of {total} experts, in "
            f"{len(experts.modules)} module(s); {experts.axis.size} ranks have them all"
        )


def _crosses_nodes(size: int) -> str:
    local = read_environment().local_world_size
    if local % size == 0:
        return ""
    return f"; warning: groups of {size} ranks cross nodes of {local}, and each layer waits for that network"


class _Application:
    """Decides by names and shapes what is cut how, then does it: before an error nothing is changed."""

    def __init__(self, model: nn.Module, plan: dict[str, str], axis: TensorAxis) -> None:
        self.model, self.plan, self.axis = model, plan, axis
        self.modules = dict(model.named_modules())
        self.names: dict[int, str] = {}
        self.users: dict[int, list[tuple[str, str]]] = {}
        for name, module in self.modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.names.setdefault(id(parameter), f"{name}.{key}" if name else key)
                    self.users.setdefault(id(parameter), []).append((name, key))
        self.boxes: dict[int, tuple[Box, ...]] = {}
        """The parts of each parameter that is cut, by its id."""
        self.summed: list[tuple[Tensor, bool]] = []
        """Parameters whose gradients are summed over the axis, or over the ranks that have equal parts."""
        self.forwards: dict[str, Any] = {}
        self.settings: list[tuple[nn.Module, str, Any]] = []
        """Attributes of modules that get other values."""
        self.left_whole: list[str] = []
        self.experts: ExpertPlan | None = None
        text: Any = getattr(model, "config", None)
        text = text.get_text_config() if hasattr(text, "get_text_config") else text
        self.heads = getattr(text, "num_attention_heads", None)
        self.key_heads = getattr(text, "num_key_value_heads", None) or self.heads

    def decide(self) -> None:
        """Decide what is cut how. Raises ParameterError."""
        self._check_heads()
        for name, style in self.plan.items():
            if name in self.modules:
                self._plan_module(name, self.modules[name], style)
            else:
                owner, _, key = name.rpartition(".")
                self._plan_parameter(self.modules[owner], key, name, style)
        self._plan_tied()

    def decide_on_experts(self, axis: ExpertAxis, given: Sequence[str] | None) -> None:
        """Decide which rank has which experts, after all else. Raises ParameterError."""
        self.experts = ExpertPlan(axis)
        self.experts.decide(self.model, given, self.boxes, self.forwards)
        self.settings += self.experts.settings

    def apply(self) -> None:
        """Make the process groups, cut the parameters and replace what modules compute. Collective."""
        if self.axis.size > 1:
            self.axis.open()
        if self.experts is not None:
            self.experts.axis.open()
        self._cut()
        for name, forward in self.forwards.items():
            self.modules[name].forward = forward
        self._sum_gradients()
        for module, key, value in self.settings:
            setattr(module, key, value)

    # -- deciding

    def _check_heads(self) -> None:
        size, heads, keys = self.axis.size, self.heads, self.key_heads
        attention = [n for n, s in self.plan.items() if s == "colwise" and n.endswith((*_HEADS, *_FUSED))]
        if not attention or not isinstance(heads, int) or not isinstance(keys, int):
            return
        is_fused = any(name.endswith(_FUSED) for name in attention)  # whose heads cannot be given twice

        def fits(n: int) -> bool:
            return heads % n == 0 and (keys % n == 0 or (n % keys == 0 and not is_fused))

        if not fits(size):
            fitting = [n for n in range(1, heads + 1) if fits(n)]
            raise ParameterError(
                f"tensor parallelism: {size} ranks cannot share {heads} attention heads and {keys} key-value "
                f"heads; sizes that would do: {', '.join(map(str, fitting))}"
            )

    def _plan_module(self, name: str, module: nn.Module, style: str) -> None:
        if style in ("replicate", "local_params"):
            return
        if style == "replicated_with_grad_allreduce":
            self.summed += [(parameter, False) for parameter in module.parameters(recurse=False)]
        elif style == "moe_tp_experts":
            self.forwards[name] = ExpertsForward(module, self.axis)
        elif style == "all_reduce":
            self.forwards[name] = SummedForward(module, self.axis)
        elif style in ("embedding_rowwise", "embedding_colwise"):
            self._plan_embedding(name, module, style)
        elif style in LINEAR:
            self._plan_linear(name, module, style)
        else:
            raise ParameterError(f"tensor parallelism: {name}: {style} is for parameters, not for modules")

    def _plan_linear(self, name: str, module: nn.Module, style: str) -> None:
        if not isinstance(module, nn.Linear) or (
            type(module).forward is not nn.Linear.forward and style.startswith("rowwise")
        ):
            raise ParameterError(
                f"tensor parallelism: {name} is a {type(module).__name__}: {style} is for torch.nn.Linear "
                "(adapters and quantised layers cannot be cut)"
            )
        weight = module.weight
        width = weight.shape[_DIM[style]]
        if style == "colwise_gather_output" and width % self.axis.size:
            self.left_whole.append(
                f"{name} stays whole on each rank: its {width} outputs cannot be divided by {self.axis.size}"
            )
            return
        if name.endswith(_SHARED_HEADS) and style == "colwise" and self._shares_heads():
            self._plan_shared_heads(name, module)
        else:
            parts = 2 if style.startswith("packed") else 1
            self._set(weight, _cut_boxes(weight.shape, _DIM[style], self.axis.size, parts), f"{name}.weight")
            if module.bias is not None and not style.startswith("rowwise"):
                self._set(module.bias, _cut_boxes(module.bias.shape, -1, self.axis.size, parts), name)
        self.forwards[name] = LINEAR[style](module, self.axis)

    def _shares_heads(self) -> bool:
        return isinstance(self.key_heads, int) and self.key_heads < self.axis.size

    def _plan_shared_heads(self, name: str, module: nn.Linear) -> None:
        """Give each rank one key-value head, the one of its query heads; several ranks have the same."""
        size, keys = self.axis.size, self.key_heads
        assert isinstance(keys, int)
        for parameter in (module.weight, module.bias):
            if parameter is not None:
                step = parameter.shape[0] // keys
                starts = [rank * keys // size * step for rank in range(size)]
                rest = tuple(((0, each),) for each in parameter.shape[1:])
                self._set(parameter, tuple((((at, at + step),), *rest) for at in starts), name)
                self.summed.append((parameter, True))
        parent = self.modules[name.rpartition(".")[0]]
        if not isinstance(getattr(parent, "num_key_value_groups", None), int):
            raise ParameterError(
                f"tensor parallelism: {name} has {keys} heads for {size} ranks, and its attention has no "
                f"num_key_value_groups to say so: use at most {keys} ranks"
            )
        assert isinstance(self.heads, int)
        self.settings.append((parent, "num_key_value_groups", self.heads // size))

    def _plan_embedding(self, name: str, module: nn.Module, style: str) -> None:
        if not isinstance(module, nn.Embedding):
            raise ParameterError(f"tensor parallelism: {name} is a {type(module).__name__}, not an Embedding")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ParameterError(f"tensor parallelism: {name}: an embedding with {option} cannot be cut")
        dim = 0 if style == "embedding_rowwise" else 1
        total, size = module.weight.shape[dim], self.axis.size
        if total % size:
            what = "columns" if dim else "rows"
            self.left_whole.append(
                f"{name} stays whole on each rank: its {total} {what} cannot be divided by {size}"
            )
            return
        self._set(module.weight, _cut_boxes(module.weight.shape, dim, size), f"{name}.weight")
        if dim:
            self.forwards[name] = WidthForward(module, self.axis)
            return
        rows = total // size
        first = self.axis.position * rows
        self.forwards[name] = VocabularyForward(module, self.axis, first, rows)

    def _plan_parameter(self, module: nn.Module, key: str, name: str, style: str) -> None:
        parameter = module._parameters[key]
        assert parameter is not None
        if style == "replicated_with_grad_allreduce":
            self.summed.append((parameter, False))
        elif style in _DIM:
            if parameter.dim() == 1 and style.endswith("rowwise"):
                return  # a bias, which is added to the sum
            dim = _DIM[style] if parameter.dim() > 1 else -1
            parts = 2 if style.startswith("packed") else 1
            self._set(parameter, _cut_boxes(parameter.shape, dim, self.axis.size, parts), name)
        elif style not in ("replicate", "local_params"):
            raise ParameterError(f"tensor parallelism: {name}: {style} is for modules, not for parameters")

    def _plan_tied(self) -> None:
        """Let embeddings that share a cut weight with a head look up its part; refuse other sharing."""
        for identity, users in self.users.items():
            if identity not in self.boxes:
                continue
            for name, key in users:
                module = self.modules[name]
                if name in self.forwards or f"{name}.{key}" in self.plan or name in self.plan:
                    continue
                if not isinstance(module, nn.Embedding):
                    raise ParameterError(
                        f"tensor parallelism: {self.names[identity]} is cut, and {name} uses it, too, which "
                        "has no style: give it one in tensor_parallel.plan"
                    )
                self._plan_embedding(name, module, "embedding_rowwise")
            kept = {name for name, _ in users if name in self.plan and name not in self.forwards}
            if kept & {
                name for name, _ in users if isinstance(self.modules[name], (nn.Linear, nn.Embedding))
            }:
                raise ParameterError(
                    f"tensor parallelism: {self.names[identity]} is cut for one of its modules and whole for "
                    f"another ({', '.join(sorted(kept))}): give them styles that fit in tensor_parallel.plan"
                )

    def decide_on_loss(self) -> None:
        """Let a Hugging Face model compute its loss from the parts of the logits. Raises ParameterError."""
        model = self.model
        find_head: Any = getattr(model, "get_output_embeddings", None)
        head: Any = None if find_head is None else find_head()
        names = [name for name, module in self.modules.items() if module is head and name in self.forwards]
        if not names or getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
            raise ParameterError(
                "tensor_parallel.vocab_parallel_loss needs a Hugging Face model with the loss ForCausalLM, "
                f"whose head is cut by its plan; {type(model).__name__} is not one"
            )
        self.forwards[names[0]] = LINEAR["colwise"](head, self.axis)
        self.settings.append((model, "loss_function", VocabularyLoss(self.axis)))

    def _set(self, parameter: Tensor, boxes: tuple[Box, ...] | None, name: str) -> None:
        if boxes is None:
            raise ParameterError(
                f"tensor parallelism: {name} of shape {list(parameter.shape)} cannot be divided by "
                f"{self.axis.size}"
            )
        if self.boxes.setdefault(id(parameter), boxes) != boxes:
            raise ParameterError(f"tensor parallelism: {name} would be cut in two ways: its modules share it")

    # -- doing

    def _cut(self) -> None:
        """Give every parameter rank 0's values, and those that are cut their parts."""
        axis = self.axis
        among_experts = {} if self.experts is None else self.experts.boxes
        with torch.no_grad():
            for parameter in self.model.parameters():
                boxes = self.boxes.get(id(parameter)) or among_experts.get(id(parameter))
                unit = owner_of(parameter)
                if unit is None:
                    whole = parameter.detach().to(axis.comm.device, copy=True).contiguous()
                    axis.comm.broadcast(whole.view(-1).view(torch.uint8))
                elif boxes is None:
                    continue  # of zero.Init: equal on all ranks already
                else:
                    unit.wait_unsharded()
                    whole = parameter.detach().clone()
                    unit.hand_over(parameter)
                if boxes is None:
                    parameter.data = whole
                    continue
                of_experts = id(parameter) in among_experts
                place = self.experts.axis if of_experts and self.experts is not None else axis
                cut = Cut(tuple(whole.shape), boxes, place.position, place.gather_all, of_experts)
                parameter.data = cut.part(whole)
                mark(parameter, cut)
        for name, forward in self.forwards.items():
            module: Any = self.modules[name]
            if isinstance(forward, VocabularyForward) and module.padding_idx is not None:
                local = int(module.padding_idx) - forward.first
                module.padding_idx = local if 0 <= local < forward.rows else None

    def _sum_gradients(self) -> None:
        groups: dict[tuple[int, ...], Any] = {}
        for parameter, among_equal in self.summed:
            group = None
            if among_equal:
                cut = cut_of(parameter)
                assert cut is not None
                for box in dict.fromkeys(cut.boxes):
                    places = tuple(i for i, other in enumerate(cut.boxes) if other == box)
                    if places not in groups:
                        groups[places] = self.axis.make_group(places)
                    if self.axis.position in places:
                        group = groups[places]
            was_trained = parameter.requires_grad
            parameter.requires_grad_()
            parameter.register_hook(GradientSum(self.axis, group))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(was_trained)


def _cut_boxes(shape: Sequence[int], dim: int, size: int, parts: int = 1) -> tuple[Box, ...] | None:
    """Return the parts of a tensor cut along a dimension, which packs several tensors of one size; None where
    they cannot be equal.
    """
    dim %= len(shape)
    if shape[dim] % (size * parts):
        return None
    packed = shape[dim] // parts
    step = packed // size
    found = []
    for rank in range(size):
        ranges = tuple(
            (part * packed + rank * step, part * packed + (rank + 1) * step) for part in range(parts)
        )
        found.append(tuple(ranges if each == dim else ((0, length),) for each, length in enumerate(shape)))
    return tuple(found)
