"""Implements Megatron-LM's sequence parallelism: tensor-parallel ranks divide tokens between sharded layers.

Source: Korthikanti et al., arXiv 2205.05198, 4.2.2.

Note [Token shards]
    Tensor parallelism leaves norms and residual sums on every rank: each has the activations of all tokens.
    Here a rank has its share of the tokens there. The first block's input is divided. Each sharded attention
    or MLP (a region) gathers the tokens (``gather_to``), and its last layer sums its results to shards
    (``sum_to_shard``) instead of all-reducing them: the same bytes. The last block's output is gathered.

    A parameter that works on shards has one rank's share of its gradient, so the ranks sum it.

    Only the families of `FAMILIES` are divided: their blocks work on each token alone outside of regions, and
    tests compare their training with one process's. In another model, nobody would notice that it mixes
    tokens there, or adds positions by the number of tokens that it sees.

    Only passes whose gradients may be needed divide tokens: `generate` has a token at a time. The module that
    owns the blocks decides at the beginning of its forward pass. A block that is recomputed in a backward
    pass runs as it has run with gradients, even where reentrant checkpointing has switched these off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from ..zero import placeholder
from .collectives import gather_from, gather_to, scatter_to, sum_to_shard
from .columns import ColumnInput, sums_early
from .tensor_axis import LAYER, TensorAxis

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "olmo", "cohere", "cohere2"),
    *("granite", "starcoder2", "smollm3", "helium", "nemotron", "arcee", "ernie4_5", "exaone4"),
)
"""Names the supported families: the modules of transformers.models that have their blocks."""
_FILES = frozenset(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES)
_KNOWN = ("torch.nn.", "transformers.")
"""Begin the names of modules whose classes a block may have."""
_TOKENS = 1
"""Is the dimension of tokens: (batch, tokens, width)."""
_KEY = "hidden_states"
"""Names the argument of hidden states that are not the first one."""
_WHERE = "tensor_parallel.sequence_parallel"
_ORDER = "call all blocks in their order, or remove the key"
TOKEN_ADVICE = (
    f"{_WHERE} divides the tokens from the first block to the last: between them, use only what blocks "
    "return, or remove the key"
)


class DividedBlocks(NamedTuple):
    """Names the blocks between which the tokens are divided, and the modules in them that need all tokens."""

    owner: nn.Module
    """The module that calls the blocks."""
    blocks: nn.ModuleList
    regions: dict[str, nn.Module]
    """The modules that need all tokens (attention, MLP), by name."""
    names: frozenset[str]
    """Names the sharded linear layers of the regions."""
    summed: list[nn.Parameter]
    """Parameters that work on this rank's tokens alone."""


def find_blocks(
    modules: Mapping[str, nn.Module], columns: Collection[str], rows: Collection[str], others: Collection[str]
) -> DividedBlocks:
    """Find the blocks of a model and their regions by the names of its linear layers.

    Args:
        modules: All modules of the model.
        columns: Names of layers that are sharded by columns.
        rows: Names of layers that are sharded by rows.
        others: Names of modules that are sharded in another way.

    Raises:
        ParameterError: The model is built in another way. It names the module.
    """
    for path in sorted({_list_of(modules, name) for name in (*columns, *rows, *others)} - {""}):
        _check_family(path, modules[path])
    for name in others:
        if _list_of(modules, name):
            raise ParameterError(
                f"{_WHERE}: {name} is neither colwise nor rowwise in the plan: mixtures of experts, latent "
                "attention and gathered outputs are not supported"
            )
    lists = {_list_of(modules, name) for name in (*columns, *rows)} - {""}
    if len(lists) != 1:
        found = f"it has {', '.join(sorted(lists))}" if lists else "it has none"
        raise ParameterError(
            f"{_WHERE} needs one torch.nn.ModuleList of blocks with all sharded linear layers; {found}"
        )
    (name,) = lists
    blocks = modules[name]
    assert isinstance(blocks, nn.ModuleList)
    inside = f"{name}."
    names = frozenset(each for each in (*columns, *rows) if each.startswith(inside))
    regions = {each.rpartition(".")[0] for each in names}
    for index, block in enumerate(blocks):
        prefix = f"{name}.{index}"
        _check_block_of(prefix, block, [each for each in regions if f"{each}.".startswith(f"{prefix}.")])
    for region in regions:
        _check_region(region, modules[region], columns, rows)
    of_regions = {id(p) for region in regions for p in modules[region].parameters()}
    biases = [getattr(modules[each], "bias", None) for each in rows if each in names]
    summed = {id(bias): bias for bias in biases if bias is not None}
    for key, parameter in blocks.named_parameters():
        if id(parameter) in of_regions:
            continue
        if parameter.dim() > 1:
            raise ParameterError(
                f"{_WHERE}: {inside}{key} has {parameter.dim()} dimensions: outside of attention and MLP, "
                "blocks may have norms and scales alone"
            )
        summed[id(parameter)] = parameter
    for path, module in modules.items():
        used = [p for p in module.parameters(recurse=False) if id(p) in summed]
        if used and not path.startswith(inside):
            raise ParameterError(f"{_WHERE}: {path} shares a parameter with the blocks of {name}")
    owner = modules[name.rpartition(".")[0]]
    kept = {each: modules[each] for each in sorted(regions)}
    return DividedBlocks(owner, blocks, kept, names, list(summed.values()))


