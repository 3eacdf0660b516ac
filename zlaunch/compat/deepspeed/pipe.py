"""``deepspeed.pipe``: a list of layers that are called one after the other, and that ranks may divide."""

from __future__ import annotations

import math
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.compat.deepspeed.tools import set_random_seed
from zlaunch.runtime.activation.checkpointing import checkpoint
from zlaunch.runtime.comm.process_group import new_group
from zlaunch.runtime.errors import ParameterError
from zlaunch.runtime.parallel.pipeline import balanced

# -- topology ---------------------------------------------------------------------------------------
#
# ``deepspeed.runtime.pipe.topology``: the ranks' places on named axes, the last one fastest.


def _named(axes: list[str]) -> Any:
    return namedtuple("ProcessCoord", axes)


class ProcessTopology:
    """Numbers the places on axes of so many ranks."""

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = _named(self.axes)
        self.mapping: dict[Any, int] = {}
        for rank, place in enumerate(product(*map(range, self.dims))):
            self.mapping[self.ProcessCoord._make(place)] = rank

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis, 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a place, which names all axes."""
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    def get_coord(self, rank: int) -> Any:
        """Return a rank's place, with the axes as attributes."""
        return list(self.mapping)[rank]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a rank's place as text, such as ``model_01``, without the axes ``omit_axes``."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks at the given positions of some axes."""
        wanted = filter_kwargs.items()
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == position for axis, position in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at a position of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks that differ in their positions on an axis alone."""
        if axis not in self.axes:
            return []
        at = self.axes.index(axis)
        found = dict[tuple[int, ...], list[int]]()
        for place, rank in self.mapping.items():
            found.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(found.values())

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)


class PipeDataParallelTopology(ProcessTopology):
    """Has stages, and ranks of other samples in each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Has a tensor-parallel axis, too."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class _RankGroup(NamedTuple):
    """Holds the ranks of a process group with it."""

    ranks: list[int]
    process_group: Any


