"""Decides which parameters share a unit, and which modules' calls need it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..comm.collectives import Comm
from ..comm.shard_spec import shard_numel
from ..config.zero import LeafModule
from ..errors import ParameterError
from ..precision import BufferTypes
from . import placeholder
from .layout import TILE_NUMEL, make_layout
from .store import StoreFactory
from .unit import Unit

# -- unit policy ------------------------------------------------------------------------------------


SHARDED_DTYPES = frozenset([torch.float64, torch.float32, torch.bfloat16, torch.float16])
"""Lists the dtypes of parameters in units. Frozen parameters of other dtypes stay whole on every rank."""


LEAF_MARK = "_z3_leaf"
"""Names the attribute of a module that is gathered uncut."""


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a module is marked as a leaf."""
    return bool(getattr(module, LEAF_MARK, False))


def is_shardable(parameter: Tensor) -> bool:
    """Tell whether a parameter belongs in a unit."""
    return parameter.dtype in SHARDED_DTYPES


_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


DIVIDED_NUMEL = 1_000_000_000
"""Sets the default size, in elements, above which stage 3 divides a block. It is DeepSpeed's default for
stage3_max_live_parameters. A block of Llama-3.1-405B is three times as large, a block of the 70B smaller.
"""


UNIT_NUMEL = 16_000_000
UNIT_NUMEL_CPU = 2_000_000
"""Limit the size up to which neighbouring blocks share a unit at stages 0 to 2; the config's
reduce_bucket_size may be less. Large enough for full bandwidth (32 MB of a 16-bit type, which NCCL wants
between machines; what a CPU's cache holds), small enough to overlap.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """Decides how a model is cut; sizes in elements."""

    shard_optimizer: bool
    """Stage 1 and up."""
    shard_grads: bool
    """Stage 2 and up."""
    shard_params: bool
    """Stage 3."""
    bucket_numel: int = UNIT_NUMEL
    """Stages 0 to 2: neighbouring blocks join one unit up to this size."""
    minimum_numel: int = 4096
    """Stage 3: a block below this size joins the root unit, which stays gathered through a whole step."""
    persistence_numel: int = 0
    """Stage 3: a unit of at most this size is not sharded."""
    divided_numel: int = DIVIDED_NUMEL
    """Stage 3: a block above this size is divided by its modules."""
    all_persistent_numel: int = sys.maxsize
    """Stage 3: limits the elements of such units together; the first ones are kept."""
    tile_numel: int = TILE_NUMEL
    """Shards are cut in tiles of this size for norms and offloaded steps."""
    poison: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """Groups modules that are used together, and their units. The root block's units serve the whole pass."""

    index: int
    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]]
    is_root: bool = False
    around: Block | None = None
    """Holds the block that this one is a part of, which was too large for one unit."""
    units: list[Unit] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(shard_numel(p, placeholder.shape_of(p)) for _, p in self.parameters)

    def contains(self, other: Block) -> bool:
        """Tell whether ``other`` is this block, or a part of it."""
        inner: Block | None = other
        while inner is not None and inner is not self:
            inner = inner.around
        return inner is self


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class Tiles(nn.ModuleList):
    """Holds the tiles of one layer. They are parts of a block that is too large, but no blocks by themselves,
    as the members of other lists are.
    """


def _holds_blocks(module: nn.Module, containers: tuple[type[nn.Module], ...]) -> bool:
    if is_leaf(module) or isinstance(module, Tiles):
        return False
    if isinstance(module, containers) and sum(_has_parameters(c) for c in module.children()) > 1:
        return True
    return any(_holds_blocks(child, containers) for child in module.children())


def find_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the modules that make good blocks, in registration order.

    Members of a list are blocks (the layers of a transformer), unless they hold a further ModuleList (the
    stages of a hierarchical network); so is any other module that holds no such list (embedding, final norm,
    head).
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if not _has_parameters(child):
                continue
            lists = (nn.ModuleList,) if isinstance(parent, _CONTAINERS) else _CONTAINERS
            if (isinstance(child, _CONTAINERS) and not is_leaf(child)) or _holds_blocks(child, lists):
                visit(f"{prefix}{name}.", child)
            else:
                found.append((prefix + name, child))

    visit("", root)
    return found


