"""Implements the learning-rate schedules of DeepSpeed configs, with DeepSpeed's formulas.

``i`` below is ``last_batch_iteration``: -1 before the first step, then 0, 1, ... Each ``step()`` increments
it and writes the new learning rate into every param group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..config.fields import WARMUP_TYPES
from ..environment import read_environment
from ..log import warn


class Schedule(ABC):
    """Base class of the schedules: keep ``i`` and write the rates of :meth:`get_lr` to the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None
        self._per_groups: list[tuple[list[float], float | None, str]] = []
        """Holds lists of a value for each param group; what a further group gets, None for its own rate; and
        the argument's name, where each group was given a value.
        """

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rates for ``i``, one per param group."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rates last written. Raises AssertionError before the first step."""
        assert self._last_lr is not None, "call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one, or to the given iteration."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.follow_groups()
        self.last_batch_iteration = last_batch_iteration
        self._write(self.get_lr())

    def _begin(self) -> None:
        """Write the rates before the first step; end of every constructor."""
        if self.last_batch_iteration == -1:
            self._write(self.get_lr())

    def _write(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # compiled steps hold this tensor
            else:
                group["lr"] = rate
        self._last_lr = list(rates)

    def _per_group(self, value: float | Sequence[float] | None, name: str) -> list[float]:
        """Return a list of a value for each param group, None for its given rate. Groups that are added later
        are appended to it.
        """
        if isinstance(value, (list, tuple)):
            self._per_groups.append(([float(v) for v in value], None, name))
        else:
            self._per_groups.append(([], None if value is None else float(value), ""))  # type: ignore[arg-type]
        self.follow_groups()
        return self._per_groups[-1][0]

    def follow_groups(self) -> None:
        """Extend the lists to the groups of now. Raises ValueError where each group was given a value."""
        groups = self.optimizer.param_groups
        self._separate_tensors()
        # All checks before any list changes.
        for values, _, name in self._per_groups:
            if name and len(values) != len(groups):
                raise ValueError(f"{name} has {len(values)} values for {len(groups)} param groups")
        for values, rest, _ in self._per_groups:
            further = groups[len(values) :]
            values += [float(group["lr"]) if rest is None else rest for group in further]

    def _separate_tensors(self) -> None:
        """Give each group its own tensor where rates are tensors: :meth:`_write` changes them in place. torch
        gives all groups the default's, also the groups added later.
        """
        defaults: Any = self.optimizer.defaults
        seen: set[int] = set()
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if not isinstance(rate, torch.Tensor):
                continue
            if id(rate) in seen:
                group["lr"] = rate.clone()
            if defaults.get("lr") is rate:
                defaults["lr"] = rate.clone()
            seen.add(id(rate))

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration: a schedule has no other state."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved iteration."""
        self.follow_groups()
        self.last_batch_iteration = int(state["last_batch_iteration"])
        if self.last_batch_iteration >= 0:
            self._write(self.get_lr())


class LRRangeTest(Schedule):
    """Increase the rate: ``lr_range_test_min_lr`` * (1 + rate * (i + 1) / step_size), or in stairs."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size must be positive, got {lr_range_test_step_size!r}")
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._begin()

    def get_lr(self) -> list[float]:
        # The 1 is in DeepSpeed's formula, whose rates this has to give.
        fraction = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            fraction = math.floor(fraction)
        return [low * (1 + self.step_rate * fraction) for low in self.min_lr]


class OneCycle(Schedule):
    """Rise from ``cycle_min_lr`` to ``cycle_max_lr``, fall back, then decay; momentum runs inversely."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, got {cycle_first_step_size!r}")
        if second < 0:
            raise ValueError(f"cycle_second_step_size must be 0 or more, got {cycle_second_step_size!r}")
        self.first_step_size = first
        self.second_step_size = second
        self.total_size = first + second
        self.step_ratio = first / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate = decay_lr_rate
        has_betas = "betas" in optimizer.param_groups[0]
        if cycle_momentum and not has_betas:
            _warn(f"OneCycle leaves the momentum of {type(optimizer).__name__} as it is: it has no betas")
        self.cycle_momentum = cycle_momentum and has_betas
        self._min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self._max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        for low, high in zip(self._min_moms, self._max_moms, strict=True):
            if self.cycle_momentum and not 0 <= low <= high < 1:
                raise ValueError(
                    f"cycle_min_mom {low:g} and cycle_max_mom {high:g} have to be from 0 to below 1, and the "
                    "first not above the second"
                )
        self.decay_mom_rate = decay_mom_rate
        self._begin()
        if self.cycle_momentum and last_batch_iteration == -1:
            self._write_momentum(self._min_moms)  # the first step's, as in DeepSpeed

    def _write(self, rates: Sequence[float]) -> None:
        super()._write(rates)
        if self.cycle_momentum:
            self._write_momentum(self._momentum())

    def _write_momentum(self, values: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, values, strict=True):
            # DeepSpeed's formula sets the second beta to 0.99, whatever the optimizer was given.
            group["betas"] = (momentum, 0.99)
            if group.get("use_muon"):
                group["momentum"] = momentum

    def _height(self) -> float:
        """Return the height in the cycle: 0 at the minimum rate, 1 at the maximum."""
        at = self.last_batch_iteration + 1
        # The place in the cycle, from 0 to 1. DeepSpeed has this form of it, and another that is equal in
        # exact numbers would round to other rates.
        x = 1.0 + at / self.total_size - math.floor(1.0 + at / self.total_size)
        rising = x <= self.step_ratio
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs:
            inside = at % self.total_size
            half = self.first_step_size
            if not rising:
                inside = self.total_size - inside
                half = self.second_step_size
            # Multiplied first: the quotient alone may round to just below a stair.
            return math.floor(inside * stairs / half) / stairs
        return x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)

    def _decays(self) -> float:
        """Return the decay steps done; 0 during the cycle, or without decay."""
        # Without decay_step_size nothing decays; dividing by it would be an error.
        after = self.last_batch_iteration - self.total_size + 1
        return after / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.decay_lr_rate * self._decays()) for low in self.min_lrs]

    def _momentum(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            pairs = zip(self._min_moms, self._max_moms, strict=True)
            return [high - (high - low) * height for low, high in pairs]
        return [high * (1 + self.decay_mom_rate * self._decays()) for high in self._max_moms]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas for ``i``, one pair per param group; None if the momentum does not move."""
        return [(momentum, 0.99) for momentum in self._momentum()] if self.cycle_momentum else None


class WarmupLR(Schedule):
    """Warm up from ``warmup_min_lr`` to ``warmup_max_lr`` (None: the group's rate), then stay constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self._begin()

    def _after_warmup(self) -> float:
        return 1.0

    def get_lr(self) -> list[float]:
        i = self.last_batch_iteration
        if i < 0:  # before the first step; the formula has a logarithm of i + 1
            return list(self.min_lrs)
        warming = i < self.warmup_num_steps
        gamma = _warmup(i, self.warmup_num_steps, self.warmup_type) if warming else self._after_warmup()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Warm up like WarmupLR, then decay linearly to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Warm up from ``warmup_min_ratio`` of each group's rate, then follow a cosine down to ``cos_min_ratio``
    of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self._base = self._per_group(None, "lr")
        self._begin()

    def get_lr_ratio(self) -> float:
        """Return the factor on the base rates for ``i``."""
        i = self.last_batch_iteration
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            gamma = _warmup(i, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * gamma
        after = i - self.warmup_num_steps + 1
        progress = min(1.0, after / max(1, self.total_num_steps - self.warmup_num_steps))
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [base * ratio for base in self._base]


def _warmup(i: int, steps: int, kind: str) -> float:
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def _warmup_steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
        raise ValueError(f"warmup_num_steps must be a positive integer, got {steps!r}")
    # With one step, the logarithm in _warmup() would divide by log(1) = 0.
    return max(2, steps)


def _warn(message: str) -> None:
    if read_environment().rank == 0:
        warn(message)


def _warmup_type(kind: str) -> str:
    """Return a curve's name: DeepSpeed takes one that it does not know as "log"."""
    if kind in WARMUP_TYPES:
        return kind
    _warn(f"warmup_type: {kind!r} is taken as 'log': the curves are {', '.join(WARMUP_TYPES)}")
    return WARMUP_TYPES[0]


SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
