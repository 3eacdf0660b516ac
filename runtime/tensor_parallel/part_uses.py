"""Notices operations across the last dimension of activations of which each rank has a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ParameterError

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
"""Name products, whose results are no parts."""


class PartUses:
    """Follows outputs of layers that are cut by columns through element-wise operations."""

    def __init__(self) -> None:
        self._parts: Any = WeakTensorKeyDictionary()
        """Maps a part to the name of the layer whose output it comes from."""

    def note(self, output: Tensor, name: str) -> None:
        """Note that a tensor is this rank's part of a layer's output."""
        self._parts[output] = name

    def clear(self) -> None:
        """Forget all parts."""
        self._parts.clear()

    def before(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return the part that an operation is given, if any. Raises ParameterError if it computes along the
        dimension that is cut.
        """
        given = next((t for t in tree_leaves(args) if isinstance(t, Tensor) and t in self._parts), None)
        if given is not None and _is_along_last(name, given, args, kwargs):
            raise self._refused(name, given)
        return given

    def after(self, name: str, given: Tensor, found: Any) -> None:
        """Follow an operation on a part. Raises ParameterError if it has taken some of it."""
        if name in _CUT and _is_narrower(given, found):
            raise self._refused(name, given)
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and name not in _MIX and _is_alike(name, given, each):
                self._parts[each] = self._parts[given]

    def _refused(self, name: str, given: Tensor) -> ParameterError:
        layer = self._parts[given]
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
    """Tell whether a result is a part as what was given is; heads are no parts, nor is a single one."""
    if name in _RESHAPE and 0 < found.dim() <= given.dim():
        return found.shape[-1] == given.shape[-1]
    return found.shape == given.shape


def _is_narrower(given: Tensor, found: Any) -> bool:
    return any(
        isinstance(each, Tensor) and each.dim() == given.dim() and 0 < each.shape[-1] < given.shape[-1]
        for each in tree_leaves(found)
    )