def plan_blocks(root: nn.Module, options: ShardingOptions) -> list[Block]:
    """Assign every floating-point parameter to exactly one block; the root block comes first and may be
    empty.
    """
    names = {id(p): name for name, p in root.named_parameters()}
    # a root that is a leaf is gathered as one: by its own block, in which everything stays
    candidates = [] if options.shard_params and is_leaf(root) else find_modules(root)
    users: dict[int, int] = {}
    for _, module in candidates:
        for parameter in module.parameters():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    blocks: list[Block] = []
    taken: set[int] = set()
    for name, module in candidates:
        # A parameter of several blocks goes to the root, whose units stay gathered through the pass.
        own = [p for p in module.parameters() if users[id(p)] == 1 and is_shardable(p)]
        block = Block(0, name, [module], [(names[id(p)], p) for p in own])
        if not own or (options.shard_params and block.numel < options.minimum_numel):
            continue
        taken.update(id(p) for p in own)
        before = blocks[-1] if blocks else None
        if options.shard_params:
            blocks += _divide(block, options)
        elif before and before.numel + block.numel <= options.bucket_numel:
            before.modules += block.modules
            before.parameters += block.parameters
        else:
            blocks.append(block)
    rest = [(n, p) for n, p in root.named_parameters() if id(p) not in taken and is_shardable(p)]
    root_block = Block(0, "root", _root_modules(root, rest, options), rest, is_root=True)
    result = [root_block, *blocks]
    for index, block in enumerate(result):
        block.index = index
    return result


_WHOLE = (nn.MultiheadAttention,)
"""Lists modules that use their children's parameters without calling them."""


def _divide(block: Block, options: ShardingOptions) -> list[Block]:
    """Divide a block that is too large for one unit by the modules that it calls. Return it, with the
    parameters that no part has, and the parts, which may be divided again.

    The block stays in the list without parameters too: a part that turns out to be used without a call is
    gathered with it from then on.
    """
    module = block.modules[0]
    if block.numel <= options.divided_numel or is_leaf(module) or isinstance(module, _WHOLE):
        return [block]
    children = {id(child): (name, child) for name, child in _called_children(module, block.name)}
    users: dict[int, int] = {}
    for _, child in children.values():
        for parameter in child.parameters():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    parts: list[Block] = []
    for name, child in children.values():
        ids = {id(p) for p in child.parameters() if users[id(p)] == 1}
        own = [(key, p) for key, p in block.parameters if id(p) in ids]
        part = Block(0, name, [child], own, around=block)
        if own and part.numel >= options.minimum_numel:
            block.parameters = [(key, p) for key, p in block.parameters if id(p) not in ids]
            parts += _divide(part, options)
    return [block, *parts]


def _called_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module, and of a list the members: nobody calls the list."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and not is_leaf(child):
            yield from _called_children(child, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", child


def _root_modules(
    root: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]], options: ShardingOptions
) -> list[nn.Module]:
    """Return the root, and the owners of its unit's parameters: those may be called without the root
    (``model.head(x)``).
    """
    mine = {id(p) for _, p in parameters}
    owners = [m for m in root.modules() if any(id(p) in mine for p in m._parameters.values())]
    return [root, *(m for m in owners if m is not root)]


Member = tuple[str, nn.Parameter]