class PipelineParallelGrid:
    """Holds this rank's process groups on the axes ``pipe``, ``data`` and ``model`` of a topology.

    Making one is a collective call of all ranks. zlaunch's engines make their own groups: this is for scripts
    that communicate themselves.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        """Make the groups. Without a topology, the prime factors of the number of ranks go to ``pipe`` and
        ``data`` in turn. ``process_group`` is not used, as in DeepSpeed.

        Raises ParameterError where the topology has another number of ranks than there are.
        """
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if topology is None:
            factors = prime_factors(self.world_size)
            topology = PipeDataParallelTopology(math.prod(factors[::2]), math.prod(factors[1::2]))
        self._topo = topology
        if not self._is_grid_valid():
            raise ParameterError(
                f"PipelineParallelGrid: the topology has {topology.world_size()} ranks, and the run "
                f"{self.world_size}: make them equal"
            )
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.model_parallel_size = max(topology.get_dim("model"), 1)
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        replicas = [list(range(self.world_size))]
        if topology.get_dim("data"):
            replicas = [topology.get_axis_list("data", index) for index in range(self.data_parallel_size)]
        model = self._join(replicas)
        self.ds_model_proc_group = model.process_group
        self.ds_model_world_size = len(model.ranks)
        self.ds_model_rank = model.ranks.index(self.global_rank)
        # On an axis that the topology lacks, each rank is alone: a group of None would be all ranks.
        alone = [[rank] for rank in range(self.world_size)]
        self.dp_groups = topology.get_axis_comm_lists("data") or alone
        data = self._join(self.dp_groups)
        self.dp_group = data.ranks
        self.dp_proc_group = data.process_group
        self.pipe_groups = topology.get_axis_comm_lists("pipe") or alone
        stages = self._join(self.pipe_groups)
        self.pp_group = stages.ranks
        self.pp_proc_group = stages.process_group
        self.model_groups = topology.get_axis_comm_lists("model") or alone
        tensor = self._join(self.model_groups)
        self.slice_group = tensor.ranks
        self.slice_proc_group = tensor.process_group
        next_stage: dict[int, int] = {}
        for ranks in self.pipe_groups:
            # The last stage is followed by the first.
            next_stage.update(zip(ranks, ranks[1:] + ranks[:1], strict=True))
        self.p2p_groups = [[rank, next_stage[rank]] for rank in range(self.world_size)]

    def _join(self, groups: Iterable[list[int]]) -> _RankGroup:
        """Make all groups, and return this rank's."""
        made = [_RankGroup(ranks, new_group(ranks)) for ranks in groups]
        return next(group for group in made if self.global_rank in group.ranks)

    def _position(self, axis: str) -> int:
        """Return this rank's position on an axis: 0 if there is no such axis."""
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage that otherwise has this rank's place, or the positions ``kwargs``."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def get_global_rank(self) -> int:
        """Return this rank."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self._position("pipe")

    def get_data_parallel_id(self) -> int:
        """Return this rank's data-parallel rank."""
        return self._position("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of this rank's data-parallel group."""
        return self.dp_group

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return this rank's pipeline-parallel process group."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's data-parallel rank."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the data-parallel size."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return this rank's data-parallel process group."""
        return self.dp_proc_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's model-parallel rank: in the group that holds one replica of the model."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the model-parallel size: the number of ranks that hold one replica of the model."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Return this rank's model-parallel process group, which holds one replica of the model."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's tensor-parallel rank."""
        return self._position("model")

    def get_slice_parallel_world_size(self) -> int:
        """Return the tensor-parallel size."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Return this rank's tensor-parallel process group."""
        return self.slice_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, ascending. Raises ValueError for a number below 1."""
    if number < 1:
        raise ValueError(f"{number} has no prime factors: give a number from 1 on")
    factors = []
    factor = 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors if number == 1 else [*factors, number]


# -- parts ------------------------------------------------------------------------------------------
#
# ``deepspeed.runtime.utils``: divisions of items into parts, as the first item of each part and their number.


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Return the sums of the weights up to each, and with it."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Divide items into parts of equal size; the first have one more if they do not divide. Raises ValueError
    for no parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be 1 or more, got {num_parts}")
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Divide items so that the heaviest part is as light as can be. Raises ValueError for no parts."""
    if len(weights) <= num_parts or num_parts < 1:
        return partition_uniform(len(weights), num_parts)
    if all(isinstance(weight, (int, Integral)) for weight in weights):
        return balanced([int(weight) for weight in weights], num_parts)
    heaviest = float(max(weights)) or 1.0
    return balanced([round(float(weight) / heaviest * 2**40) for weight in weights], num_parts)


# -- pipe -------------------------------------------------------------------------------------------


class LayerSpec:
    """Describes a layer that ``PipelineModule`` makes: ``typename(*module_args, **module_kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """Raise RuntimeError for a class that is no nn.Module."""
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"{type(self).__name__}: {typename!r} is not a subclass of nn.Module")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Describes a layer that all places of the same ``key`` share; ``forward_fn(module, hidden)`` computes
    this place, by default the module itself.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """Take DeepSpeed's arguments; all parameters of the module are shared, whatever
        ``tied_weight_attr``.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


@dataclass
class _Options:
    """Holds what all layers of a PipelineModule do in the same way."""

    interval: int
    recompute: Callable[..., Any]
    names: list[str] | None
    """Classes of the layers to recompute; None for all with parameters."""
    seed: Callable[[int], Any] | None
    """Seeds the random numbers of a layer."""
    base_seed: int
    micro_batch: int = 0


class _Place(nn.Module):
    """Is a layer in its place: a module, which may have several, or a function."""

    def __init__(
        self, index: int, call: Callable[..., Any], module: nn.Module | None, what: _Options
    ) -> None:
        super().__init__()
        self.index = index
        self.call_layer = (call,)
        self.options = what
        self.zlaunch_uses = () if module is None else (module,)
        self.writes = module is not None and any(getattr(m, "inplace", False) for m in module.modules())

    @property
    def is_recomputed(self) -> bool:
        """Tell whether the backward pass computes the layer again."""
        if not self.options.interval or not self.zlaunch_uses:
            return False
        module = self.zlaunch_uses[0]
        names = self.options.names
        if names is not None:
            return type(module).__name__ in names
        return next(module.parameters(), None) is not None

    def forward(self, hidden: Any) -> Any:
        """Compute the layer."""
        if self.writes and isinstance(hidden, Tensor) and hidden.requires_grad and hidden.is_leaf:
            hidden = hidden.clone()  # received from another stage
        number = self.options.base_seed * (self.options.micro_batch + 1) + self.index

        def run(*inputs: Any) -> Any:
            if self.options.seed is not None:
                self.options.seed(number)
            return self.call_layer[0](inputs[0] if len(inputs) == 1 else inputs)

        inputs = hidden if isinstance(hidden, tuple) else (hidden,)
        if self.is_recomputed and torch.is_grad_enabled():
            return self.options.recompute(run, *inputs)
        return run(*inputs)


class PipelineModule(nn.Module):
    """Calls layers one after the other. With several stages ranks have different ones of them, and
    ``engine.train_batch(data_iter)`` trains on pairs of inputs and labels.

    Layers are modules, LayerSpecs and TiedLayerSpecs, which are built here, and functions. Each gets what the
    one before has returned; a stage passes on one tensor.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        """Take DeepSpeed's arguments. ``num_stages`` None takes the config's ``pipeline.stages``.
        ``partition_method`` counts unless the config has ``pipeline.partition``. With
        ``activation_checkpoint_interval`` each layer with parameters, or of ``checkpointable_layers``, is
        recomputed by itself.

        Raises NotInZlaunch for other ways to divide layers and other topologies, ParameterError for what is
        no layer, or a ``type:`` without any layer.
        """
        super().__init__()
        self.num_stages = _stages_of(num_stages, topology)
        self._topology = topology
        self._grid: PipelineParallelGrid | None = None
        self.loss_fn = loss_fn
        self.dynamic_shape = dynamic_shape
        self.seed_layers = seed_layers
        self.seed_fn = seed_fn
        self.base_seed = base_seed
        seed = (seed_fn or set_random_seed) if seed_layers else None
        self._options = _Options(
            activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers, seed, base_seed
        )
        self._layer_specs = list(layers)
        self.forward_funcs: list[Callable[..., Any]] = []
        self.tied_modules = nn.ModuleDict()
        self.tied_weight_attrs: dict[str, list[str]] = {}
        self.zlaunch_line: list[_Place] = []
        """What the runtime divides into stages."""
        for index, layer in enumerate(self._layer_specs):
            if seed is not None:
                seed(base_seed + index)
            call, module = self._build(index, layer)
            self.forward_funcs.append(call)
            self.zlaunch_line.append(_Place(index, call, module, self._options))
        self.partition_method = self._partition(partition_method)

    def _build(self, index: int, layer: Any) -> tuple[Callable[..., Any], nn.Module | None]:
        """Return what computes a layer, and the module that it computes with, which is registered."""
        if isinstance(layer, PipelineModule):
            raise NotInZlaunch("PipelineModule: a layer is a PipelineModule: list its layers instead")
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
                self.tied_weight_attrs[layer.key] = layer.tied_weight_attr
            tied = self.tied_modules[layer.key]
            return (tied if layer.forward_fn is None else _Bound(layer.forward_fn, tied)), tied
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(module, nn.Module):
            self.add_module(str(index), module)
            return module, module
        if not callable(module):
            raise ParameterError(
                f"PipelineModule: layer {index} is of class {type(layer).__name__}: give modules, "
                "LayerSpecs or functions"
            )
        return module, None

    def _partition(self, method: str) -> str:
        """Return what ``pipeline.partition`` of the config is; note weights where those of types count."""
        kind = method.lower()
        if kind in ("parameters", "uniform"):
            return kind
        if not kind.startswith("type:"):
            raise NotInZlaunch(
                f"PipelineModule(partition_method={method!r}) is not supported: take 'parameters', "
                "'uniform' or 'type:REGEX', or list the stages' first layers as pipeline.partition of the "
                "config"
            )
        wanted = re.compile(kind.partition(":")[2], re.IGNORECASE)
        names = [_name_of(layer) for layer in self._layer_specs]
        hits = [wanted.search(name) is not None for name in names]
        if not any(hits):
            raise ParameterError(
                f"PipelineModule(partition_method={method!r}): no layer class matches; the classes are "
                f"{', '.join(dict.fromkeys(names))}"
            )
        self.zlaunch_weights = [len(hits) + 1 if hit else 1 for hit in hits]
        return "best"

    def forward(self, *inputs: Any) -> Any:
        """Call all layers; several inputs go to the first one as a tuple."""
        hidden = inputs[0] if len(inputs) == 1 else inputs
        self._options.micro_batch += 1
        for place in self.zlaunch_line:
            hidden = place(hidden)
        return hidden

    @property
    def activation_checkpoint_interval(self) -> int:
        """Return whether layers are recomputed: 0 for no."""
        return self._options.interval

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set whether layers are recomputed: 0 for no."""
        self._options.interval = interval

    def topology(self) -> Any:
        """Return the topology that was given, else one of ``pipe`` and ``data``."""
        if self._topology is not None:
            return self._topology
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        stages = self.num_stages or 1
        return ProcessTopology(["pipe", "data"], [stages, max(1, ranks // stages)])

    def num_pipeline_stages(self) -> int:
        """Return the number of stages that was asked for, 1 for none."""
        return self.num_stages or 1

    def mpu(self) -> PipelineParallelGrid:
        """Return the process groups of the axes: the first call makes them, and is a collective one.

        Raises NotInZlaunch where only the config says how many stages there are.
        """
        if self.num_stages is None:
            raise NotInZlaunch(
                "PipelineModule.mpu() needs PipelineModule(num_stages=...): or use "
                "engine.data_parallel_rank, engine.stage_id and deepspeed.utils.groups"
            )
        if self._grid is None:
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def __getstate__(self) -> dict[str, Any]:
        # Process groups can be neither copied nor pickled: a copy makes new ones.
        return {**self.__dict__, "_grid": None}

    def get_additional_losses(self) -> None:
        """Return None: there are none."""


class _Bound:
    """Calls a function with a module and its input."""

    def __init__(self, function: Callable[[Any, Any], Any], module: nn.Module) -> None:
        self.function = function
        self.module = module

    def __call__(self, hidden: Any) -> Any:
        return self.function(self.module, hidden)


def _name_of(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def _stages_of(num_stages: int | None, topology: Any) -> int | None:
    """Return the stages that were asked for. Raises NotInZlaunch for a topology of other axes or order."""
    if topology is None:
        return num_stages
    axes = {name: int(topology.get_dim(name)) for name in topology.get_axis_names()}
    axes = {name: size for name, size in axes.items() if size > 1 or name == "pipe"}
    if list(axes) not in (["pipe"], ["pipe", "data"]):
        raise NotInZlaunch(
            f"PipelineModule(topology=...) with the axes {', '.join(axes)} is not supported: give "
            "num_stages, and the other sizes as parallel.tensor and so on in the config"
        )
    stages = axes["pipe"]
    if num_stages not in (None, stages):
        raise ParameterError(f"PipelineModule: num_stages is {num_stages}, but the topology has {stages}")
    return stages
