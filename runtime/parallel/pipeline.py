"""Finds the layers that a model calls one after the other, and divides them into the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..comm.axis import Axis, Channel
from ..comm.shard_spec import Box, ShardSpec, full_box, set_spec, spec_of
from ..errors import ParameterError
from ..zero import placeholder
from ..zero.tensors import tensors_in
from ..zero.unit import owner_of
from .plans import keep_states_full

# -- layers -----------------------------------------------------------------------------------------


NOTE = "zlaunch_line"
"""Names the attribute of a model that says what its layers are: the name of the module whose children they
are, or a list of modules."""
USES = "zlaunch_uses"
WEIGHTS = "zlaunch_weights"
"""Name the attribute of a layer that lists modules which it computes with but which are registered elsewhere,
and that of a model that has the layers' weights by which they are divided."""


ROUTERS = (
    "pipeline parallelism: the router loss (output_router_logits) needs all layers, but a stage has only "
    "some: set it to false"
)


@dataclass
class LayerSequence:
    """Holds a model's layers in their order, and which part of the pipeline has which."""

    model: nn.Module
    name: str
    layers: list[nn.Module]
    stages: int
    """Ranks of a pipeline; part p is on stage p % stages."""
    bounds: list[int] = field(default_factory=list)
    """The first layer of each part, and the number of layers."""
    loss_fn: Callable[..., Any] | None = None

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return len(self.bounds) - 1

    def part_of(self, index: int) -> int:
        """Return the part that has a layer."""
        return next(part for part in range(self.parts) if index < self.bounds[part + 1])


def find_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name and the members of the list of layers of a model: that of the most parameters.

    Raises ParameterError for a model without one.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ParameterError(ROUTERS)
    noted = getattr(model, NOTE, None)
    if isinstance(noted, str):
        return noted, list(model.get_submodule(noted).children())
    if noted is not None:
        return "", list(noted)
    found = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(each) for each in module}) == 1
    ]
    if not found:
        raise ParameterError(
            f"pipeline parallelism: {type(model).__name__} has no nn.ModuleList of layers of one class to "
            "split; for a list of any layers, use deepspeed.pipe.PipelineModule"
        )
    _, name, module = max(found, key=lambda each: each[0])
    if len({id(each) for each in module}) < len(module):
        raise ParameterError(
            f"pipeline parallelism: {name} uses one module as several layers, which is not supported: use "
            "deepspeed.pipe.PipelineModule"
        )
    return name, list(module)


def modules_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules that a layer computes with."""
    return [each for own in (layer, *getattr(layer, USES, ())) for each in own.modules()]


def weights_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return the weights of the layers: those that the model has noted, or their numbers of elements."""
    noted: Sequence[int] | None = getattr(model, WEIGHTS, None)
    if noted is not None:
        return list(noted)
    owned = [{p for own in (layer, *getattr(layer, USES, ())) for p in own.parameters()} for layer in layers]
    return [sum(parameter.numel() for parameter in each) for each in owned]