def _by_kind(members: Sequence[Member], groups: dict[int, int], comm: Comm) -> list[list[Member]]:
    """Group the parameters that can share a unit: alike in dtype, trainability, in having a group, and in
    which ranks have them.
    """
    kinds: dict[tuple[bool, bool, str, int, int], list[Member]] = {}
    for name, parameter in members:
        trained = parameter.requires_grad
        ungrouped = trained and bool(groups) and id(parameter) not in groups
        link, _, copies = comm.find_shard_link(parameter)
        rest = str(parameter.dtype), copies, link.size
        kinds.setdefault((not trained, ungrouped, *rest), []).append((name, parameter))
    # Sorted by what all ranks know: they have to make equal units in one order.
    found = [alike for _, alike in sorted(kinds.items())]
    for alike in found:
        # Equal groups adjacent, so that a shard meets each group in one slice (Layout.pieces).
        alike.sort(key=lambda member: groups.get(id(member[1]), -1))
    return found


@dataclass(frozen=True, slots=True)
class UnitFactory:
    """Builds the units of blocks, of ``dtype`` (None: each parameter's), with their values in ``stores``."""

    dtype: torch.dtype | None
    comm: Comm
    options: ShardingOptions
    stores: StoreFactory | None = None

    def build(self, blocks: Sequence[Block], groups: dict[int, int]) -> None:
        """Build every block's units: one for each (dtype, trained or not) pair among its parameters.

        ``groups`` maps the id of a parameter to its optimizer group. Collective: values are rank 0's. Raises
        DiskError.
        """
        options = self.options
        persistent = 0
        for block in blocks:
            for members in _by_kind(block.parameters, groups, self.comm):
                numel = sum(placeholder.shape_of(p).numel() for _, p in members)
                within = persistent + numel <= options.all_persistent_numel
                small = numel <= options.persistence_numel and within
                persistent += numel if small else 0
                block.units.append(self._make(block, members, groups, small=small))

    def rebuild(self, block: Block, groups: dict[int, int]) -> list[Unit] | None:
        """Build new units for parameters of a block that have been unfrozen, with their present values.
        Returns all units of the block, those that stay included; None if there are no such parameters.

        Collective. Raises DiskError.
        """
        units: list[Unit] = []
        rebuilt = False
        for unit in block.units:
            members = list(zip(unit.names, unit.parameters, strict=True))
            trained = unit.trainable and any(slot.group >= 0 for slot in unit.layout.slots)
            if trained or not any(p.requires_grad and id(p) in groups for p in unit.parameters):
                units.append(unit)
                continue
            rebuilt = True
            was_sharded = unit.shard_params
            unit.detach()
            for alike in _by_kind(members, groups, self.comm):
                # persistent only where the former unit was: their total may not grow
                units.append(self._make(block, alike, groups, small=not was_sharded, is_new=True))
        return units if rebuilt else None

    def _make(
        self,
        block: Block,
        members: Sequence[Member],
        groups: dict[int, int],
        *,
        small: bool,
        is_new: bool = False,
    ) -> Unit:
        trainable = members[0][1].requires_grad
        numels = [placeholder.shape_of(p).numel() for _, p in members]
        link, *_ = self.comm.find_shard_link(members[0][1])
        own_groups = [groups.get(id(p), -1) if trainable else -1 for _, p in members]
        return Unit(
            f"{block.name}{'' if trainable else ' (frozen)'}",
            [name for name, _ in members],
            [p for _, p in members],
            make_layout(numels, own_groups, link.shards, pieces=link.pieces),
            self.comm,
            dtype=self.dtype or members[0][1].dtype,
            shard_optimizer=self.options.shard_optimizer,
            shard_params=self.options.shard_params and not small,
            stores=self.stores,
            is_new=is_new,
            tile_numel=self.options.tile_numel,
            poison=self.options.poison,
            stage3=self.options.shard_params,
        )


# -- leaf modules -----------------------------------------------------------------------------------
#
# Marks leaf modules, which are gathered uncut: a mixture of experts as one, whichever are used.


Kind = type[nn.Module] | str
"""Is a class, or its name, bare or with its module."""


