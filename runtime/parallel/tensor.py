"""Shards a model's parameters by its plan, and lets its modules compute on the shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.axis import Axis
from ..comm.collectives import Comm
from ..comm.nodes import divides_layers
from ..comm.shard_spec import Box, ShardSpec, set_spec, spec_of
from ..config import Config
from ..environment import read_environment
from ..errors import ParameterError
from ..log import counted, detail, say
from ..models import text_config
from ..zero.unit import owner_of
from .checks import Agreement, LoneUses, SameOutputs, uses_dropout
from .collectives import GradientSum
from .expert import DispatchForward, ExpertPlan, open_expert_axis, shard_of_experts
from .forwards import (
    LINEAR,
    ColumnForward,
    ExpertsForward,
    LatentForward,
    LossHeadForward,
    PackedColumnForward,
    RowForward,
    SharedForward,
    SummedForward,
    VocabularyForward,
    WidthForward,
)
from .plans import find_plan, keep_states_full
from .tensor_axis import LAYER, ShardRng, TensorAxis, shard_of_layer
from .token_shards import TOKEN_ADVICE, TokenShards, find_blocks
from .uses import LAYER_ADVICE, ReplicatedUses
from .vocabulary_loss import VocabularyLoss

# -- decide -----------------------------------------------------------------------------------------
#
# Decides by names and shapes which parameters of a model are sharded how, and what its modules compute then.


_DIM = {"colwise": -2, "colwise_gather_output": -2, "packed_colwise": -2}
_DIM |= {"rowwise": -1, "rowwise_split_input": -1, "packed_rowwise": -1}
_SHARED_HEADS = ("k_proj", "v_proj")
_HEADS = ("q_proj", "k_proj")
_FUSED = ("qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj")
_DIFFERENT = "different"
_SHOWN = 10


class Decision:
    """Holds what is decided: nothing is changed before all of it is."""

    def __init__(self, model: nn.Module, plan: dict[str, str], axis: TensorAxis) -> None:
        self.model = model
        self.plan = plan
        self.axis = axis
        self.modules = dict(model.named_modules())
        self.names: dict[int, str] = {}
        self.users: dict[int, list[tuple[str, str]]] = {}
        for name, module in self.modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.names.setdefault(id(parameter), f"{name}.{key}" if name else key)
                    self.users.setdefault(id(parameter), []).append((name, key))
        self.boxes: dict[int, tuple[Box, ...]] = {}
        """The shards of each parameter that is sharded, by its id."""
        self.summed: list[tuple[Tensor, bool]] = []
        """Parameters whose gradients are summed over the axis, or over the ranks that have equal shards."""
        self.forwards: dict[str, Any] = {}
        self.settings: list[tuple[nn.Module, str, Any]] = []
        """Attributes of modules that get other values."""
        self.replicated: list[str] = []
        self.loss: VocabularyLoss | None = None
        """Computes the loss from shards of the logits."""
        self.tokens: TokenShards | None = None
        """Divides the tokens between sharded layers."""
        self.experts: ExpertPlan | None = None
        text = text_config(model)
        self.heads = _number(text, "num_attention_heads")
        self.key_heads = _number(text, "num_key_value_heads") or self.heads

    def decide(self) -> None:
        """Decide what is sharded how. Raises ParameterError."""
        self._check_heads()
        for name, style in self.plan.items():
            if name in self.modules:
                self._plan_module(name, self.modules[name], style)
            else:
                owner, _, key = name.rpartition(".")
                if owner not in self.modules:
                    raise ParameterError(
                        f"tensor parallelism: {owner} is another name of the same module: use the first "
                        "name for its parameter"
                    )
                self._plan_parameter(self.modules[owner], key, name, style)
        self._plan_tied()
        self._refuse_shards_alone()

    def check_forwards(self) -> None:
        """Raise ParameterError if a module whose forward is replaced has one that is not its class's."""
        for name in self.forwards:
            if "forward" in vars(self.modules[name]):
                raise ParameterError(
                    f"{name}.forward was replaced on the instance, and tensor parallelism would not call "
                    "it. Define a class with that forward"
                )

    def decide_on_experts(self, axis: Axis, given: Sequence[str] | None) -> None:
        """Decide which rank has which experts, after all else. Raises ParameterError."""
        self.experts = ExpertPlan(axis)
        self.experts.decide(self.model, given, self.boxes, self.forwards)
        self.settings += self.experts.settings

    def _check_heads(self) -> None:
        size = self.axis.size
        heads = self.heads
        keys = self.key_heads
        attention = [n for n, s in self.plan.items() if s == "colwise" and n.endswith((*_HEADS, *_FUSED))]
        if attention and _DIFFERENT in (heads, keys):
            raise ParameterError(
                f"tensor parallelism: the layers of {type(self.model).__name__} have different numbers of "
                "heads, which is not supported"
            )
        if not attention or not isinstance(heads, int) or not isinstance(keys, int):
            return
        is_fused = any(name.endswith(_FUSED) for name in attention)  # whose heads cannot be given twice

        def fits(n: int) -> bool:
            return heads % n == 0 and (keys % n == 0 or (n % keys == 0 and not is_fused))

        if not fits(size):
            fitting = [n for n in range(1, heads + 1) if fits(n)]
            raise ParameterError(
                f"tensor parallelism: cannot shard {counted(heads, 'attention head')} and "
                f"{counted(keys, 'key-value head')} over {size} ranks; possible sizes: "
                f"{', '.join(map(str, fitting))}"
            )

    def _plan_module(self, name: str, module: nn.Module, style: str) -> None:
        if style in ("replicate", "local_params"):
            return
        if style == "replicated_with_grad_allreduce":
            self.summed += [(parameter, False) for parameter in module.parameters(recurse=False)]
        elif style == "moe_tp_experts":
            self.forwards[name] = ExpertsForward(module, self.axis)
        elif style == "mla_kv_a_proj":
            parent = self.modules[name.rpartition(".")[0]]
            shared = getattr(parent, "qk_rope_head_dim", None)
            if not isinstance(shared, int):
                raise ParameterError(
                    f"tensor parallelism: {name}: {style} needs its parent's qk_rope_head_dim"
                )
            self.forwards[name] = LatentForward(module, self.axis, shared)
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
                f"tensor parallelism: {name} is {_kind(module)}: {style} is for torch.nn.Linear (adapters "
                "and quantized layers cannot be sharded)"
            )
        weight = self._plain_weight(name, module)
        if weight.dim() != 2:
            raise ParameterError(
                f"tensor parallelism: {name} holds several experts ({list(weight.shape)}): shard them with "
                "parallel.expert in the config"
            )
        width = weight.shape[_DIM[style]]
        if style == "colwise_gather_output" and width % self.axis.size:
            self.replicated.append(
                f"{name} is replicated: its {width} outputs cannot be divided by {self.axis.size}"
            )
            return
        if name.endswith(_SHARED_HEADS) and style == "colwise" and self._shares_heads():
            self._plan_shared_heads(name, module)
        else:
            packs = 2 if style.startswith("packed") else 1
            self._shard(weight, _DIM[style], f"{name}.weight", packs)
            if module.bias is not None and not style.startswith("rowwise"):
                self._shard(module.bias, -1, name, packs)
        self.forwards[name] = LINEAR[style](module, self.axis)

    def _refuse_shards_alone(self) -> None:
        """Refuse styles of parameters of modules that would compute with shards as if those were full."""
        for name in self.plan:
            owner, _, key = name.rpartition(".")
            module = self.modules.get(owner)
            if name in self.modules or not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            if id(module._parameters[key]) in self.boxes and owner not in self.forwards:
                raise ParameterError(
                    f"tensor parallelism: {name} belongs to {_kind(module)}: set the style on the module, "
                    f"{owner}"
                )

    def _plain_weight(self, name: str, module: nn.Linear | nn.Embedding) -> Tensor:
        """Return a module's weight. Raises ParameterError where that, or a bias, is computed from others."""
        for key in ("weight", "bias"):
            if getattr(module, key, None) is not None and key not in module._parameters:
                raise ParameterError(
                    f"tensor parallelism: {name}.{key} is computed from other parameters (parametrization, "
                    "weight norm or pruning) and cannot be sharded: remove the module from the plan, or "
                    "remove that wrapper"
                )
        return module.weight

    def _shares_heads(self) -> bool:
        return isinstance(self.key_heads, int) and self.key_heads < self.axis.size

    def _plan_shared_heads(self, name: str, module: nn.Linear) -> None:
        """Give each rank one key-value head, the one of its query heads; several ranks have the same."""
        size = self.axis.size
        keys = self.key_heads
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
                f"num_key_value_groups: use at most {keys} ranks"
            )
        assert isinstance(self.heads, int)
        self.settings.append((parent, "num_key_value_groups", self.heads // size))

    def _plan_embedding(self, name: str, module: nn.Module, style: str) -> None:
        if not isinstance(module, nn.Embedding):
            raise ParameterError(f"tensor parallelism: {name} is {_kind(module)}, not an Embedding")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ParameterError(
                    f"tensor parallelism: {name}: an embedding with {option} cannot be sharded"
                )
        weight = self._plain_weight(name, module)
        dim = 0 if style == "embedding_rowwise" else 1
        total = weight.shape[dim]
        size = self.axis.size
        if total % size:
            what = "columns" if dim else "rows"
            self.replicated.append(f"{name} is replicated: its {total} {what} cannot be divided by {size}")
            return
        self._shard(weight, dim, f"{name}.weight")
        if dim:
            self.forwards[name] = WidthForward(module, self.axis)
            return
        rows = total // size
        first = self.axis.rank * rows
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
            packs = 2 if style.startswith("packed") else 1
            self._shard(parameter, dim, name, packs)
        elif style not in ("replicate", "local_params"):
            raise ParameterError(f"tensor parallelism: {name}: {style} is for modules, not for parameters")

    def _plan_tied(self) -> None:
        """Let embeddings that share a sharded weight with a head look up its shard; refuse other sharing."""
        for identity, users in self.users.items():
            if identity not in self.boxes:
                continue
            for name, key in users:
                module = self.modules[name]
                if name in self.forwards or f"{name}.{key}" in self.plan or name in self.plan:
                    continue
                if not isinstance(module, nn.Embedding):
                    raise ParameterError(
                        f"tensor parallelism: {self.names[identity]} is sharded, but {name} also uses it "
                        "and has no style: set one in tensor_parallel.plan"
                    )
                self._plan_embedding(name, module, "embedding_rowwise")
            kept = {name for name, _ in users if name in self.plan and name not in self.forwards}
            if kept & {
                name for name, _ in users if isinstance(self.modules[name], (nn.Linear, nn.Embedding))
            }:
                raise ParameterError(
                    f"tensor parallelism: {self.names[identity]} is sharded for one of its modules but "
                    f"replicated for another ({', '.join(sorted(kept))}): set matching styles in "
                    "tensor_parallel.plan"
                )

    def decide_on_tokens(self) -> None:
        """Let the ranks divide the tokens between sharded layers, after all else but experts and the loss.
        Raises ParameterError.
        """
        if uses_dropout(self.model):
            raise ParameterError(
                "tensor_parallel.sequence_parallel: the model has dropout, which is not supported: set all "
                "probabilities to 0, in its modules and its config"
            )
        columns = []
        rows = []
        others = []
        for name, forward in self.forwards.items():
            if type(forward) in (ColumnForward, PackedColumnForward):
                columns.append(name)
            elif type(forward) is RowForward:
                rows.append(name)
            else:
                others.append(name)
        found = find_blocks(self.modules, columns, rows, others)
        known = {id(parameter) for parameter, _ in self.summed}
        self.summed += [(each, False) for each in found.summed if id(each) not in known]
        self.tokens = TokenShards(self.axis, found)
        for name in found.names:
            self.forwards[name].region = self.tokens.regions[name.rpartition(".")[0]]

    def decide_on_loss(self, *, chunked: bool) -> None:
        """Let a Hugging Face model compute its loss from the shards of the logits, in chunks if there are
        many. Raises ParameterError.
        """
        model = self.model
        find_head: Any = getattr(model, "get_output_embeddings", None)
        head: Any = None if find_head is None else find_head()
        heads = [name for name, module in self.modules.items() if module is head]
        names = [name for name in heads if isinstance(self.forwards.get(name), ColumnForward)]
        width = getattr(head, "out_features", 0)
        if heads and heads[0] not in self.forwards and width % self.axis.size:
            raise ParameterError(
                f"tensor_parallel.vocab_parallel_loss: {heads[0]} has {counted(width, 'word')}, which cannot "
                f"be divided by {self.axis.size}: pad the vocabulary (resize_token_embeddings with "
                f"pad_to_multiple_of={self.axis.size}), or remove the key"
            )
        if not names or getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
            raise ParameterError(
                "tensor_parallel.vocab_parallel_loss needs a Hugging Face model with the loss ForCausalLM, "
                f"whose plan shards the head by columns; {type(model).__name__} is not one"
            )
        self.loss = VocabularyLoss(self.axis, width, chunked=chunked)
        self.forwards[names[0]] = LossHeadForward(head, self.axis, self.loss)
        self.settings.append((model, "loss_function", self.loss))

    def _shard(self, parameter: Tensor, dim: int, name: str, packs: int = 1) -> None:
        boxes = _even_boxes(parameter.shape, dim, self.axis.size, packs)
        if boxes is None:
            width = parameter.shape[dim]
            fitting = [str(n) for n in range(1, width + 1) if width % (n * packs) == 0]
            sizes = ", ".join(fitting[:_SHOWN] + ["..."] * (len(fitting) > _SHOWN))
            raise ParameterError(
                f"tensor parallelism: {name} of shape {list(parameter.shape)} cannot be divided by "
                f"{self.axis.size}{'; possible sizes: ' if sizes else ''}{sizes}"
            )
        self._set(parameter, boxes, name)

    def _set(self, parameter: Tensor, boxes: tuple[Box, ...], name: str) -> None:
        if self.boxes.setdefault(id(parameter), boxes) != boxes:
            raise ParameterError(
                f"tensor parallelism: two modules share {name}, but their styles shard it in different ways"
            )


def _even_boxes(shape: Sequence[int], dim: int, size: int, packs: int = 1) -> tuple[Box, ...] | None:
    """Return the shards of a tensor along a dimension, which packs several tensors of one size; None where
    they cannot be equal.
    """
    dim %= len(shape)
    if shape[dim] % (size * packs):
        return None
    packed = shape[dim] // packs
    step = packed // size
    found = []
    for rank in range(size):
        ranges = tuple(
            (pack * packed + rank * step, pack * packed + (rank + 1) * step) for pack in range(packs)
        )
        found.append(tuple(ranges if each == dim else ((0, length),) for each, length in enumerate(shape)))
    return tuple(found)


def _kind(module: nn.Module) -> str:
    """Return a module's class with an article, and with where it is from unless that is torch."""
    kind = type(module)
    name = kind.__name__ if kind.__module__.startswith("torch.") else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _number(config: Any, name: str) -> Any:
    """Return a number of a model's config; None without one, _DIFFERENT where its layers have several."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' configs raise it for what differs between layers
        return _DIFFERENT


# -- apply ------------------------------------------------------------------------------------------


def share_layers(model: nn.Module, config: Config, comm: Comm) -> None:
    """Shard the model for the ranks that share each layer, and those that have different experts, if there
    are several. All values are rank 0's then.

    Parameters stay the same objects, plain ones of their shard's shape. Collective. Raises ParameterError for
    what cannot be sharded, and for a model that an earlier engine has sharded.
    """
    _refuse_sharded(model)
    if not divides_layers(comm):
        return
    axis = TensorAxis(comm)
    work = None
    problem = None
    try:
        section = config.tensor_parallel
        plan = find_plan(model, section.plan, section.partition_config) if axis.size > 1 else {}
        work = Decision(model, plan, axis)
        work.decide()
        if config.tensor_parallel.sequence_parallel and axis.size > 1:
            work.decide_on_tokens()
        if config.tensor_parallel.vocab_parallel_loss and axis.size > 1:
            work.decide_on_loss(chunked=config.activation_checkpointing.chunked_loss)
        if comm.experts is not None:
            work.decide_on_experts(Axis(comm, "expert"), config.expert_parallel.experts)
        work.check_forwards()
    except ParameterError as error:
        problem = str(error)
    for rank, said in enumerate(comm.exchange(problem)):
        if said is not None:
            raise ParameterError(said if said == problem else f"on rank {rank}: {said}")
    assert work is not None
    apply(work)
    if comm.mesh.pipeline == 1:
        keep_states_full(model)
    if axis.size > 1:
        has_dropout = uses_dropout(model)
        if has_dropout:
            axis.shard_rng = ShardRng(axis.rank, comm.device)
        advice = LAYER_ADVICE if work.tokens is None else TOKEN_ADVICE
        replicated = ReplicatedUses(model, axis, LAYER, _with_local_gradients(work), advice)
        uses = LoneUses(model, {key: work.names[key] for key in work.boxes}, work.forwards, replicated)
        in_backward = config.zero_optimization.step_in_backward
        agreement = Agreement(axis, has_dropout, uses, steps_in_backward=in_backward)
        model.register_forward_pre_hook(agreement, with_kwargs=True)
        if work.loss is not None:
            model.register_forward_pre_hook(work.loss.begin)
        outputs = SameOutputs(axis, uses, work.loss)
        model.register_forward_hook(outputs, always_call=True)
    if comm.rank == 0:
        _tell(work)


def _with_local_gradients(work: Decision) -> set[int]:
    """Return the ids of parameters that ranks which share layers have different shards of, or whose gradients
    they sum by the plan.
    """
    size = work.axis.size
    found = {id(parameter) for parameter, _ in work.summed}
    among_experts = {} if work.experts is None else work.experts.boxes
    for identity, boxes in (*work.boxes.items(), *among_experts.items()):
        if len(set(boxes[:size])) > 1:  # of the first ranks that share layers, and so of all
            found.add(identity)
    return found


def _refuse_sharded(model: nn.Module) -> None:
    """Raise ParameterError for a model, or a copy of one, whose modules compute with shards already."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), (SharedForward, DispatchForward)):
            raise ParameterError(
                f"{name or type(module).__name__} holds only this rank's shard, from an earlier engine: "
                "rebuild the model, and load the state_dict of the sharded one"
            )


def _tell(work: Decision) -> None:
    """Say what is shared."""
    axis = work.axis
    experts = work.experts
    if axis.size > 1:
        samples = axis.comm.mesh.samples
        crossing = _crosses_nodes(axis.size)
        groups = "1 data-parallel group" if samples == 1 else f"{samples} data-parallel groups"
        tell = say if crossing else detail
        tell(
            f"tensor parallelism: {axis.size} ranks per group, {len(work.boxes)} sharded parameters; "
            f"{groups}{crossing}"
        )
        for text in work.replicated:
            detail(f"tensor parallelism: {text}")
    if experts is not None:
        total = max(experts.modules.values())
        detail(
            f"expert parallelism: {total // experts.axis.size} of {total} experts per rank in "
            f"{len(experts.modules)} module(s), {experts.axis.size} ranks per group"
        )


def _crosses_nodes(size: int) -> str:
    local = read_environment().local_world_size
    if local % size == 0:
        return ""
    return (
        f"; warning: groups of {size} ranks span nodes of {local} ranks, and each layer waits for the network"
    )


def apply(work: Decision) -> None:
    """Make the process groups, shard the parameters and replace what modules compute. Collective."""
    if work.axis.size > 1:
        work.axis.open()
    if work.experts is not None:
        open_expert_axis(work.experts.axis)
    _shard_parameters(work)
    siblings: dict[str, list[nn.Linear]] = {}
    for name, forward in work.forwards.items():
        forward.name = name
        work.modules[name].forward = forward
        if isinstance(forward, (ColumnForward, RowForward)):
            layers = siblings.setdefault(name.rpartition(".")[0], [])
            if isinstance(forward.module, nn.Linear):
                layers.append(forward.module)
            if isinstance(forward, ColumnForward):
                forward.layers = layers
            if forward.region is not None:
                forward.region.layers = layers
    _sum_gradients(work)
    if work.tokens is not None:
        work.tokens.install()
    for module, key, value in work.settings:
        setattr(module, key, value)


def _shard_parameters(work: Decision) -> None:
    """Give every parameter rank 0's values, and those that are sharded their shards."""
    axis = work.axis
    among_experts = {} if work.experts is None else work.experts.boxes
    with torch.no_grad():
        for parameter in work.model.parameters():
            boxes = work.boxes.get(id(parameter)) or among_experts.get(id(parameter))
            unit = owner_of(parameter)
            if unit is None:
                full = parameter.detach().to(axis.comm.device, copy=True).contiguous()
                axis.comm.broadcast(full.view(-1).view(torch.uint8))
            elif boxes is None:
                continue  # of zero.Init: equal on all ranks already
            else:
                unit.wait_unsharded()
                full = parameter.detach().clone()
                unit.hand_over(parameter)
            if boxes is None:
                parameter.data = full
                continue
            of_experts = id(parameter) in among_experts
            place, gather = shard_of_layer(axis)
            if of_experts and work.experts is not None:
                place, gather = shard_of_experts(work.experts.axis)
            spec = ShardSpec(tuple(full.shape), boxes, place, gather, of_experts)
            parameter.data = spec.shard(full)
            set_spec(parameter, spec)
    for name, forward in work.forwards.items():
        module: Any = work.modules[name]
        if isinstance(forward, VocabularyForward) and module.padding_idx is not None:
            local = int(module.padding_idx) - forward.first
            module.padding_idx = local if 0 <= local < forward.rows else None


def _sum_gradients(work: Decision) -> None:
    for parameter, among_equal in work.summed:
        channel = LAYER
        if among_equal:
            spec = spec_of(parameter)
            assert spec is not None
            for box in dict.fromkeys(spec.boxes):
                places = tuple(i for i, other in enumerate(spec.boxes) if other == box)
                if not work.axis.has_group(places):
                    work.axis.make_group(places, places=places)
                if work.axis.rank in places:
                    channel = replace(LAYER, group=places)
        was_trained = parameter.requires_grad
        parameter.requires_grad_()
        parameter.register_hook(GradientSum(work.axis, channel))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(was_trained)