def divide(weights: Sequence[int], parts: int, how: str | Sequence[int]) -> list[int]:
    """Return the first layer of each part, and the number of layers.

    ``weights`` are those of the layers; ``how`` is "uniform", "parameters" or "best" (the heaviest part is as
    light as can be), or a list of first layers. Raises ParameterError for fewer layers than parts, and a list
    that does not fit.
    """
    count = len(weights)
    if count < parts:
        raise ParameterError(f"pipeline parallelism: cannot split {count} layers into {parts} parts")
    if not isinstance(how, str):
        bounds = [0, *how, count]
        if len(bounds) != parts + 1 or any(a >= b for a, b in pairwise(bounds)):
            raise ParameterError(
                f"pipeline.partition: {list(how)} does not split {count} layers into {parts} parts: list "
                f"the first layer of parts 2 to {parts}, in ascending order"
            )
        return bounds
    if how == "uniform":
        return [part * count // parts for part in range(parts + 1)]
    return balanced([max(1, weight) for weight in weights], parts)


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Divide so that the heaviest part is as light as can be (the linear partition problem, by bisection)."""
    low = max(weights)
    high = sum(weights)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(weights, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    starts = _filled(weights, low)
    while len(starts) < parts:  # fewer parts would do: cut the longest
        bounds = [*starts, len(weights)]
        sizes = [b - a for a, b in pairwise(bounds)]
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        starts.insert(longest + 1, starts[longest] + sizes[longest] // 2)
    return [*starts, len(weights)]


def _filled(weights: Sequence[int], limit: int) -> list[int]:
    """Return where parts begin that are filled up to a limit, one after the other."""
    starts = [0]
    total = 0
    for index, weight in enumerate(weights):
        if total + weight > limit:
            starts.append(index)
            total = 0
        total += weight
    return starts


# -- shards -----------------------------------------------------------------------------------------
#
# Leaves each rank of a pipeline the parameters of its layers; the others stay, with nothing in them.


CHANNEL = "pipeline"


@dataclass(frozen=True, slots=True)
class StageSpec(ShardSpec):
    """Describes a parameter that some stages have, sharded or full; others have an empty shard."""

    inner: ShardSpec | None = None
    spread: Callable[[Tensor, int], Tensor] | None = None
    """Broadcasts a tensor from a stage. Collective for a pipeline's ranks."""
    owners: tuple[int, ...] = ()
    """The stages that have the parameter."""
    is_here: bool = True
    shared: int = 1
    """Number of ranks of the pipeline and tensor axes that have this shard. Equal on all stages, because
    parameters are grouped into units by it."""

    @property
    def numel(self) -> int:
        """Return the number of elements that the stages which have the parameter have of it."""
        return prod(self.shape) if self.inner is None else self.inner.numel

    @property
    def copies(self) -> int:
        """Return how many ranks have a shard that is equal to this rank's."""
        return self.shared

    def __deepcopy__(self, memo: Any) -> StageSpec:
        return self

    def unshard(self, shard: Tensor) -> Tensor:
        """Gather the full tensor on all stages. Collective for a pipeline's ranks."""
        assert self.spread is not None
        if not self.is_here:
            full = shard.new_empty(self.shape)
        else:
            full = shard.detach() if self.inner is None else self.inner.unshard(shard)
        return self.spread(full.contiguous(), self.owners[0])


_TIED = Channel(
    "pipeline: sums gradients of tied parameters",
    "sums gradients of tied parameters in its pipeline",
    "pipeline",
)
BATCH = Channel("pipeline: compares its batch", "compares its batch in its pipeline")
_STATE = Channel("pipeline: broadcasts a stage's state", "broadcasts a stage's state in its pipeline")


def sum_tied(tensor: Tensor, axis: Axis, owners: tuple[int, ...]) -> None:
    """Sum a tensor in place over the stages that have a parameter."""
    axis.sum(tensor, replace(_TIED, group=owners))


def owners_of(sequence: LayerSequence) -> dict[int, tuple[int, ...]]:
    """Return the stages that have each parameter, by its id.

    What is registered before the layers goes to the first part, what comes after them to the last; a
    parameter of a module that contains the layers goes to all.
    """
    places: dict[int, set[int]] = {}
    parts_of: dict[int, set[int]] = {}
    for index, layer in enumerate(sequence.layers):
        for each in modules_of(layer):
            parts_of.setdefault(id(each), set()).add(sequence.part_of(index))
    has_passed = False
    for name, module in sequence.model.named_modules():
        has_passed = has_passed or name == sequence.name
        contains = not name or sequence.name == name or sequence.name.startswith(f"{name}.")
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            found = places.setdefault(id(parameter), set())
            if id(module) in parts_of:
                found |= parts_of[id(module)]
            elif contains or parameter.dim() == 0:
                found.update(range(sequence.parts))
            else:
                found.add(sequence.parts - 1 if has_passed else 0)
    return {
        identity: tuple(sorted({part % sequence.stages for part in parts}))
        for identity, parts in places.items()
    }


def keep_local_layers(sequence: LayerSequence, axis: Axis) -> list[nn.Parameter]:
    """Empty the parameters of other stages, and mark all; return those that several stages have. Values are
    rank 0's already. Collective. Raises ParameterError for modules that keep statistics.
    """
    for name, module in sequence.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ParameterError(
                f"pipeline parallelism: {name}, a {type(module).__name__}, keeps running statistics that "
                "only one stage would update: use another norm"
            )
    owners = owners_of(sequence)
    tied = []
    several = sorted({stages for stages in owners.values() if len(stages) > 1})
    for one, other in combinations(several, 2):
        if len(one) == len(other) and set(one) & set(other):
            raise ParameterError(
                f"pipeline parallelism: stages {list(one)} share parameters, and stages {list(other)} share "
                "others: change pipeline.partition so that these sets are equal or disjoint"
            )
    positions = axis.comm.mesh.tensor
    spread = partial(axis.broadcast, channel=_STATE)
    for parameter in sequence.model.parameters():
        unit = owner_of(parameter)
        spec = spec_of(parameter)
        if unit is not None:
            unit.wait_unsharded()
            values = parameter.detach().clone()
            unit.hand_over(parameter)
            parameter.data = values
        shape = tuple(parameter.shape) if spec is None else spec.shape
        stages = owners[id(parameter)]
        is_here = axis.rank in stages
        base = (full_box(shape),) * positions if spec is None else spec.boxes
        place = axis.comm.rank % positions if spec is None else spec.position
        shared = base.count(base[place]) * len(stages)
        of_experts = spec is not None and spec.of_experts
        if is_here:
            boxes = base * len(stages)
            place += stages.index(axis.rank) * len(base)
        else:
            boxes = (_empty(shape),)
            place = 0
            parameter.data = parameter.detach().new_empty([0] * len(shape))
        set_spec(
            parameter,
            StageSpec(shape, boxes, place, None, of_experts, spec, spread, stages, is_here, shared),
        )
        if len(stages) > 1:
            if not axis.has_group(stages):
                axis.make_group(stages, places=stages)
            if is_here:
                tied.append(parameter)
    keep_states_full(sequence.model)
    return tied


def _empty(shape: tuple[int, ...]) -> Box:
    return tuple(((0, 0),) for _ in shape)


# -- trial ------------------------------------------------------------------------------------------
#
# Finds out, in a trial pass through a part of a pipeline, what cannot be divided: values of other stages
# that it computes with, and what its layers keep to themselves.


_OF_SHAPE_ALONE = ("_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")


class ForeignValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Follows values that stand for those of other stages through all operations."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters`` are those that other stages have."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self._parameters = {id(parameter) for parameter in parameters}
        self._kept: dict[int, Tensor] = {}
        """Maps storages to a tensor of each, which keeps it: its number is of no other one."""

    def stand_in(self, value: Any) -> Any:
        """Return a tensor that stands for another stage's; what is no tensor stays as it is."""
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        self._mark(copied)
        return copied

    def are_in(self, value: Any) -> bool:
        """Tell whether some tensor in a value was computed from another stage's."""
        return any(map(self._is_foreign, tensors_in(value)))

    def _mark(self, tensor: Tensor) -> None:
        self._kept[tensor.untyped_storage()._cdata] = tensor

    def _is_foreign(self, tensor: Tensor) -> bool:
        return id(tensor) in self._parameters or tensor.untyped_storage()._cdata in self._kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; what it makes of a foreign value is foreign. Raises ParameterError if that is
        a number.
        """
        found = func(*args, **(kwargs or {}))
        if str(func._schema.name).endswith(_OF_SHAPE_ALONE):
            return found
        given = tree_leaves((args, kwargs or {}))
        if any(isinstance(each, Tensor) and self._is_foreign(each) for each in given):
            made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
            if not made and isinstance(found, (bool, int, float)):
                raise ParameterError(
                    "pipeline parallelism: the model reads a value of another stage, through "
                    f"{func._schema.name.removeprefix('aten::')}"
                )
            for each in made:
                self._mark(each)
        return found


@contextmanager
def trying(sequence: LayerSequence) -> Iterator[ForeignValues]:
    """Run a trial pass, whose changes of buffers are taken back. Raises ParameterError for layers that keep
    something which other stages would need.
    """
    foreign = ForeignValues(p for p in sequence.model.parameters() if placeholder.shape_of(p).numel() == 0)
    before = [
        (module, key, value, value._version, value.clone()) for module, key, value in _buffers(sequence.model)
    ]
    watch = StateWatch(sequence)
    try:
        with foreign:
            yield foreign
        watch.check()
    finally:
        with torch.no_grad():
            for module, key, value, version, copied in before:
                module._buffers[key] = value
                if value._version != version:
                    value.copy_(copied)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None:
                yield module, key, value


class StateWatch:
    """Notices buffers that the passes of a stage change, and tensors that its layers keep as attributes."""

    def __init__(self, sequence: LayerSequence) -> None:
        of_layers = {id(each) for layer in sequence.layers for each in modules_of(layer)}
        self._modules = {
            name: module
            for name, module in sequence.model.named_modules()
            if id(module) in of_layers or next(module.parameters(recurse=False), None) is not None
        }
        self._is_training = sequence.model.training
        self._before = self._states()

    def check(self) -> None:
        """Raise ParameterError for what has changed."""
        after = self._states()
        for (name, key), state in after.items():
            if self._before.get((name, key)) == state:
                continue
            place = f"{name}.{key}".lstrip(".")
            if key in self._modules[name]._buffers:
                raise ParameterError(
                    f"pipeline parallelism: training changes the buffer {place}, which other stages and "
                    "checkpoints would not see"
                )
            raise ParameterError(
                f"pipeline parallelism: the forward pass stores a tensor in {place}, which other stages do "
                "not have, so the loss cannot use it. If it is only a record, store it in evaluation only"
            )

    def _states(self) -> dict[tuple[str, str], tuple[int, int]]:
        found = {}
        for name, module in self._modules.items():
            for key, value in module._buffers.items():
                if value is not None and key not in module._non_persistent_buffers_set:
                    found[name, key] = id(value), value._version
            if self._is_training:
                for key, value in vars(module).items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        found[name, key] = id(value), 0
        return found


# -- passing ----------------------------------------------------------------------------------------
#
# Defines what the layers of other stages do in a forward pass: hand on what they get.


@dataclass
class PartPass:
    """Holds a forward pass through one part of the pipeline."""

    start: int
    stop: int
    received: Any
    """What the part before has handed on; None at the first."""
    captured: Any = None
    """What this part hands on; None at the last."""
    last: Any = None
    """What the last layer that was called has returned."""
    version: int = 0
    """Counts how often that had been changed in place when it was returned."""
    called: int = 0
    """The number of layers that were called."""
    foreign: ForeignValues | None = None
    """Follows what stands for other stages' values, in a trial pass."""

    def stand_in(self, value: Any) -> Any:
        """Return what stands for a value that another stage computes."""
        return value if self.foreign is None else self.foreign.stand_in(value)

    def check_own(self, value: Any, what: str) -> None:
        """Raise ParameterError if a trial pass has computed a value from what other stages have."""
        if self.foreign is not None and self.foreign.are_in(value):
            raise ParameterError(
                f"pipeline parallelism: {what} depends on another stage's values (an output from before or "
                "between the layers, or its parameters); a stage gets only the output of the preceding "
                "layer"
            )


class LayerForward:
    """Replaces a layer's forward: computes it in a pass through its part, and hands on in others what it
    gets, or what this part was given by the one before.
    """

    def __init__(self, module: nn.Module, index: int, passes: Passes) -> None:
        self.module = module
        self.index = index
        self.passes = passes
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if placeholder.in_backward():
            return self._compute(*args, **kwargs)  # a recomputation: only what was computed is
        run = self.passes.run
        if run is None:
            raise ParameterError(
                "pipeline parallelism: a layer was called outside engine.train_batch and eval_batch"
            )
        hidden = args[0] if args else next(iter(kwargs.values()))
        self._check(run, hidden, (args[1:], {k: v for k, v in kwargs.items() if v is not hidden}))
        run.called += 1
        if run.start <= self.index < run.stop:
            run.check_own((args, kwargs), f"an input of {self._name}")
            output = self._compute(*args, **kwargs)
            run.check_own(output, f"the output of {self._name}")
        elif self.index == run.start - 1:
            output = run.received
        else:
            if self.index == run.stop:
                run.captured = hidden
            output = run.stand_in(hidden)
        run.last = output
        run.version = _version(output)
        return output

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def _name(self) -> str:
        return f"{self.passes.sequence.name}.{self.index}".lstrip(".")

    def _check(self, run: PartPass, hidden: Any, rest: Any) -> None:
        """Raise ParameterError if layers do not simply follow each other."""
        name = self._name
        if run.called != self.index:
            raise ParameterError(
                f"pipeline parallelism: {name} is layer {self.index} of the model, but was called as layer "
                f"{run.called}"
            )
        if self.index and (hidden is not run.last or _version(hidden) != run.version):
            raise ParameterError(
                f"pipeline parallelism: the input of {name} is not the output of the preceding layer: the "
                "model computes something between them, or layers return several tensors. (Checkpoints "
                "around layers need use_reentrant=False)"
            )
        if any(tensor.requires_grad for tensor in tensors_in(rest)):
            raise ParameterError(
                f"pipeline parallelism: {name} gets a second tensor that requires a gradient, which stages "
                "cannot send"
            )


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


class Passes:
    """Holds the pass that is going on through a part of the pipeline."""

    def __init__(self, sequence: LayerSequence) -> None:
        self.sequence = sequence
        self.run: PartPass | None = None

    def __deepcopy__(self, memo: Any) -> Passes:
        return self


class NonLayerForward:
    """Replaces the forward of a module outside the layer sequence, such as an embedding or head. The stage
    that owns it computes it. Other stages return a placeholder that nothing reads.
    """

    def __init__(self, module: nn.Module, name: str, is_early: bool, passes: Passes) -> None:
        self.module = module
        self.name = name
        self.is_early = is_early
        self.passes = passes
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module, or stand for it. Raises ParameterError if it is used on the other side of the
        layers than it is registered.
        """
        run = self.passes.run
        sequence = self.passes.sequence
        if run is None or placeholder.in_backward():
            if any(parameter.numel() == 0 for parameter in self.module.parameters()):
                raise ParameterError(
                    f"pipeline parallelism: {self.name}, which is on another stage, was called outside "
                    "engine.train_batch and eval_batch"
                )
            return self._compute(*args, **kwargs)
        if run.called != (0 if self.is_early else len(sequence.layers)):
            when, place = ("after", "before") if self.is_early else ("before", "after")
            raise ParameterError(
                f"pipeline parallelism: {self.name} is used {when} the layers but registered {place} them"
            )
        if (run.start == 0) if self.is_early else (run.stop == len(sequence.layers)):
            return self._compute(*args, **kwargs)
        given: Tensor = args[0] if args else next(iter(kwargs.values()))
        module = self.module
        if isinstance(module, nn.Embedding):
            zero = torch.zeros((), dtype=module.weight.dtype, device=given.device)
            return run.stand_in(zero.expand(*given.shape, module.embedding_dim))
        if isinstance(module, nn.Linear):
            return run.stand_in(given.new_zeros(()).expand(*given.shape[:-1], module.out_features))
        return run.stand_in(given)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def install_forwards(sequence: LayerSequence, passes: Passes) -> None:
    """Replace the forwards of the layers, and of the modules with parameters outside of them.

    Raises ParameterError for a module that cannot be left out.
    """
    layers = {id(each) for layer in sequence.layers for each in modules_of(layer)}
    has_passed = False
    for name, module in sequence.model.named_modules():
        has_passed = has_passed or name == sequence.name
        own = [p for p in module._parameters.values() if p is not None]
        contains = not name or sequence.name == name or sequence.name.startswith(f"{name}.")
        if id(module) in layers or contains or not own:
            continue
        simple = isinstance(module, (nn.Embedding, nn.Linear)) or all(p.dim() < 2 for p in own)
        if not simple or next(module.children(), None) is not None:
            raise ParameterError(
                f"pipeline parallelism: {name}, a {type(module).__name__}, must run on every stage, which "
                "is not supported"
            )
        module.forward = NonLayerForward(module, name, not has_passed, passes)
    for index, layer in enumerate(sequence.layers):
        layer.forward = LayerForward(layer, index, passes)
