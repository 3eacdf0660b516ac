"""Computes token by token what needs no other token, in tiles that are recomputed in the backward pass.

A layer between attentions, or the head with the loss, then keeps the activations of one tile alone (Arctic
Long Sequence Training, arXiv 2506.13996, 3.3).
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from ..errors import ParameterError
from ..log import detail, warn

# -- tiles ------------------------------------------------------------------------------------------


_NAMES = ("mlp", "feed_forward", "ffn")
IGNORED = -100


def tiled(function: Callable[[Tensor], Tensor], tokens: Tensor, tile_tokens: int) -> Tensor:
    """Return ``function(tokens)``, computed in tiles of about ``tile_tokens`` tokens.

    ``tokens`` and the result have shape (batch, tokens, ...). Each token's result must depend only on that
    token. The backward pass keeps only ``tokens`` and recomputes each tile.
    """
    length = max(1, tile_tokens // max(1, tokens.shape[0]))
    if length >= tokens.shape[1] or not torch.is_grad_enabled():
        return function(tokens)
    return torch.cat([recomputed(function, tile) for tile in torch.split(tokens, length, 1)], 1)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return ``function(*args)``, which the backward pass computes again."""
    found: Tensor = checkpoint(function, *args, use_reentrant=False)
    return found


def tiled_cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    tile_tokens: int,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the summed cross-entropy of ``head(hidden)``. Only one tile of logits exists at a time.

    ``hidden`` is (batch, tokens, width), ``targets`` (batch, tokens); ``head`` returns logits over the
    vocabulary. Losses are computed in float32 or wider. Divide by ``(targets != ignore_index).sum()`` for
    the mean.
    """

    def loss_of(tokens: Tensor, wanted: Tensor) -> Tensor:
        return chunked_cross_entropy(head(tokens).flatten(0, -2), wanted.flatten(), ignore_index)

    length = max(1, tile_tokens // max(1, hidden.shape[0]))
    targets = targets.to(hidden.device)
    pairs = zip(torch.split(hidden, length, 1), torch.split(targets, length, 1), strict=True)
    return torch.stack([recomputed(loss_of, tokens, wanted) for tokens, wanted in pairs]).sum()


class TiledForward:
    """Replaces a module's forward while it trains: computes it in tiles of tokens."""

    def __init__(self, module: nn.Module, name: str, tile_tokens: int) -> None:
        self.module = module
        self.name = name
        self.tile_tokens = tile_tokens
        self.inner = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module. Raises ParameterError if it is called with more than tokens."""
        if not self.module.training:
            return self._whole(*args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 3:
            raise ParameterError(
                f"activation_checkpointing.tiled_mlp: {self.name} must take one tensor (batch, tokens, "
                "width): set tiled_mlp to false"
            )
        return tiled(self._whole, args[0], self.tile_tokens)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def tile_mlps(model: nn.Module, tile_tokens: int | str) -> None:
    """Compute the model's MLPs in tiles of tokens; "auto": as many as the MLP is wide.

    MLPs are modules called mlp, feed_forward or ffn whose parameters are those of linear layers. Raises
    ParameterError for a model without one.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _NAMES and _is_linear(module)
    ]
    if not found:
        raise ParameterError(
            f"activation_checkpointing.tiled_mlp: the model has no MLP modules named {', '.join(_NAMES)}: "
            "call zlaunch.checkpointing.tiled in the model's forward instead"
        )
    for name, module in found:
        widths = [each.weight.shape[-1] for each in _linears(module)]
        size = widths[0] if tile_tokens == "auto" else int(tile_tokens)
        module.forward = TiledForward(module, name, size)
    detail(f"tiled_mlp: {len(found)} modules compute in tiles of tokens, and recompute in the backward pass")


def _linears(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if each._parameters]


def _is_linear(module: nn.Module) -> bool:
    kinds = {type(each).__name__ for each in _linears(module)}
    return bool(kinds) and kinds <= {"Linear", "Conv1D"}


# -- loss in chunks ---------------------------------------------------------------------------------
#
# Computes a Hugging Face model's loss from its logits without copies of all of them. transformers would make
# three in float32: the logits, their logarithms of probabilities, and the gradient of these.


CHUNK_NUMEL = 1 << 25
"""Counts the logits of a chunk; of fewer, the loss is computed at once."""
_CAUSAL = "ForCausalLM"
_NARROW = (torch.bfloat16, torch.float16)
"""Lists the dtypes of logits whose loss is computed in chunks: others have no copy in float32."""