def mark_leaves(
    model: nn.Module,
    *,
    classes: Iterable[Kind] | Kind = (),
    names: Iterable[str] = (),
    suffixes: Iterable[str] = (),
    flag: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules of the model as leaves, before its units are planned. Return them in the order of the
    entries, and the entries that match no module.

    ``names``: of modules in the model; ``suffixes``: how such names end. A single entry may stand without a
    list. ``flag`` False unmarks. Raises TypeError for a class that is none.
    """
    entries: list[tuple[Kind, Callable[[str, nn.Module, Kind], bool]]] = [
        *((kind, _is_a) for kind in _listed(classes)),
        *((wanted, lambda name, module, wanted: name == wanted) for wanted in _listed(names)),
        *((end, lambda name, module, end: name.endswith(str(end))) for end in _listed(suffixes)),
    ]
    found: dict[int, nn.Module] = {}
    missing: list[str] = []
    for entry, matches in entries:
        chosen = {id(each): each for name, each in model.named_modules() if matches(name, each, entry)}
        if not chosen:
            missing.append(entry if isinstance(entry, str) else entry.__name__)
        found |= chosen
    for module in found.values():
        setattr(module, LEAF_MARK, flag)
    return list(found.values()), missing


def mark_configured(model: nn.Module, section: LeafModule) -> list[str]:
    """Mark the leaves of a config's section; return the entries that match no module, without defaults."""
    _, missing = mark_leaves(
        model, classes=section.classes, names=section.names, suffixes=section.name_suffixes
    )
    defaults = LeafModule().classes
    return [entry for entry in missing if entry not in defaults]


def mark_lists_of_experts(model: nn.Module) -> list[str]:
    """Mark modules that have a list of several experts as leaves, and return their names: each rank may use
    others of them. The list's name has ``experts`` in it; one that was unmarked stays so.

    Not the model itself, which as a leaf would be gathered as a whole: only who marks it means that.
    """
    found = []
    for name, module in model.named_modules():
        lists = [
            child
            for key, child in module.named_children()
            if "experts" in key and isinstance(child, (nn.ModuleList, nn.ModuleDict)) and len(child) > 1
        ]
        if lists and module is not model and not hasattr(module, LEAF_MARK):
            setattr(module, LEAF_MARK, True)
            found.append(name)
    return found


def _listed(given: Iterable[Kind] | Kind) -> list[Kind]:
    return [given] if isinstance(given, (str, type)) else list(given)


def _is_a(name: str, module: nn.Module, kind: Kind) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    if not isinstance(kind, str):
        raise TypeError(f"leaf modules must be classes or class names, not {type(kind).__name__}")
    own = type(module)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")


# -- replicated -------------------------------------------------------------------------------------
#
# Places what is in no unit, and stays whole: buffers, and frozen parameters of other dtypes.


def place_rest(model: nn.Module, comm: Comm, types: BufferTypes) -> None:
    """Move buffers and parameters of other dtypes to the device with rank 0's values, buffers in the dtypes
    that ``types`` chooses. One buffer of several modules stays one.
    """
    kept = types.kept_in_fp32(model)
    placed: dict[int, tuple[Tensor, Tensor]] = {}
    """Maps a buffer's id to the buffer, whose id nothing else may get, and to its place."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in placed:
                dtype = torch.float32 if id(buffer) in kept else types.of(module, name, buffer)
                placed[id(buffer)] = buffer, buffer.to(comm.device, dtype)
                _share(placed[id(buffer)][1], comm)
            module._buffers[name] = placed[id(buffer)][1]
    for parameter in model.parameters():
        if not is_shardable(parameter):
            parameter.data = parameter.data.to(comm.device)
            _share(parameter.data, comm)


def _share(tensor: Tensor, comm: Comm) -> None:
    """Copy rank 0's values of a tensor of any dtype to all ranks, byte for byte. Raises ParameterError for
    one that is not dense.
    """
    if tensor.layout is not torch.strided:
        raise ParameterError(f"unsupported layout {tensor.layout} of a buffer or parameter")
    # As bytes below, because not every backend sends every dtype.
    flat = tensor.detach().contiguous().view(-1)
    comm.broadcast(flat.view(torch.uint8))
    tensor.detach().copy_(flat.view(tensor.shape))
