"""Lets one training loop run on both sides: by plain torch in one process, and under an engine at a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zlaunch

MICRO = 2
"""Samples of one micro-batch of one rank."""
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
"""The default optimizer: it shows gradients of the wrong size, and zeros where there should be none."""


def settings(stage: int, **extra: Any) -> dict[str, Any]:
    """Give a config in which small blocks are sharded too."""
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_module_granularity_threshold": 0,
        "reduce_bucket_size": 4000,
    }
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {**zero, **extra.pop("zero", {})},
        **extra,
    }


class Trainer:
    """Drives one model: ``call`` is what the script calls, ``module`` the user's own module."""

    def __init__(self, side: Side, call: Any, module: Any, optimizer: Any, scheduler: Any) -> None:
        self.side, self.call, self.module = side, call, module
        self.optimizer, self.scheduler = optimizer, scheduler
        self.accumulation, self.clip = 1, 0.0
        self._micro = 0

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Back-propagate the mean loss of a micro-batch."""
        if self.side.is_plain:
            (loss / self.accumulation).backward(**options)
        else:
            self.call.backward(loss, **options)

    def step(self) -> None:
        """Take the optimizer's step where one is due."""
        if not self.side.is_plain:
            self.call.step()
            return
        self._micro += 1
        if self._micro % self.accumulation:
            return
        if self.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def drop(self) -> None:
        """Forget the gradients of a bad batch."""
        self.optimizer.zero_grad() if self.side.is_plain else self.call.zero_grad()

    def values(self) -> dict[str, Tensor]:
        """Give the present parameters and buffers; collective under an engine."""
        with torch.no_grad():
            state = self.module.state_dict()
        return {name: v.detach().clone() for name, v in state.items() if isinstance(v, Tensor)}

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Make parameters writable in place: at stage 3 they have to be gathered."""
        if self.side.stage == 3:
            parameters = list(self.module.parameters())
            with zlaunch.zero.GatheredParameters(parameters, modifier_rank=0):
                yield
        else:
            yield


class Side:
    """Runs one feature one way, and keeps what is compared afterwards."""

    def __init__(self, stage: int | None, folder: Path) -> None:
        self.stage, self.folder = stage, folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.records: dict[str, Tensor] = {}
        self.shares: set[str] = set()
        self.trainers: list[Trainer] = []

    @property
    def is_plain(self) -> bool:
        """Whether this is plain torch."""
        return self.stage is None

    def start(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        section: Mapping[str, Any] | None = None,
        client: bool = False,
        groups: Callable[[Any], list[Any]] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        accumulation: int = 1,
        clip: float = 0.0,
        zero: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = torch.float64,
        **initialize: Any,
    ) -> Trainer:
        """Make ``model`` train: under an engine, or with a torch optimizer.

        ``optimizer`` makes the optimizer from parameters or groups; under an engine ``section`` replaces it
        by a section of the config, and ``client`` hands over an instance.
        """
        model = model.to(dtype) if dtype is not None else model
        own: Any
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, **SGD))
        if self.stage is None:
            parameters = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
            own = make(parameters)
            trainer = Trainer(self, model, model, own, scheduler(own) if scheduler else None)
        else:
            extra = dict(config or {})
            if section is not None:
                extra["optimizer"] = dict(section)
            elif optimizer is None:
                extra["optimizer"] = {"type": "SGD", "params": SGD}
            else:
                listed = groups(model) if groups else list(model.parameters())
                initialize["optimizer"] = make(listed) if client else make
            if groups is not None and not client:
                initialize["model_parameters"] = groups(model)
            engine, own, _, schedule = zlaunch.initialize(
                model=model,
                lr_scheduler=scheduler,
                config=settings(
                    self.stage,
                    zero=dict(zero or {}),
                    gradient_accumulation_steps=accumulation,
                    gradient_clipping=clip,
                    **extra,
                ),
                **initialize,
            )
            trainer = Trainer(self, engine, engine.module, own, schedule)
        trainer.accumulation, trainer.clip = accumulation, clip
        self.trainers.append(trainer)
        return trainer

    def share(self, value: Any) -> Any:
        """Give this rank's rows of a global batch; plain torch takes all."""
        if self.is_plain or not isinstance(value, Tensor):
            return value
        return value.chunk(self.world)[self.rank]

    def record(self, name: str, value: Any) -> None:
        """Keep a value that is the same on every rank."""
        self.records[name] = torch.as_tensor(value).detach().clone()

    def record_mean(self, name: str, value: Any) -> None:
        """Keep a value whose mean over the ranks is compared."""
        mean = torch.as_tensor(value).detach().double().clone()
        if not self.is_plain:
            dist.all_reduce(mean)
            mean /= self.world
        self.records[name] = mean

    def record_share(self, name: str, value: Tensor) -> None:
        """Keep a tensor of which each rank has its rows."""
        self.records[name] = value.detach().clone()
        self.shares.add(name)

    def refused(self, pattern: str) -> Any:
        """Expect an error that says ``pattern``; for engines only."""
        return pytest.raises(Exception, match=pattern)

    def finish(self) -> None:
        """Keep the final parameters of every model and end the engines."""
        for index, trainer in enumerate(self.trainers):
            for name, value in trainer.values().items():
                self.records[f"model {index}: {name}"] = value
        self.close()

    def close(self) -> None:
        """End the engines."""
        for trainer in self.trainers:
            if not self.is_plain:
                trainer.call.destroy()
        self.trainers.clear()

    def close_after_error(self) -> None:
        """End the engines after an expected error."""
        with suppress(Exception):
            self.close()