class LogitShards(ABC):
    """Combines the results of ranks that have the logits of different words into one loss."""

    @abstractmethod
    def find(self, targets: Tensor, counts: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """Return the targets (n) as numbers of this rank's words, of which there are ``words``, and which of
        them are words of this rank and count. The others are 0.
        """

    @abstractmethod
    def join(self, norms: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of sums of exponentials (n), and the logits at the targets (n), of all words
        from the same of this rank's. Collective.
        """

    @abstractmethod
    def whole_loss(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """Return the summed loss, computed at once by operations that can be differentiated again."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignored: int, shards: LogitShards | None
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        counts = targets != ignored
        if shards is None:
            places = torch.where(counts, targets, 0)
            is_here = counts
        else:
            places, is_here = shards.find(targets, counts, logits.shape[1])
        norms = torch.empty(len(targets), dtype=dtype, device=logits.device)
        chosen = torch.empty_like(norms)
        for rows in _chunks(logits):
            wide = logits[rows].to(dtype)
            norms[rows] = torch.logsumexp(wide, -1)
            chosen[rows] = pick(wide, places[rows], targets[rows])
        if shards is not None:
            norms, chosen = shards.join(norms, torch.where(is_here, chosen, 0))
        ctx.shards = shards
        ctx.ignored = ignored
        ctx.save_for_backward(logits, targets, counts, places, is_here, norms)
        return torch.where(counts, norms - chosen, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the probabilities, less one at the targets, times the loss's gradient."""
        try:
            logits, targets, counts, places, is_here, norms = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise RuntimeError(
                f"{error}\nzlaunch: the logits were changed between the forward and the backward pass: set "
                "activation_checkpointing.chunked_loss to false, or change a copy"
            ) from None
        has_graph = torch.is_grad_enabled()
        # With create_graph, the gradient will be differentiated. With is_grads_batched, there are several.
        if has_graph or torch._C._functorch.is_legacy_batchedtensor(gradient):
            with torch.enable_grad():
                total = whole_cross_entropy(logits, targets, ctx.ignored, ctx.shards)
            (found,) = torch.autograd.grad(total, logits, gradient, create_graph=has_graph)
            return found, None, None, None
        ones = is_here.to(norms.dtype)
        gradients = torch.empty_like(logits)
        for rows in _chunks(logits):
            # of logits and norms, the sum has the wider dtype
            wide = torch.sub(logits[rows], norms[rows].unsqueeze(1)).exp_()
            wide.scatter_add_(1, places[rows].unsqueeze(1), -ones[rows].unsqueeze(1))
            gradients[rows] = wide.mul_(torch.where(counts[rows], gradient, 0).unsqueeze(1))
        return gradients, None, None, None


def chunked_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, shards: LogitShards | None = None
) -> Tensor:
    """Return the summed cross-entropy of ``logits`` (n, vocabulary) and ``targets`` (n), in float32 or wider.

    Of many 16-bit logits, only chunks have copies in float32. With ``shards``, ``logits`` has the words of
    this rank alone, and the call is collective. Raises ValueError for other lengths.
    """
    _check_lengths(logits, targets)
    if _takes_chunks(logits, targets):
        total: Tensor = _CrossEntropy.apply(logits, targets, ignore_index, shards)  # type: ignore[no-untyped-call]  # torch does not type it
        return total
    return whole_cross_entropy(logits, targets, ignore_index, shards)


def whole_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, shards: LogitShards | None = None
) -> Tensor:
    """Return what :func:`chunked_cross_entropy` does, computed at once."""
    _check_lengths(logits, targets)
    if shards is not None:
        return shards.whole_loss(logits, targets, ignore_index)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="sum")


