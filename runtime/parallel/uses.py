"""Follows the activations of a forward pass: finds uses of shards, and of replicated values, that tensor
parallelism would compute wrongly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.axis import Axis, Channel
from ..errors import ParameterError
from ..log import say
from .collectives import GradientSum

# -- shard uses -------------------------------------------------------------------------------------
#
# Notices operations across the last dimension of activations of which each rank has a shard.


_ALL = "all"
_DIMS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "sum", "mean", "amax", "amin", "std", "var"), (1, _ALL)),
    **dict.fromkeys(("max", "min", "argmax", "argmin", "cumsum", "logsumexp", "softmin"), (1, _ALL)),
    **dict.fromkeys(("norm", "vector_norm"), (2, _ALL)),
    **dict.fromkeys(("glu", "sort"), (1, -1)),
    **dict.fromkeys(("layer_norm", "rms_norm", "cross_entropy", "nll_loss"), (99, -1)),
    "normalize": (2, 1),
    "topk": (2, -1),
}
"""Names operations along a dimension: the place of that argument, and its default."""
_CUT = ("chunk", "split", "tensor_split", "narrow", "__getitem__", "unbind", "select", "index_select")
_RESHAPE = ("view", "reshape", "flatten", "squeeze", "contiguous")
_MIX = ("linear", "matmul", "__matmul__", "mm", "bmm", "einsum", "bilinear")
"""Name products, whose results are no shards."""


class ShardUses:
    """Follows outputs of layers that are sharded by columns through element-wise operations."""

    def __init__(self) -> None:
        self._shards: Any = WeakTensorKeyDictionary()
        """Maps a shard to the name of the layer whose output it comes from."""

    def note(self, output: Tensor, name: str) -> None:
        """Note that a tensor is this rank's shard of a layer's output."""
        self._shards[output] = name

    def clear(self) -> None:
        """Forget all shards."""
        self._shards.clear()

    def before(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return the shard that an operation is given, if any. Raises ParameterError if it computes along the
        dimension that is sharded.
        """
        given = next((t for t in tree_leaves(args) if isinstance(t, Tensor) and t in self._shards), None)
        if given is not None and _is_along_last(name, given, args, kwargs):
            raise self._refused(name, given)
        return given

    def after(self, name: str, given: Tensor, found: Any) -> None:
        """Follow an operation on a shard. Raises ParameterError if it has taken some of it."""
        if name in _CUT and _is_narrower(given, found):
            raise self._refused(name, given)
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and name not in _MIX and _is_alike(name, given, each):
                self._shards[each] = self._shards[given]

    def _refused(self, name: str, given: Tensor) -> ParameterError:
        layer = self._shards[given]
        more = " (packed_colwise shards both halves alike)" if name in (*_CUT, "glu") else ""
        return ParameterError(
            f"tensor parallelism: {name} computes along the outputs of {layer}, which are sharded: set the "
            f"style of {layer} to colwise_gather_output in tensor_parallel.plan{more}"
        )


def _is_along_last(name: str, given: Tensor, args: Any, kwargs: Any) -> bool:
    if name not in _DIMS:
        return False
    place, default = _DIMS[name]
    dims = kwargs.get("dim", args[place] if len(args) > place else default)
    if dims is None or dims == _ALL:
        return True
    chosen = dims if isinstance(dims, (tuple, list)) else (dims,)
    return any(isinstance(dim, int) and dim in (-1, given.dim() - 1) for dim in chosen)


def _is_alike(name: str, given: Tensor, found: Tensor) -> bool:
    """Tell whether a result is a shard as what was given is; heads are no shards, nor is a single one."""
    if name in _RESHAPE and 0 < found.dim() <= given.dim():
        return found.shape[-1] == given.shape[-1]
    return found.shape == given.shape


def _is_narrower(given: Tensor, found: Any) -> bool:
    return any(
        isinstance(each, Tensor) and each.dim() == given.dim() and 0 < each.shape[-1] < given.shape[-1]
        for each in tree_leaves(found)
    )


# -- replicated uses --------------------------------------------------------------------------------
#
# Finds replicated parameters that are used with shards of activations, and sums their gradients.
#
# Note [Shards and replicated values]
#     A value is replicated if all ranks of the axis have the same, and a shard if each has its own. What is
#     computed with a shard is one. ``copy_to`` and ``scatter_to`` make shards, ``reduce_from`` and
#     ``gather_from`` replicated values; sharded parameters are shards. The gradient of a replicated value
#     that meets a shard in an operation is one rank's share of it: only ``copy_to`` sums it. A parameter
#     that meets nothing but shards gets the sum by a hook. Whatever is used in both ways, or is an
#     activation, would need a sum of one use's gradient alone, and is refused.


_SHARD = "shard"
_MIXED = "mixed"
_SHOWN = 3
_ASSIGNS = "__setitem__"
LAYER_ADVICE = (
    "set the style of the preceding layer to colwise_gather_output in tensor_parallel.plan, or remove that "
    "layer from the plan"
)


