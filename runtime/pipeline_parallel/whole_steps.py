"""Trains whole steps on ranks that have all layers, so that a script runs with and without stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import ParameterError


def to_device(value: Any, device: torch.device) -> Any:
    """Return the tensors in tuples and lists on a device."""
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def loss_in(output: Any) -> Tensor:
    """Return the loss that a model has computed. Raises ParameterError if there is none."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and output.dim() == 0:
        found = output
    if not isinstance(found, Tensor):
        raise ParameterError("the model's output has no loss: pass loss_fn(output, labels) to train_batch")
    return found


E = TypeVar("E")
NO_DATA = "engine.train_batch() needs data_iter, or training_data in initialize"


def with_whole_steps(kind: type[E]) -> type[E]:
    """Return the engine class that has whole steps as well."""
    return kind if hasattr(kind, "train_batch") else type(f"Whole{kind.__name__}", (WholeSteps, kind), {})


class WholeSteps:
    """Is an engine whose ranks have all layers: it trains and evaluates whole steps as a pipeline does."""

    _own_data: Iterator[Any] | None = None
    _loss_fn: Callable[..., Tensor] | None = None

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, loss_fn: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Train one step on ``gradient_accumulation_steps`` micro-batches of ``data_iter``, by default of the
        training_data; return the mean loss over all ranks and micro-batches. Collective.

        One is a dict of the model's arguments, or a pair of inputs and labels, for which ``loss_fn(output,
        labels)`` computes the loss. Raises StopIteration at the end of the data.
        """
        engine: Any = self
        micro_batches = self._take(data_iter, loss_fn, engine.gradient_accumulation_steps())
        engine.module.train()
        losses: list[Tensor] = []
        for each in micro_batches:
            loss = self._loss_of_one(each)
            engine.backward(loss)
            losses.append(loss.detach())
            engine.step()
        engine.last_loss = mean = self._mean_of(losses)
        return mean

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss of so many micro-batches, by default as many as a step has, without training.
        Collective.
        """
        engine: Any = self
        engine._check_alive()
        count = num_micro_batches or engine.gradient_accumulation_steps()
        micro_batches = self._take(data_iter, loss_fn, count)
        was_training = engine.module.training
        engine.module.eval()
        try:
            with torch.no_grad():
                return self._evaluate(micro_batches)
        finally:
            engine.module.train(was_training)

    def _evaluate(self, micro_batches: list[Any]) -> Tensor:
        return self._mean_of([self._loss_of_one(each) for each in micro_batches])

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Do as the engine that this is mixed into; ``train_batch()`` goes on behind the last batch."""
        self._own_data = None
        return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]  # of the engine

    def _take(self, data_iter: Any, loss_fn: Callable[..., Tensor] | None, count: int) -> list[Any]:
        engine: Any = self
        chosen = loss_fn or self._loss_fn or getattr(engine.module, "loss_fn", None)
        self.__dict__["_loss_fn"] = chosen  # a module is no part of the engine
        found = self._next_ones(data_iter, count)
        if len(found) < count:
            raise StopIteration(f"data_iter ended after {len(found)} of {count} micro-batches")
        return found

    def _next_ones(self, data_iter: Any, count: int) -> list[Any]:
        """Return the next micro-batches of an iterator or the training_data, fewer at the end. Raises
        ParameterError where there are none, and for what would begin anew in each step.
        """
        engine: Any = self
        if data_iter is None:
            if engine.training_dataloader is None:
                raise ParameterError(NO_DATA)
            self._own_data = self._own_data or _endless(engine.training_dataloader)
            data_iter = self._own_data
        if iter(data_iter) is not data_iter:
            raise ParameterError(
                f"data_iter is a {type(data_iter).__name__}, which would restart in each step: call "
                "iter(...) on it once and pass the iterator"
            )
        return list(islice(data_iter, count))

    def _loss_of_one(self, micro_batch: Any) -> Tensor:
        engine: Any = self
        labels = None
        if isinstance(micro_batch, Mapping):
            given = {name: to_device(value, engine.device) for name, value in micro_batch.items()}
            if self._loss_fn is not None:
                labels = given.pop("labels", None)
            output = engine(**given)
        elif isinstance(micro_batch, (tuple, list)) and len(micro_batch) == 2:
            inputs, labels = to_device(micro_batch, engine.device)
            output = engine(*inputs) if isinstance(inputs, (tuple, list)) else engine(inputs)
        else:
            raise ParameterError(
                "expected a micro-batch that is a dict of the model's arguments or a pair of inputs and "
                f"labels, got {type(micro_batch).__name__}"
            )
        if self._loss_fn is None:
            return loss_in(output)
        return self._loss_fn(output) if labels is None else self._loss_fn(output, labels)

    def _mean_of(self, losses: list[Tensor]) -> Tensor:
        engine: Any = self
        comm, own = engine._sharded.comm, torch.stack(losses).mean()
        total: Tensor = own.double()
        comm.all_reduce_scalars(total, "sums the losses")
        mean: Tensor = total / comm.world_size
        return mean.to(torch.promote_types(own.dtype, torch.float32))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
