"""``deepspeed.sequence.layer``: attention over sequences of which each rank has a part (Ulysses).

Each rank has a part of the sequence and all heads. Before the attention, ranks exchange these for whole
sequences and a part of the heads, and after it the other way round (Jacobs et al., 2023, "DeepSpeed
Ulysses"). ``zlaunch.sequence.attention`` does the same for ``parallel.sequence`` of the config, in one
exchange instead of three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zlaunch.compat.deepspeed.missing import NotInZlaunch
from zlaunch.compat.deepspeed.tools import logger

_HEADS = 2
"""The dimension of the heads."""


class _Exchange(torch.autograd.Function):
    """Gives each rank of a group its piece along one dimension, from the pieces of all along another one."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        group: Any,
        split: int,
        split_sizes: Sequence[int],
        joined: int,
        joined_sizes: Sequence[int],
    ) -> Tensor:
        """Return the pieces of all ranks joined.

        Args:
            value: This rank's tensor.
            group: The ranks.
            split: The dimension along which `value` is divided.
            split_sizes: What each rank gets of it.
            joined: The dimension along which received pieces are put together.
            joined_sizes: The size of each rank's piece there.
        """
        ctx.inverse = group, joined, joined_sizes, split, split_sizes
        sent = [piece.reshape(-1) for piece in torch.split(value, list(split_sizes), split)]
        own = list(value.shape)
        own[split] = split_sizes[dist.get_rank(group)]
        shapes = [[*own[:joined], size, *own[joined + 1 :]] for size in joined_sizes]
        counts = [math.prod(shape) for shape in shapes]
        received = value.new_empty(sum(counts))
        dist.all_to_all_single(received, torch.cat(sent), counts, [len(piece) for piece in sent], group=group)
        pieces = zip(torch.split(received, counts), shapes, strict=True)
        return torch.cat([piece.view(shape) for piece, shape in pieces], joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Exchange the gradient the other way round."""
        return _exchange(gradient, *ctx.inverse), None, None, None, None, None


def _exchange(value: Tensor, *how: Any) -> Tensor:
    found: Tensor = _Exchange.apply(value, *how)  # type: ignore[no-untyped-call]  # torch's own is untyped
    return found


class DistributedAttention(nn.Module):
    """Computes attention on whole sequences and a part of the heads.

    Args:
        local_attention: Called with query, key and value of whole sequences and this rank's heads.
        sequence_process_group: The process group of the ranks that share a sequence.
        scatter_idx: The dimension of the heads, which is 2.
        gather_idx: A dimension before it. The sequence is where the batch is not, as in DeepSpeed.
        sp_stream: Not used: the exchanges are on the present stream.
        num_kv_heads: The total number of key-value heads, if it differs from that of `key`.

    Raises:
        NotInZlaunch: Heads are in another dimension.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != _HEADS or gather_idx not in (0, 1):
            raise NotInZlaunch(
                f"DistributedAttention(scatter_idx={scatter_idx}, gather_idx={gather_idx}) is not supported: "
                "the heads must be in dimension 2"
            )
        if sp_stream is not None:
            logger.warning("DistributedAttention: sp_stream is not used; exchanges are on the present stream")
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.num_kv_heads = num_kv_heads
        self._has_compared = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Sequence[Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return this rank's part of the attention's output. Collective.

        Args:
            query, key, value: (batch, tokens, heads, width), or (tokens, batch, heads, width); `tokens` are
                this rank's.
            batch_dim_idx: The dimension of the batch, 0 or 1.
            rotary_pos_emb: Cosines and sines of whole sequences, (1, tokens, 1, width), where tokens are in
                the first dimension.
            args, kwargs: More arguments of `local_attention`.

        Raises:
            ValueError: there are fewer key-value heads than ranks, heads of the query cannot be divided as
                those of the key are, or the ranks hold different numbers of tokens in the first pass.
        """
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"batch_dim_idx: expected 0 or 1, got {batch_dim_idx}")
        ranks = dist.get_world_size(self.spg)
        heads = self.num_kv_heads or key.shape[_HEADS]
        if heads < ranks:
            raise ValueError(f"{heads} key-value heads cannot be divided by {ranks} ranks")
        # A query's head goes where its key's head goes; the first ranks have one more where some are left.
        shares = [heads // ranks + (rank < heads % ranks) for rank in range(ranks)]
        tokens = 1 - batch_dim_idx
        self._compare(query, tokens)
        query = self._exchanged_for_heads(query, shares, heads, tokens)
        key = self._exchanged_for_heads(key, shares, heads, tokens)
        value = self._exchanged_for_heads(value, shares, heads, tokens)
        if rotary_pos_emb is not None:
            cosines = rotary_pos_emb[0].permute(1, 0, 2, 3)
            sines = rotary_pos_emb[1].permute(1, 0, 2, 3)
            query = apply_rotary_pos_emb(query, cosines, sines)
            key = apply_rotary_pos_emb(key, cosines, sines)
        context = self.local_attn(query, key, value, *args, **kwargs)
        own = context.shape[_HEADS] // shares[dist.get_rank(self.spg)]
        parts = [context.shape[tokens] // ranks] * ranks
        return _exchange(context, self.spg, tokens, parts, _HEADS, [share * own for share in shares])

    def _compare(self, query: Tensor, tokens: int) -> None:
        """Raise ValueError on all ranks if they hold different numbers of tokens. Passes after the first good
        one are not checked: the check is a collective, and the host waits for it.
        """
        if self._has_compared:
            return
        own = torch.tensor([query.shape[tokens]], device=query.device)
        found = own.new_empty(dist.get_world_size(self.spg))
        dist.all_gather_into_tensor(found, own, group=self.spg)
        counts = found.tolist()
        if len(set(counts)) > 1:
            raise ValueError(
                f"DistributedAttention needs equal parts of a sequence; ranks have {counts} tokens"
            )
        self._has_compared = True

    def _exchanged_for_heads(self, value: Tensor, shares: Sequence[int], heads: int, tokens: int) -> Tensor:
        """Return whole sequences of this rank's heads."""
        count = value.shape[_HEADS]
        if count % heads:
            raise ValueError(f"{count} heads cannot be divided as the {heads} key-value heads are")
        sizes = [share * (count // heads) for share in shares]
        return _exchange(value, self.spg, _HEADS, sizes, tokens, [value.shape[tokens]] * len(shares))


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first elements of each head by the angles of its position.

    Args:
        t: (tokens, ..., width).
        freqs_cos, freqs_sin: (tokens, ..., rotated), or of a shape that broadcasts to it.
    """
    rotated = freqs_cos.shape[-1]
    turning = t[..., :rotated]
    first, second = turning.chunk(2, -1)
    turned = turning * freqs_cos + torch.cat((-second, first), -1) * freqs_sin
    return torch.cat((turned, t[..., rotated:]), -1)
