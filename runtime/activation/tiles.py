"""Computes token by token what needs no other token, in tiles that are recomputed in the backward pass.

A layer between attentions, or the head with the loss, then keeps the activations of one tile alone (Arctic
Long Sequence Training, arXiv 2506.13996, 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..errors import ParameterError
from ..log import detail

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
    return torch.cat([_again(function, tile) for tile in torch.split(tokens, length, 1)], 1)


def _again(function: Callable[..., Tensor], *args: Any) -> Tensor:
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
        logits = head(tokens)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(
            wide.flatten(0, -2), wanted.flatten(), ignore_index=ignore_index, reduction="sum"
        )

    length = max(1, tile_tokens // max(1, hidden.shape[0]))
    targets = targets.to(hidden.device)
    pairs = zip(torch.split(hidden, length, 1), torch.split(targets, length, 1), strict=True)
    return torch.stack([_again(loss_of, tokens, wanted) for tokens, wanted in pairs]).sum()


class TiledForward:
    """Replaces a module's forward while it trains: computes it in tiles of tokens."""

    def __init__(self, module: nn.Module, name: str, tile_tokens: int) -> None:
        self.module, self.name, self.tile_tokens = module, name, tile_tokens
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