class ReplicatedUses:
    """Follows the shards through the operations of a pass."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        channel: Channel,
        shards: Collection[int],
        advice: str = LAYER_ADVICE,
    ) -> None:
        """Gradients are summed over ``axis`` in ``channel``. ``shards`` has the ids of parameters whose
        gradients need no sum, or have one: each rank has a shard of them, or the plan says so. ``advice``
        ends the errors.
        """
        self._advice = advice
        self._axis = axis
        self._channel = channel
        self._sharded = frozenset(shards)
        self._parameters = {
            id(parameter): (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in self._sharded
        }
        self._kinds: Any = WeakTensorKeyDictionary()
        """Maps a tensor that is no replicated value to its kind."""
        self._made_of: Any = WeakTensorKeyDictionary()
        """Maps a tensor that is computed from replicated parameters alone to their ids."""
        self._with_shards: dict[int, str] = {}
        self._with_replicated: dict[int, str] = {}
        """Name the operation of the first use of each kind, by the id of the parameter."""
        self._summed: set[int] = set()
        self._told = 0

    def follow(self, tensor: Tensor, source: Tensor | None) -> None:
        """Note what a collective of the axis has made: a shard of ``source``, or a replicated value."""
        if source is None:
            self.note_replicated(tensor)
        else:
            self.note_shard(tensor, source)

    def note_shard(self, tensor: Tensor, source: Tensor | None = None) -> None:
        """Note that a tensor is this rank's shard; ``source``, a replicated value that has become it, has
        had its gradient summed.
        """
        self._kinds[tensor] = _SHARD
        if source is not None:
            self._use(self._origins(source), self._with_replicated, "a sharded layer")

    def note_mixed(self, tensor: Tensor) -> None:
        """Note that some elements of a tensor are shards, and some replicated: its uses are not looked at."""
        self._kinds[tensor] = _MIXED

    def note_replicated(self, tensor: Tensor) -> None:
        """Note that a tensor is a replicated value."""
        self._kinds.pop(tensor, None)

    def clear(self) -> None:
        """Forget the tensors of a pass, and tell which parameters' gradients are summed."""
        self._kinds.clear()
        self._made_of.clear()
        names = [self._parameters[identity][0] for identity in self._with_shards]
        if len(names) > self._told and self._axis.comm.rank == 0:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            say(
                f"tensor parallelism: gradients of {', '.join(names[:_SHOWN])}{more} are all-reduced, "
                "because these parameters are used with sharded activations"
            )
        self._told = len(names)

    def after(self, name: str, args: Any, kwargs: Any, found: Any, *, looks: bool) -> None:
        """Follow an operation. With ``looks``, raise ParameterError where a gradient would be a rank's
        share.
        """
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        if name == _ASSIGNS:
            made.append(args[0])
        is_shard = any(self._is(each, _SHARD) for each in given)
        kind = _SHARD if is_shard else _MIXED if any(self._is(each, _MIXED) for each in given) else None
        if looks and any(each.requires_grad for each in made):
            self._look(name, given, made, kind)
        if kind is not None:
            for each in made:
                if id(each) not in self._parameters:
                    self._kinds[each] = kind

    def _look(self, name: str, given: list[Tensor], made: list[Tensor], kind: str | None) -> None:
        origins = set[int]().union(*(self._origins(each) for each in given))
        if kind == _SHARD:
            for each in given:
                if each.requires_grad and not self._is_known(each):
                    raise ParameterError(
                        f"tensor parallelism: {name} combines a sharded activation with a replicated one, "
                        f"{list(each.shape)}, whose gradient would miss the other ranks' contributions: "
                        f"{self._advice}"
                    )
            self._use(origins, self._with_shards, name)
        elif kind is None and all(self._origins(each) for each in given):
            for each in made:
                if id(each) not in self._parameters:
                    self._made_of[each] = frozenset(origins)
        else:
            self._use(origins, self._with_replicated, name)

    def _use(self, origins: Iterable[int], uses: dict[int, str], name: str) -> None:
        """Note uses of parameters; sum the gradient of one that is used with shards."""
        for identity in origins:
            known, parameter = self._parameters[identity]
            uses.setdefault(identity, name)
            both = self._with_shards.get(identity), self._with_replicated.get(identity)
            if None not in both:
                raise ParameterError(
                    f"tensor parallelism: {known} is used with a sharded activation ({both[0]}) and with a "
                    f"replicated one ({both[1]}), so its gradient is only partly reduced: {self._advice}"
                )
            if uses is self._with_shards and identity not in self._summed:
                self._summed.add(identity)
                parameter.register_hook(GradientSum(self._axis, self._channel))  # type: ignore[no-untyped-call]

    def _origins(self, tensor: Tensor) -> frozenset[int]:
        if id(tensor) in self._parameters:
            return frozenset((id(tensor),) if tensor.requires_grad else ())
        if tensor in self._kinds:
            return frozenset()
        found: frozenset[int] = self._made_of.get(tensor, frozenset())
        return found

    def _is(self, tensor: Tensor, kind: str) -> bool:
        is_sharded = kind == _SHARD and id(tensor) in self._sharded
        return is_sharded or self._kinds.get(tensor) == kind

    def _is_known(self, tensor: Tensor) -> bool:
        return bool(self._origins(tensor)) or self._is(tensor, _SHARD) or self._is(tensor, _MIXED)


class ActivationUses(NamedTuple):
    """Follows the activations of the pass that is going on."""

    shards: ShardUses
    replicated: ReplicatedUses

    def clear(self) -> None:
        """Forget the activations of the pass."""
        self.shards.clear()
        self.replicated.clear()