def pick(logits: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    """Return the logit of each row (n, words) at its place (n). Raises IndexError for a place that is no
    word, as torch's cross_entropy does; it names the target, which is another number where ranks share words.
    """
    try:
        return logits.gather(1, places.unsqueeze(1)).squeeze(1)
    except RuntimeError:  # on a GPU, the lookup ends the process instead
        outside = (places < 0) | (places >= logits.shape[1])
        if not outside.any():
            raise
        raise IndexError(f"Target {int(targets[outside][0])} is out of bounds.") from None


def _check_lengths(logits: Tensor, targets: Tensor) -> None:
    """Raise ValueError unless there is a target for each row of logits."""
    if len(logits) != len(targets):
        raise ValueError(f"{len(targets)} labels for {len(logits)} rows of logits")


def _takes_chunks(logits: Tensor, targets: Tensor) -> bool:
    """Tell whether a loss is computed in chunks. A compiler would make a graph for each number of chunks, and
    functions of torch.func, forward-mode gradients and subclasses need torch's own operations.
    """
    is_large = logits.dtype in _NARROW and logits.numel() > CHUNK_NUMEL and targets.dtype == torch.int64
    is_plain = not is_traceable_wrapper_subclass(logits) and not torch._C._are_functorch_transforms_active()
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_large and is_plain and not is_forward and not torch.compiler.is_compiling()


def _chunks(logits: Tensor) -> list[slice]:
    length = max(1, CHUNK_NUMEL // logits.shape[1])
    return [slice(start, start + length) for start in range(0, len(logits), length)]


class ChunkedLoss:
    """Computes transformers' ``ForCausalLMLoss``, of many logits in chunks."""

    def __init__(self, model: Any, whole: Callable[..., Tensor]) -> None:
        self.whole = whole
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: Any) -> ChunkedLoss:
        model = self._model()
        return self if model is None else ChunkedLoss(memo.get(id(model), model), self.whole)

    def __reduce__(self) -> Any:
        return partial, (self.whole,)  # a pickled model does not need zlaunch

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean loss, or the sum divided by ``num_items_in_batch``."""
        given = labels if shift_labels is None else shift_labels
        whole = self._present()
        if whole is not self.whole or given is None or not _takes_chunks(logits, given) or _is_patched():
            return whole(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            given = functional.pad(given, (0, 1), value=ignore_index)[..., 1:]
        targets = given.reshape(-1).to(logits.device)
        total = chunked_cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index)
        items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)

    def _present(self) -> Callable[..., Tensor]:
        """Return the loss that transformers would compute: the script may have changed its type or table."""
        model = self._model()
        table = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
        found: Callable[..., Tensor] = table.get(getattr(model, "loss_type", _CAUSAL), self.whole)
        return found


def _is_patched() -> bool:
    """Tell whether another library has replaced a function that transformers' loss calls."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    inner = getattr(losses, "fixed_cross_entropy", None)
    own = getattr(inner, "__module__", None) == "transformers.loss.loss_utils"
    return not own or functional.cross_entropy.__module__ != "torch.nn.functional"


def has_causal_loss(model: nn.Module | None) -> bool:
    """Tell whether a Hugging Face model says that it has a causal language model's loss."""
    return getattr(model, "loss_type", None) == _CAUSAL


def chunk_loss(model: nn.Module | None, *, wanted: bool = True) -> None:
    """Compute the loss of a Hugging Face causal language model in chunks, if it is transformers' own; with
    ``wanted`` False, undo that.
    """
    owner: Any = model
    losses = sys.modules.get("transformers.loss.loss_utils")
    # first its name: transformers warns of one that it does not know
    if losses is None or not has_causal_loss(model):
        return
    present = owner.loss_function
    # a partial: of a model that was pickled
    is_own = isinstance(present, ChunkedLoss) or getattr(present, "func", present) is losses.ForCausalLMLoss
    if is_own:
        owner.loss_function = ChunkedLoss(owner, losses.ForCausalLMLoss) if wanted else losses.ForCausalLMLoss


# -- tiled loss -------------------------------------------------------------------------------------
#
# Computes a Hugging Face model's loss without the logits of whole sequences.


TILE_NUMEL = 1 << 26
"""Counts the logits of a tile, by default."""
_KEY = "activation_checkpointing.tiled_loss"


@dataclass
class LossParts:
    """Says how ranks that share sequences add up a loss."""

    part: Callable[[Tensor], Tensor]
    """Returns this rank's part of the labels of whole sequences."""
    add_up: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Returns the sum of the losses and their number, over all parts."""


@dataclass(eq=False)
class LogitsLater:
    """Stands for the logits of a training pass, which are never put together; holds the loss instead."""

    total: Tensor
    """The sum of the losses."""
    count: Tensor
    """The number of labels that count."""

    def contiguous(self) -> LogitsLater:
        """Return this: it has no memory."""
        return self

    def float(self) -> LogitsLater:
        """Return this: the loss is computed in float32."""
        return self

    def _refuse(self, *args: Any) -> NoReturn:
        raise ParameterError(f"{_KEY}: the model changes its logits before the loss: set tiled_loss to false")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = __neg__ = _refuse


class TiledLoss:
    """Holds a pass's labels for the head, and gives the loss that the head has computed from them."""

    def __init__(self, whole: Callable[..., Tensor], parts: LossParts | None) -> None:
        """``whole`` computes the loss of logits, where there are some."""
        self.whole = whole
        self.parts = parts
        self.labels: Tensor | None = None
        self._calls = 0

    @property
    def calls(self) -> int:
        """Count the losses that were computed."""
        return self._calls + getattr(self.whole, "calls", 0)

    def __call__(self, logits: Any, labels: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean loss, or the sum divided by ``num_items_in_batch``."""
        if not isinstance(logits, LogitsLater):
            return self.whole(logits, labels, vocab_size, *args, **kwargs)
        self._calls += 1
        total = logits.total
        count = logits.count
        if self.parts is not None:
            total, count = self.parts.add_up(total, count)
        items = args[0] if args else kwargs.get("num_items_in_batch")
        if isinstance(items, Tensor):
            items = items.to(total.device)
        mean: Tensor = total / (count if items is None else items)
        return mean


class TiledHead:
    """Replaces the head's forward: computes the losses of a pass's labels instead of logits."""

    def __init__(self, module: Any, loss: TiledLoss, tile_tokens: int) -> None:
        self.module = module
        self.loss = loss
        self.tile_tokens = tile_tokens
        self.inner = module.__dict__.get("forward")

    def __call__(self, hidden: Tensor) -> Any:
        labels = self.loss.labels
        if labels is None:
            return self._logits(hidden)
        if labels.shape != hidden.shape[:-1]:
            shapes = f"{list(labels.shape)} labels for {list(hidden.shape)} hidden states"
            raise ParameterError(f"{_KEY}: {shapes}")
        total = tiled_cross_entropy(self._logits, hidden, labels, self.tile_tokens)
        return LogitsLater(total, (labels != IGNORED).sum().to(hidden.device))

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.inner is not None:
            found: Tensor = self.inner(hidden)
            return found
        logits: Tensor = type(self.module).forward(self.module, hidden)
        return logits


class LabelledForward:
    """Replaces a model's forward: hands the labels of a training pass to the head."""

    def __init__(self, module: Any, loss: TiledLoss) -> None:
        self.module = module
        self.loss = loss
        self.inner = module.__dict__.get("forward")
        self._has_told = False
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.__signature__.bind(*args, **kwargs).arguments
        for name, parameter in self.__signature__.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        labels = given.get("labels")
        if labels is None or not self.module.training:
            if labels is None and self.module.training and torch.is_grad_enabled() and not self._has_told:
                self._has_told = True
                warn(
                    f"{_KEY} has no effect without labels: the model computes all logits. Pass labels, or "
                    "compute the loss with zlaunch.checkpointing.tiled_cross_entropy"
                )
            return self._inner(*args, **kwargs)
        keep = given.get("logits_to_keep", 0)
        if not isinstance(keep, int) or keep:
            raise ParameterError(f"{_KEY}: tiled loss does not support training with logits_to_keep")
        shifted = given.get("shift_labels")
        if shifted is None:
            shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        self.loss.labels = shifted if self.loss.parts is None else self.loss.parts.part(shifted)
        try:
            output = self._inner(*args, **kwargs)
        finally:
            self.loss.labels = None
        if isinstance(output, tuple):
            return tuple(each for each in output if not isinstance(each, LogitsLater))
        if isinstance(getattr(output, "logits", None), LogitsLater):
            if isinstance(output, OrderedDict):  # a ModelOutput, which is also read by number
                OrderedDict.__delitem__(output, "logits")
            output.logits = None
        return output

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def find_head(model: nn.Module | None) -> Any:
    """Return the head of a Hugging Face model whose loss can be computed in tiles; None for other models."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head: Any = None if find is None else find()
    return head if getattr(model, "loss_type", None) in (None, _CAUSAL) else None


_LOGITS = re.compile(r"^\s*(?:lm_)?logits\s+[-+*/]?=\s", re.MULTILINE)
"""Finds assignments; keyword arguments have no spaces around the sign."""


def changes_logits(model: nn.Module) -> bool:
    """Tell whether a Hugging Face model seems to change the logits of its head: its forward, as far as it can
    be read, assigns them more than once.
    """
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):
        return True
    return len(_LOGITS.findall(source)) > 1


def tile_loss(model: nn.Module | None, parts: LossParts | None, tile_tokens: int | str) -> None:
    """Compute the loss of a Hugging Face causal language model in tiles of tokens while it trains; "auto":
    as many as make 67 million logits. Its output has no logits then.

    Raises ParameterError for other models.
    """
    head = find_head(model)
    if head is None:
        raise ParameterError(
            f"{_KEY} needs a Hugging Face model with the loss ForCausalLM; in another model call "
            "zlaunch.checkpointing.tiled_cross_entropy"
        )
    owner: Any = model
    size = max(1, TILE_NUMEL // head.weight.shape[0]) if tile_tokens == "auto" else int(tile_tokens)
    loss = TiledLoss(owner.loss_function, parts)
    owner.loss_function = loss
    head.forward = TiledHead(head, loss, size)
    owner.forward = LabelledForward(owner, loss)
