"""Routes tokens to experts by the formulas of DeepSpeed's gates, with their capacities and random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions.gumbel import Gumbel

DROPPED = -1
"""Stands for an expert that has no room for a token."""


@dataclass(slots=True)
class Routing:
    """Holds which experts each token goes to."""

    index: Tensor
    """Numbers of experts, (tokens, k), or DROPPED."""
    weights: Tensor
    """What the experts' outputs are multiplied by, (tokens, k), float32."""
    l_aux: Tensor
    """The loss that balances the experts, a scalar."""
    exp_counts: Tensor
    """How many tokens chose each expert, those without room included, (experts,)."""


def capacity_of(tokens: int, experts: int, factor: float, least: int) -> int:
    """Return how many tokens an expert takes: its even share times a factor, at least ``least``."""
    return max(math.ceil(tokens / experts * factor), least)


def route_to_one(
    logits: Tensor, capacity: int | None, used: Tensor | None, with_noise: bool, at_random: bool
) -> Routing:
    """Route each token to its likeliest expert, with its probability as weight.

    ``logits``: (tokens, experts). ``capacity`` None drops no token. ``used``: (tokens,), 0 for a token that
    goes to none. ``with_noise`` chooses by logits with Gumbel noise. ``at_random``: an expert without room
    takes tokens by chance, otherwise the first ones.
    """
    noisy = logits + _gumbel(logits) if with_noise else None
    gates = logits.softmax(1)
    chosen = (gates if noisy is None else noisy).argmax(1, keepdim=True)
    mask = _mask(gates, chosen)
    if used is not None:
        mask = mask * used.to(mask.dtype).unsqueeze(1)
    counts = mask.sum(0).detach()
    l_aux = (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1]
    if at_random:
        priority = mask * torch.rand(mask.shape, device=mask.device)
    else:
        priority = mask.float()
    mask = mask * _first(priority, len(gates) if capacity is None else capacity)
    return _routing(gates, chosen, mask, l_aux, counts)


def route_to_two(logits: Tensor, capacity: int | None, sample_second: bool) -> Routing:
    """Route each token to two experts, with probabilities that sum to 1 as weights.

    ``sample_second`` draws the second expert from the rest. The first choices of all tokens come before the
    second ones, and tokens in their order, where an expert has no room for all.
    """
    gates = logits.softmax(1)
    first = gates.argmax(1, keepdim=True)
    one = _mask(gates, first)
    if sample_second:
        logits = logits + _gumbel(logits)
    second = logits.masked_fill(one.bool(), -math.inf).argmax(1, keepdim=True)
    two = _mask(gates, second)
    before = one.sum(0)
    l_aux = (gates.mean(0) * one.float().mean(0)).mean() * gates.shape[1] ** 2
    counts = (one + two).detach().sum(0)
    if capacity is not None:
        places = two.cumsum(0) - 1 + before
        one, two = one * (one.cumsum(0) <= capacity), two * (places < capacity)
    found = _routing(gates, torch.cat([first, second], 1), one + two, l_aux, counts)
    found.weights = _normalised(found.weights)
    return found


def route_to_several(logits: Tensor, k: int, capacity: int | None) -> Routing:
    """Route each token to its k likeliest experts, with probabilities that sum to 1 over those with room.

    An expert without room for all takes the tokens with the largest probabilities.
    """
    gates = logits.softmax(1)
    largest, chosen = gates.topk(k, dim=1)
    mask = _mask(gates, chosen)
    counts = mask.detach().sum(0)
    l_aux = (gates.mean(0) * mask.float().mean(0)).mean() * gates.shape[1] ** 2 / k
    if capacity is not None:
        priority = torch.zeros_like(gates).scatter(1, chosen, largest).detach()
        mask = mask * _first(priority, capacity)
    found = _routing(gates, chosen, mask, l_aux, counts)
    found.weights = _normalised(found.weights)
    return found


def _gumbel(like: Tensor) -> Tensor:
    zero, one = (torch.tensor(value, device=like.device) for value in (0.0, 1.0))
    noise: Tensor = Gumbel(zero, one).rsample(like.shape)
    return noise


def _mask(gates: Tensor, chosen: Tensor) -> Tensor:
    """Return 1 where a token has chosen an expert, (tokens, experts), int64."""
    return torch.zeros_like(gates, dtype=torch.long).scatter(1, chosen, 1)


def _first(priority: Tensor, capacity: int) -> Tensor:
    """Return 1 for the tokens of the highest priority for each expert, the earlier ones among equals."""
    order = priority.detach().sort(dim=0, descending=True, stable=True).indices[:capacity]
    return torch.zeros_like(priority, dtype=torch.long).scatter(0, order, 1)


def _routing(gates: Tensor, chosen: Tensor, mask: Tensor, l_aux: Tensor, counts: Tensor) -> Routing:
    kept = mask.gather(1, chosen) > 0
    weights = gates.gather(1, chosen) * kept
    return Routing(chosen.masked_fill(~kept, DROPPED), weights, l_aux, counts)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)
