"""Cuts a model's parameters by its plan, and lets its modules compute on the parts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Comm
from ..config import Config
from ..cut import Cut, cut_of, mark
from ..environment import read_environment
from ..errors import ParameterError
from ..expert_parallel.axis import ExpertAxis
from ..expert_parallel.forward import DispatchForward
from ..log import detail, say
from ..mesh.choice import divides_layers
from ..zero.unit import owner_of
from .agreement import Agreement, SameOutputs, uses_dropout
from .axis import TensorAxis
from .decide import Decision
from .forwards import (
    GradientSum,
    SharedForward,
    VocabularyForward,
)
from .lone_uses import LoneUses
from .own_numbers import OwnNumbers
from .plan import find_plan
from .whole_states import keep_states_whole
from .whole_uses import WholeUses


def share_layers(model: nn.Module, config: Config, comm: Comm) -> None:
    """Cut the model for the ranks that share each layer, and those that have different experts, if there are
    several. All values are rank 0's then.

    Parameters stay the same objects, plain ones of their part's shape. Collective. Raises ParameterError for
    what cannot be cut, and for a model that an earlier engine has cut.
    """
    _refuse_cut(model)
    if not divides_layers(comm):
        return
    axis, work, problem = TensorAxis(comm), None, None
    try:
        plan = find_plan(model, config.tensor_parallel.plan) if axis.size > 1 else {}
        work = Decision(model, plan, axis)
        work.decide()
        if config.tensor_parallel.vocab_parallel_loss and axis.size > 1:
            work.decide_on_loss()
        if comm.experts is not None:
            work.decide_on_experts(ExpertAxis(comm), config.expert_parallel.experts)
        work.check_forwards()
    except ParameterError as error:
        problem = str(error)
    for rank, said in enumerate(comm.exchange(problem)):
        if said is not None:
            raise ParameterError(said if said == problem else f"on rank {rank}: {said}")
    assert work is not None
    apply(work)
    if comm.mesh.pipeline == 1:
        keep_states_whole(model)
    if axis.size > 1:
        has_dropout = uses_dropout(model)
        if has_dropout:
            axis.own_numbers = OwnNumbers(axis.position, comm.device)
        wholes = WholeUses(model, axis, _parts(work))
        uses = LoneUses(model, {key: work.names[key] for key in work.boxes}, work.forwards, wholes)
        in_backward = config.zero_optimization.step_in_backward
        agreement = Agreement(axis, has_dropout, uses, steps_in_backward=in_backward)
        model.register_forward_pre_hook(agreement, with_kwargs=True)
        outputs = SameOutputs(axis, config.tensor_parallel.vocab_parallel_loss)
        model.register_forward_hook(outputs, always_call=True)
    if comm.rank == 0:
        _tell(work)


def _parts(work: Decision) -> set[int]:
    """Return the ids of parameters that ranks which share layers have different parts of, or whose gradients
    they sum by the plan.
    """
    size, found = work.axis.size, {id(parameter) for parameter, _ in work.summed}
    among_experts = {} if work.experts is None else work.experts.boxes
    for identity, boxes in (*work.boxes.items(), *among_experts.items()):
        if len(set(boxes[:size])) > 1:  # of the first ranks that share layers, and so of all
            found.add(identity)
    return found


def _refuse_cut(model: nn.Module) -> None:
    """Raise ParameterError for a model, or a copy of one, whose modules compute with parts already."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), (SharedForward, DispatchForward)):
            raise ParameterError(
                f"{name or type(module).__name__} holds only this rank's shard, from an earlier engine: "
                "rebuild the model, and load the state_dict of the sharded one"
            )


def _tell(work: Decision) -> None:
    """Say what is shared."""
    axis, experts = work.axis, work.experts
    if axis.size > 1:
        samples, crossing = axis.comm.mesh.samples, _crosses_nodes(axis.size)
        groups = "1 data-parallel group" if samples == 1 else f"{samples} data-parallel groups"
        tell = say if crossing else detail
        tell(
            f"tensor parallelism: {axis.size} ranks per group, {len(work.boxes)} sharded parameters; "
            f"{groups}{crossing}"
        )
        for text in work.left_whole:
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
    """Make the process groups, cut the parameters and replace what modules compute. Collective."""
    if work.axis.size > 1:
        work.axis.open()
    if work.experts is not None:
        work.experts.axis.open()
    _cut(work)
    for name, forward in work.forwards.items():
        forward.name, work.modules[name].forward = name, forward
    _sum_gradients(work)
    for module, key, value in work.settings:
        setattr(module, key, value)


def _cut(work: Decision) -> None:
    """Give every parameter rank 0's values, and those that are cut their parts."""
    axis = work.axis
    among_experts = {} if work.experts is None else work.experts.boxes
    with torch.no_grad():
        for parameter in work.model.parameters():
            boxes = work.boxes.get(id(parameter)) or among_experts.get(id(parameter))
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
            place = work.experts.axis if of_experts and work.experts is not None else axis
            cut = Cut(tuple(whole.shape), boxes, place.position, place.gather_state, of_experts)
            parameter.data = cut.part(whole)
            mark(parameter, cut)
    for name, forward in work.forwards.items():
        module: Any = work.modules[name]
        if isinstance(forward, VocabularyForward) and module.padding_idx is not None:
            local = int(module.padding_idx) - forward.first
            module.padding_idx = local if 0 <= local < forward.rows else None


def _sum_gradients(work: Decision) -> None:
    made: set[tuple[int, ...]] = set()
    for parameter, among_equal in work.summed:
        use: Hashable = "passes"
        if among_equal:
            cut = cut_of(parameter)
            assert cut is not None
            for box in dict.fromkeys(cut.boxes):
                places = tuple(i for i, other in enumerate(cut.boxes) if other == box)
                if places not in made:
                    made.add(places)
                    work.axis.make_group(places, places)
                if work.axis.position in places:
                    use = places
        was_trained = parameter.requires_grad
        parameter.requires_grad_()
        parameter.register_hook(GradientSum(work.axis, use))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(was_trained)