def _list_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return the name of the outermost ModuleList that a module is in; "" if it is in none."""
    parts = name.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((each for each in names if isinstance(modules[each], nn.ModuleList)), "")


def _check_family(name: str, blocks: nn.Module) -> None:
    """Raise ParameterError unless all blocks belong to a supported family, as transformers has them."""
    for index, block in enumerate(blocks.children()):
        kind = type(block)
        if kind.__module__ not in _FILES:
            raise ParameterError(
                f"{_WHERE} supports the Hugging Face models {', '.join(FAMILIES)}; {name}.{index} is "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        for path, module in block.named_modules():
            own = f"{type(module).__module__}.{type(module).__qualname__}"
            if not own.startswith(_KNOWN):
                raise ParameterError(
                    f"{_WHERE}: {name}.{index}.{path} is {own}, which may mix tokens: use the model as "
                    "transformers has it"
                )


def _check_block_of(name: str, block: nn.Module, regions: list[str]) -> None:
    if not regions:
        raise ParameterError(
            f"{_WHERE}: {name}, {type(block).__name__}, has no sharded linear layer, and may need all tokens"
        )
    if name in regions:
        raise ParameterError(
            f"{_WHERE}: the sharded linear layers of {name} have to be in modules of their own, one for "
            "attention and one for the MLP, whose inputs are its hidden states"
        )
    nested = [each for each in regions if any(each.startswith(f"{other}.") for other in regions)]
    if nested:
        raise ParameterError(f"{_WHERE}: {nested[0]} is inside of another module with sharded linear layers")


def _check_region(name: str, region: nn.Module, columns: Collection[str], rows: Collection[str]) -> None:
    kinds = [any(each.rpartition(".")[0] == name for each in kind) for kind in (columns, rows)]
    if not all(kinds):
        raise ParameterError(f"{_WHERE}: {name} needs colwise layers and a rowwise one behind them")
    for path, module in region.named_modules():
        full = f"{name}.{path}"
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and full not in columns and full not in rows:
                raise ParameterError(
                    f"{_WHERE}: {full}.{key} is not sharded: {name} has all tokens on each rank, so its "
                    "gradient would be counted once for each rank"
                )


class TokenShards:
    """Divides the tokens at the first block, and joins them behind the last, by hooks: see Note [Token
    shards].
    """

    def __init__(self, axis: TensorAxis, found: DividedBlocks) -> None:
        self._axis = axis
        self._found = found
        self._first = found.blocks[0]
        self._is_on = False
        self._is_divided = False
        """Tells whether the forward pass is between the first block and the end of the last."""
        self.regions = {name: Region(self, axis, name) for name in found.regions}
        """The regions by their names."""

    def __deepcopy__(self, memo: Any) -> TokenShards:
        return self  # a copy of a model computes with the same ranks

    @property
    def is_on(self) -> bool:
        """Tell whether the pass that is going on divides the tokens. In a backward pass that is so: what runs
        there is recomputed.
        """
        return self._is_on or placeholder.in_backward()

    def install(self) -> None:
        """Hook the blocks, the module that owns them, and the regions."""
        found = self._found
        found.owner.register_forward_pre_hook(self._begin)
        found.owner.register_forward_hook(self._end, always_call=True)
        for block in found.blocks:
            block.register_forward_pre_hook(self._check_block)
        self._first.register_forward_pre_hook(self._divide, with_kwargs=True)
        for name, module in found.regions.items():
            module.register_forward_pre_hook(self.regions[name].enter, with_kwargs=True)
            module.register_forward_hook(self.regions[name].leave, always_call=True)
        found.blocks[-1].register_forward_hook(self._join)

    def refuse_alone(self, name: str) -> None:
        """Raise ParameterError for a call of a block, or of a region, outside of its model: the ranks sum the
        gradients of norms and biases, so each would have to work on its own tokens.
        """
        if torch.is_grad_enabled() and not self.is_on:
            raise ParameterError(
                f"{_WHERE}: {name} is called by itself: call the whole model, or call it under "
                "torch.no_grad()"
            )

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._is_on = torch.is_grad_enabled()
        self._is_divided = False

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the pass. Raises ParameterError where the last block was not called, or hidden states of other
        blocks are returned.
        """
        was_on = self._is_on
        is_left = self._is_divided
        self._is_on = False
        self._is_divided = False
        if not was_on or output is None:  # None: an exception has ended it
            return
        name = type(module).__name__
        if is_left:
            raise ParameterError(f"{_WHERE}: {name} has not called its last block: {_ORDER}")
        if getattr(output, _KEY, None) is not None:
            raise ParameterError(
                f"{_WHERE}: {name} returns the hidden states of all blocks, of which each rank has its own "
                "tokens: leave out output_hidden_states, or remove the key"
            )

    def _check_block(self, module: nn.Module, args: Any) -> None:
        name = type(module).__name__
        self.refuse_alone(name)
        is_first = module is self._first
        if self._is_on and self._is_divided == is_first:
            raise ParameterError(f"{_WHERE}: {name} is not called in the order of the blocks: {_ORDER}")

    def _divide(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on:
            return None
        hidden = _hidden_of(type(module).__name__, args, kwargs)
        if hidden.dim() != 3 or hidden.shape[_TOKENS] % self._axis.size:
            raise ParameterError(
                f"{_WHERE}: {type(module).__name__} gets hidden states of shape {list(hidden.shape)}, "
                f"expected (batch, tokens, width) with tokens divisible by {self._axis.size}: pad the batches"
            )
        found = scatter_to(hidden, self._axis, LAYER, _TOKENS)
        self._is_divided = True
        return _with_hidden(args, kwargs, found)

    def _join(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_on:
            return None
        self._is_divided = False
        found = gather_from(_first_of(type(module).__name__, output), self._axis, LAYER, _TOKENS)
        if isinstance(output, Tensor):
            return found
        rest = output[1:]
        if hasattr(output, "_fields"):  # a named tuple takes its values one by one
            return type(output)(found, *rest)
        return type(output)([found, *rest])


class Region:
    """Gives a module all tokens, and takes its results of this rank's tokens, by hooks."""

    def __init__(self, shards: TokenShards, axis: TensorAxis, name: str) -> None:
        self._shards = shards
        self._axis = axis
        self._name = name
        self._tokens = 0
        """Counts this rank's tokens of the call that is going on; 0 outside of one."""
        self.layers: list[nn.Linear] = []
        """Lists the layers whose weights may get their gradients beside the sum of the tokens'."""
        self.column_input: ColumnInput | None = None
        """Holds the gathered tokens during a call: see Note [Sums beside weight gradients] in columns.py."""

    def __deepcopy__(self, memo: Any) -> Region:
        return self

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the module all tokens. Raises ParameterError for a call outside of the model."""
        self._shards.refuse_alone(self._name)
        if not self._shards.is_on:
            return None
        hidden = _hidden_of(self._name, args, kwargs)
        if hidden.dim() != 3:
            raise ParameterError(
                f"{_WHERE}: {self._name} gets hidden states of shape {list(hidden.shape)}, expected (batch, "
                "tokens, width)"
            )
        self._tokens = hidden.shape[_TOKENS]
        if sums_early(hidden):
            self.column_input = ColumnInput(self._axis, LAYER, self.layers)
            return _with_hidden(args, kwargs, self.column_input.gather(hidden, _TOKENS))
        return _with_hidden(args, kwargs, gather_to(hidden, self._axis, LAYER, _TOKENS))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Raise ParameterError unless the module returns this rank's tokens."""
        tokens = self._tokens
        self._tokens = 0
        self.column_input = None
        if not tokens or output is None:  # None: an exception has ended it
            return
        first = _first_of(self._name, output)
        if first.shape[_TOKENS] != tokens:
            raise ParameterError(
                f"{_WHERE}: {self._name} returns {first.shape[_TOKENS]} tokens, but this rank has {tokens}: "
                "its last layer has to be rowwise"
            )

    def has_all_tokens(self) -> bool:
        """Tell whether its layers compute with the tokens of all ranks. Raises ParameterError where the
        module's forward is called without its hooks.
        """
        if self._shards.is_on and not self._tokens:
            raise ParameterError(
                f"{_WHERE}: the forward of {self._name} is called directly: call the module itself"
            )
        return self._shards.is_on

    def sum_to_shard(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's tokens of the sum of the ranks' products, with a bias. Raises ParameterError for
        products of some tokens alone.
        """
        wanted = self._tokens * self._axis.size
        if product.dim() != 3 or product.shape[_TOKENS] != wanted:
            raise ParameterError(
                f"{_WHERE}: a layer of {self._name} computes on {list(product.shape)}, expected (batch, "
                f"{wanted} tokens, width): tiles of tokens and other layouts are not supported"
            )
        found = sum_to_shard(product, self._axis, LAYER, _TOKENS)
        return found if bias is None else found + bias


def _first_of(name: str, output: Any) -> Tensor:
    """Return the hidden states that a module has returned, alone or first of several. Raises
    ParameterError.
    """
    found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(found, Tensor):
        raise ParameterError(
            f"{_WHERE}: {name} returns {type(output).__name__}, expected hidden states, or a tuple with them "
            "first"
        )
    return found


def _hidden_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states that a module is called with. Raises ParameterError."""
    found = args[0] if args else kwargs.get(_KEY)
    if not isinstance(found, Tensor):
        raise ParameterError(
            f"{_WHERE}: {name} is called without hidden states: they have to be its first argument, or {_KEY}"
        )
    return found


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, _KEY: hidden}
